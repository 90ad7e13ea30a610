"""The command on several ranks in processes of its own: started in every way, signalled and killed while it works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from paceline.run.checkpoint.store import CheckpointStore
from paceline.verbs.train import train
from tests.e2e.test_processes import SLOW_LOSS, steps, when
from tests.e2e.whole_runs import STEPS, recipe
from tests.testing.hub import LoopbackHub
from tests.testing.ports import free_port
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(170),
    pytest.mark.usefixtures("forked_interpreters"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

PACELINE = ["-m", "paceline", "train"]
TORCHRUN = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *PACELINE]


@pytest.fixture(scope="module")
def workplace(reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipe.yaml, whose steps take a tenth of a second, and the undisturbed run of one process."""
    place = tmp_path_factory.mktemp("workplace")
    (place / "slow_loss.py").write_text(SLOW_LOSS)
    model = write_tiny_model(place / "model", tiny_bert_config())
    chosen = recipe(
        model,
        reviews,
        optimizer={"type": "sgd", "lr": 0.05},
        loop={"checkpoint_every": 1},
        observe={"console": "plain", "log_every": 1},
    )
    train(chosen, out=place / "undisturbed")
    plain = {**chosen.plain(), "task": {"loss": "slow_loss:loss"}}
    (place / "recipe.yaml").write_text(yaml.safe_dump(plain))
    return place


@contextmanager
def started(
    place: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A Python command with its output in a pipe; whatever happens, nothing of it is left."""
    base = {"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(place / "cache")}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=place,
        env={**os.environ, **base, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        ranks = rank_ids(process.pid).values()
        if process.poll() is None:
            process.kill()
            process.communicate()
        for rank in ranks:
            try:
                os.kill(rank, signal.SIGKILL)
            except ProcessLookupError:
                continue


def rank_ids(parent: int) -> dict[int, int]:
    """Rank -> process id of those that a launcher has started."""
    found = {}
    for process in (path for path in Path("/proc").iterdir() if path.name.isdecimal()):
        try:
            own_parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (process / "environ").read_bytes().split(b"\0") if own_parent == parent else []
        except OSError:  # it has ended meanwhile
            continue
        found.update({int(v[5:]): int(process.name) for v in variables if v.startswith(b"RANK=")})
    return found


def assert_as_undisturbed(place: Path, name: str) -> None:
    found, expected = (load_file(place / run / "model" / "model.safetensors") for run in (name, "undisturbed"))
    for key, tensor in expected.items():
        far = (found[key] - tensor).norm() / tensor.norm().clamp(min=1e-3)
        assert far < 1e-6, f"{key}: {far:.1e} away, relative to its norm"


def test_our_launcher_signalled_then_a_rank_killed(workplace: Path) -> None:
    folder = workplace / "launched"
    with started(workplace, *PACELINE, "recipe.yaml", "--out", "launched", "--processes", "2") as launcher:
        when(launcher, lambda: steps(folder) >= 3)
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, errors
    (line,) = [line for line in errors.splitlines() if "stopped by" in line]
    assert line == f"paceline: {(folder / 'preempted').read_text().strip()}", "another message than in the folder"
    assert "stopped by SIGTERM after step" in line

    stopped_at = steps(folder)
    with started(workplace, *PACELINE, "launched", "--resume", "--trust-references", "--processes", "2") as launcher:
        when(launcher, lambda: steps(folder) >= stopped_at + 3)
        os.kill(rank_ids(launcher.pid)[1], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 137, errors
    assert "paceline: rank 1 failed first: ended by SIGKILL" in errors
    assert "Traceback" not in errors
    assert not (folder / "preempted").exists(), "this was no preemption"
    assert CheckpointStore(folder / "checkpoints", 1).newest().step >= stopped_at + 1

    with started(workplace, *PACELINE, "launched", "--resume", "--trust-references") as alone:
        _, errors = alone.communicate(timeout=60)
    assert alone.returncode == 0, errors
    assert steps(folder) == STEPS
    assert_as_undisturbed(workplace, "launched")


def test_torchrun_signalled_then_two_commands_by_hand(workplace: Path) -> None:
    """The agent turns exit code 75 into 1: the marker in the folder says what it was."""
    folder = workplace / "torchrun"
    with started(workplace, *TORCHRUN, "recipe.yaml", "--out", "torchrun") as agent:
        when(agent, lambda: steps(folder) >= 3)
        os.kill(rank_ids(agent.pid)[1], signal.SIGUSR1)
        _, errors = agent.communicate(timeout=60)
    assert agent.returncode == 1, errors
    assert "stopped by SIGUSR1 to rank 1 after step" in (folder / "preempted").read_text()

    meeting = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as both:
        command = [
            *PACELINE,
            "torchrun",
            "--resume",
            "--trust-references",
            "--timeout",
            "60",
            "--init",
            meeting,
            "--world-size",
            "2",
        ]
        ranks = [both.enter_context(started(workplace, *command, "--rank", str(rank))) for rank in (0, 1)]
        for rank in ranks:
            _, errors = rank.communicate(timeout=90)
            assert (rank.returncode, errors) == (0, "")
    assert not (folder / "preempted").exists()
    assert steps(folder) == STEPS
    assert_as_undisturbed(workplace, "torchrun")


def test_a_killed_first_rank_is_told_in_lines_that_people_read(workplace: Path) -> None:
    """Without torch's C++ frames, which are of no use to whoever has to look at the other rank."""
    folder, meeting = workplace / "first-killed", f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as both:
        command = [*PACELINE, "recipe.yaml", "--out", str(folder), "--timeout", "60"]
        command += ["--init", meeting, "--world-size", "2"]
        first, second = (both.enter_context(started(workplace, *command, "--rank", str(rank))) for rank in (0, 1))
        when(first, lambda: steps(folder) >= 3)
        first.kill()
        first.communicate(timeout=20)
        _, errors = second.communicate(timeout=90)
    assert second.returncode == 2, errors
    assert "rank 0 cannot be reached" in errors
    assert len(errors.splitlines()) <= 4, errors


def test_a_model_is_downloaded_once_a_machine(workplace: Path, tmp_path: Path) -> None:
    with LoopbackHub({"someone/tiny": workplace / "model"}) as hub:
        arguments = ["recipe.yaml", "--model", "someone/tiny", "--out", "hub", "--set", "loop.max_steps=4"]
        variables = hub.environment(tmp_path / "home")
        with started(workplace, *PACELINE, *arguments, "--processes", "2", variables=variables) as launcher:
            shown, errors = launcher.communicate(timeout=100)
        assert launcher.returncode == 0, errors
        fetched = Counter(
            r.path.rpartition("/")[2] for r in hub.requests if r.method == "GET" and "/resolve/" in r.path
        )
    assert fetched["model.safetensors"] == 1, fetched
    assert set(fetched.values()) == {1}, f"fetched again: {fetched}"
    assert "[rank 1]" not in shown + errors, "the second rank says what the first has said"


def test_bad_input_is_told_once(workplace: Path) -> None:
    """Of environment variables, before anything is loaded; of the recipe, by all ranks and yet once."""
    by_hand = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "2"}
    with started(workplace, *PACELINE, "recipe.yaml", variables=by_hand) as rank:
        _, errors = rank.communicate(timeout=30)
    assert rank.returncode == 2
    assert errors.startswith("paceline: RANK=2 with WORLD_SIZE=2"), errors
    few = ["--set", "loop.batch_size=1", "--set", "loop.micro_batch_size=1"]
    with started(workplace, *PACELINE, "recipe.yaml", "--out", "few", *few, "--processes", "2") as launcher:
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 2, errors
    assert errors.count("loop.batch_size = 1: 2 processes") == 1, errors
    assert len(errors.splitlines()) == 3, errors
    assert not (workplace / "few").exists()


@pytest.mark.parametrize("size", ["1", "2"])
def test_torchruns_ranks_tell_once_what_all_find(workplace: Path, size: str) -> None:
    """Before they have joined, of a batch too small; after, of data that are not there."""
    wrong = {
        "1": ["--set", "loop.micro_batch_size=1"],
        "2": ["--data", "nowhere.csv", "--set", "loop.micro_batch_size=2"],
    }
    arguments = ["recipe.yaml", "--out", "wrong", "--set", f"loop.batch_size={size}", *wrong[size]]
    with started(workplace, *TORCHRUN, *arguments) as agent:
        _, errors = agent.communicate(timeout=90)
    assert agent.returncode == 1, errors
    said = [line for line in errors.splitlines() if line.startswith("paceline: ")]
    assert said == [{"1": "paceline: loop.batch_size = 1: 2 processes", "2": said[0]}[size]], errors
    assert size == "1" or "nowhere.csv" in said[0], errors


def test_commands_by_hand_say_which_rank_they_are(workplace: Path) -> None:
    meeting = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as both:
        command = [*PACELINE, "recipe.yaml", "--timeout", "60", "--init", meeting, "--world-size", "2"]
        ranks = [
            both.enter_context(started(workplace, *command, "--rank", str(rank), "--out", f"by-{rank}"))
            for rank in (0, 1)
        ]
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert said[0].startswith("paceline: the command: not the same on all ranks\n"), said
    assert said[1].startswith("paceline: rank 1: the command: not the same on all ranks\n"), said
    assert not list(workplace.glob("by-*"))
