"""The options of ``train`` that start ranks or join them; what they start is stood in for."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster import LAUNCHER, Place
from paceline.errors import DataError
from paceline.verbs import cli, launch

RECIPE = """
name: told
model: {config: {model_type: bert}, vocabulary_size: 900}
data: {source: old.csv, text: review}
"""

BY_HAND = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}

Run = Callable[..., tuple[int, str]]


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

    def noted(command: list[str], ranks: launch.Ranks) -> int:
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
    assert (ranks.count, ranks.cards) == (2, "")


def test_a_resumed_run_is_launched_too(run: Run, launched: list[Any]) -> None:
    assert run("runs/x", "--resume", "--processes=2") == (42, "")
    assert launched[0][0][-3:] == ["train", "runs/x", "--resume"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["none.yaml", "--processes", "2"], ("none.yaml: no such recipe",)),
        (["r.yaml", "--processes", "2", "--set", "loop.epoch=3"], ("loop.epoch = 3: unknown key",)),
        (["--resume", "--processes", "2"], ("no run folder given",)),
        (["r.yaml", "--gpus", "0"], ("--gpus", "greater than or equal to 1")),
        (["r.yaml", "--processes", "two"], ("--processes", "integer")),
        (["r.yaml", "--timeout", "0", "--processes", "2"], ("--timeout",)),
        (
            ["r.yaml", "--gpus", "2", "--processes", "2"],
            ("--gpus 2 with --processes 2", "paceline train r.yaml --gpus"),
        ),
        (["r.yaml", "--processes", "2", "--rank", "0"], ("--processes 2 with --rank", "starts all ranks here")),
        (["r.yaml", "--processes", "2", "--set", "device=cuda"], ("device = cuda", "--gpus 2")),
    ],
)
def test_mistakes_are_found_before_any_process_starts(
    run: Run, launched: list[Any], arguments: list[str], parts: tuple[str, ...]
) -> None:
    code, err = run(*arguments)
    assert (code, launched) == (2, [])
    for part in parts:
        assert part in err, err


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
        started="environment",
        init_method="tcp://127.0.0.1:29500",
    )
    assert trained == [{"out": None, "place": place}, {"place": place, "timeout_seconds": 7}]


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
