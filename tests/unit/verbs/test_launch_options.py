"""The options of ``train`` that start ranks or join them; what they start is stood in for."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import DataError
from paceline.machine import facts
from paceline.machine.cluster import LAUNCHER, Place
from paceline.machine.facts import Facts, Gpu
from paceline.recipe import Recipe
from paceline.run_folder import RunFolder
from paceline.verbs import cli, launch

RECIPE = """
name: told
model: {config: {model_type: bert}, vocabulary_size: 900}
data: {source: old.csv, text: review}
"""

BY_HAND = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}

DEVICES = {"--gpus": "cuda", "--processes": "cpu"}

Run = Callable[..., tuple[int, str]]


def machine(*gpus: Gpu) -> Facts:
    return Facts(
        python="3.11",
        platform="Linux",
        cpu_model=None,
        cpu_count=2,
        memory_bytes=None,
        gpus=gpus,
        versions={"torch": "2.13"},
        torch_cuda="13.0",
    )


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has two recent ones."""
    gpus = [Gpu(name="NVIDIA H200", compute_capability=(9, 0), uuid=f"GPU-{number}") for number in range(2)]
    monkeypatch.setattr(facts, "this_machine", lambda: machine(*gpus))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs ``paceline train`` with r.yaml in the current folder: exit code and standard error."""
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", "train", *arguments])
        try:
            cli.main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
        return code, capsys.readouterr().err

    return invoke


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], launch.Ranks]]:
    """The launches made; each one exits with 42."""
    made: list[tuple[list[str], launch.Ranks]] = []

    def noted(command: list[str], ranks: launch.Ranks, *, makes_run: bool) -> int:
        assert makes_run, "it ends with 75 when it is asked to stop"
        made.append((command, ranks))
        return 42

    monkeypatch.setattr(launch, "launch", noted)
    return made


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The named arguments that ``train`` and ``resume`` were called with, less when the process began."""
    calls: list[dict[str, Any]] = []

    def noted(*_: Any, started: float, **named: Any) -> None:
        calls.append(named)

    fake = types.ModuleType("paceline.verbs.train")
    fake.train = fake.resume = noted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.verbs.train", fake)
    return calls


def test_the_same_command_is_run_as_each_rank(run: Run, launched: list[Any]) -> None:
    code, err = run("r.yaml", "--processes", "2", "--set", "seed=3", "--timeout", "30", "--out", "here")
    assert (code, err) == (42, "")
    ((command, ranks),) = launched
    assert command[0] == sys.executable
    assert command[-8:] == ["train", "r.yaml", "--set", "seed=3", "--timeout", "30", "--out", "here"]
    assert (ranks.count, ranks.gpus) == (2, "")


@pytest.fixture
def begun(tmp_path: Path) -> Callable[[str], None]:
    """Makes runs/x, as a run of r.yaml that a signal stopped, on the CPU or on GPUs."""

    def make(device: str) -> None:
        with RunFolder.create(tmp_path / "runs" / "x") as folder:
            folder.write_recipe(Recipe.load(tmp_path / "r.yaml").with_settings([f"device={device}"]))

    return make


def test_a_resumed_run_is_launched_too(run: Run, launched: list[Any], begun: Callable[[str], None]) -> None:
    begun("cpu")
    assert run("runs/x", "--resume", "--processes=2") == (42, "")
    assert launched[0][0][-3:] == ["train", "runs/x", "--resume"]


@pytest.mark.parametrize(
    ("device", "option", "parts"),
    [
        (
            "cpu",
            "--gpus",
            ("device = cpu with --gpus 2", "resume --gpus 2 --set device=cuda, or paceline", "--processes 2"),
        ),
        ("cuda", "--processes", ("device = cuda with --processes 2", "resume --processes 2 --set device=cpu")),
    ],
)
def test_a_resumed_run_does_not_change_its_device_in_silence(
    run: Run,
    launched: list[Any],
    begun: Callable[[str], None],
    two_gpus: None,
    device: str,
    option: str,
    parts: tuple[str, ...],
) -> None:
    begun(device)
    code, err = run("runs/x", "--resume", option, "2")
    assert (code, launched) == (2, [])
    for part in parts:
        assert part in err, err
    assert run("runs/x", "--resume", option, "2", "--set", f"device={DEVICES[option]}") == (42, "")


def test_there_has_to_be_a_run_to_resume(run: Run, launched: list[Any], begun: Callable[[str], None]) -> None:
    assert run("runs/x", "--resume", "--processes", "2")[0] == 2
    begun("cpu")
    Path("runs/x/summary.json").write_text("{}")
    code, err = run("runs/x", "--resume", "--processes", "2")
    assert (code, launched) == (2, [])
    assert "runs/x: the run is finished" in err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["none.yaml", "--processes", "2"], ("none.yaml: no such recipe",)),
        (["r.yaml", "--processes", "2", "--set", "loop.epoch=3"], ("loop.epoch = 3: unknown key",)),
        (["--resume", "--processes", "2"], ("no run folder given",)),
        (["r.yaml", "--gpus", "0"], ("--gpus '0'", "from 1, or all")),
        (["r.yaml", "--gpus", "0,1"], ("--gpus '0,1'", "--devices 0,1")),
        (["r.yaml", "--processes", "two"], ("--processes", "integer")),
        (["r.yaml", "--timeout", "0", "--processes", "2"], ("--timeout",)),
        (
            ["r.yaml", "--gpus", "2", "--processes", "2"],
            ("--gpus 2 with --processes 2", "paceline train r.yaml --gpus"),
        ),
        (["r.yaml", "--processes", "2", "--rank", "0"], ("--processes 2 with --rank", "starts all ranks here")),
        (["r.yaml", "--processes", "2", "--set", "device=cuda"], ("device = cuda", "--gpus 2")),
        (
            ["r.yaml", "--processes", "4", "--set", "loop.batch_size=3"],
            ("loop.batch_size = 3: 4 processes", "r.yaml --processes 4 --set loop.batch_size=4, or start 3 processes"),
        ),
        (
            ["r.yaml", "--processes", "2", "--set", "techniques.fusion=true"],
            ("techniques.fusion = true", "r.yaml --processes 2 --set techniques.fusion=false"),
        ),
        (
            ["r.yaml", "--processes", "2", "--set", "parallel.strategy=dp"],
            ("parallel.strategy = dp", "there are 2 processes", "--set parallel.strategy=auto"),
        ),
        (
            ["r.yaml", "--processes", "2", "--set", "parallel.backend=nccl"],
            ("parallel.backend = nccl", "between GPUs", "--set parallel.backend=auto"),
        ),
        (
            ["r.yaml", "--processes", "2", "--set", "parallel.backend=mpi"],
            ("parallel.backend = mpi", "mpirun starts", "--set parallel.backend=auto"),
        ),
        (
            ["r.yaml", "--gpus", "2", "--set", "parallel.backend=mpi"],
            ("parallel.backend = mpi", "mpirun starts", "--set parallel.backend=auto"),
        ),
        (["r.yaml", "--gpus", "2", "--set", "parallel.shard_size=3"], ("no whole number of groups of 3", "=null")),
        (["r.yaml", "--devices", "0,1", "--set", "techniques.compile=true"], ("needs triton", "compile=false")),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_mistakes_are_found_before_any_process_starts(
    run: Run, launched: list[Any], arguments: list[str], parts: tuple[str, ...]
) -> None:
    code, err = run(*arguments)
    assert (code, launched) == (2, [])
    for part in parts:
        assert part in err, err


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["r.yaml", "--processes", "4", "--set", "loop.batch_size=3"], "loop.batch_size=4"),
        (["r.yaml", "--processes", "2", "--set", "techniques.fusion=true"], "techniques.fusion=false"),
    ],
)
def test_the_corrected_command_is_right(run: Run, launched: list[Any], arguments: list[str], setting: str) -> None:
    _, err = run(*arguments)
    corrected = err.partition("fix: paceline train ")[2].partition(",")[0].split()
    assert corrected == [*arguments[:3], "--set", setting], "the setting is named once"
    assert run(*corrected) == (42, "")


@pytest.mark.parametrize("setting", ["device=cpu", "device=cuda"])
def test_a_corrected_command_names_one_device(
    run: Run, launched: list[Any], two_gpus: None, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    option = {"device=cpu": "--gpus", "device=cuda": "--processes"}[setting]
    _, err = run("r.yaml", option, "2", "--set", setting)
    for corrected in err.partition("fix: ")[2].strip().split(", or "):
        assert "device" not in corrected.partition("--set device")[2], corrected
        assert run(*corrected.split()[2:]) == (42, "")
    # where no GPU can be used, the way to the CPU is one
    monkeypatch.setattr(facts, "this_machine", machine)
    _, err = run("r.yaml", "--gpus", "2", "--set", "device=cuda")
    corrected = err.partition("fix: ")[2].partition(" trains on")[0].split()
    assert run(*corrected[2:]) == (42, "")


def test_what_ranks_find_out_of_the_gpus_that_are_left(
    run: Run, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an old GPU and a recent one only the recent one computes in bf16."""
    old = Gpu(name="Tesla V100", compute_capability=(7, 0), uuid="GPU-0")
    monkeypatch.setattr(facts, "this_machine", lambda: machine(old, Gpu(name="NVIDIA H200", uuid="GPU-1")))
    bf16 = ["--set", "techniques.precision=bf16"]
    assert run("r.yaml", "--devices", "1", *bf16) == (42, "")
    code, err = run("r.yaml", "--devices", "0", *bf16)
    assert code == 2
    assert "needs compute capability 8.0; Tesla V100 has 7.0" in err


def test_a_rank_starts_no_ranks(run: Run, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BY_HAND.items():
        monkeypatch.setenv(name, value)
    code, err = run("r.yaml", "--processes", "2")
    assert (code, launched) == (2, [])
    assert "--processes 2: this process is a rank already" in err


def test_options_become_a_place(run: Run, trained: list[dict[str, Any]]) -> None:
    joining = ("--init", "tcp://127.0.0.1:29500", "--rank", "1", "--world-size", "2")
    assert run("r.yaml", *joining) == (0, "")
    assert run("runs/x", "--resume", *joining, "--timeout", "7") == (0, "")
    place = Place(
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        is_local_guessed=True,
        started="environment",
        init_method="tcp://127.0.0.1:29500",
    )
    untrusted = {"trust_remote_code": False, "trust_references": False}
    assert trained == [{"out": None, "place": place}, {"place": place, "timeout_seconds": 7, **untrusted}]


def test_a_time_limit_is_for_ranks(run: Run, trained: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    code, err = run("r.yaml", "--timeout", "7")
    assert code == 2
    assert "--timeout 7\n  why: nobody waits for anybody" in err
    for name, value in BY_HAND.items():
        monkeypatch.setenv(name, value)
    assert run("r.yaml", "--timeout", "7") == (0, "")
    assert [(call["place"].rank, call["timeout_seconds"]) for call in trained] == [(1, 7)]


def test_a_plain_run_is_told_nothing_of_ranks(
    run: Run, trained: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run("r.yaml") == (0, "")
    assert trained == [{"out": None}]


def test_half_a_place_is_refused(run: Run, trained: list[dict[str, Any]]) -> None:
    code, err = run("r.yaml", "--rank", "1")
    assert (code, trained) == (2, [])
    assert "--init and --world-size: missing" in err


def test_a_stray_launcher_variable_swallows_no_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that a rank starts inherits it."""
    monkeypatch.setenv(LAUNCHER, "1")
    fake = types.ModuleType("paceline.verbs.train")

    def fail(*_: Any, **__: Any) -> None:
        raise DataError("empty text", file="a.csv")

    fake.train = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.verbs.train", fake)
    assert run("r.yaml") == (2, "paceline: a.csv: empty text\n")
