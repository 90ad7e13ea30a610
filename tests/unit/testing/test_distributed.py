"""The pool of ranks: what it hands over, what it says of a failure, and that it leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.seams import Packed, World
from tests.testing.distributed import RankError, run_distributed, run_processes

SIZES = pytest.mark.parametrize("size", [2, 4])


def is_running(process: int) -> bool:
    """Whether there is such a process; one that has ended and waits for its parent is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(processes: list[int], seconds: float = 5.0) -> list[int]:
    """The processes that still run after that long."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if is_running(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def returns(world: World, *arguments: Any) -> tuple[Any, ...]:
    return world.rank, *arguments


def number(rank: int) -> int:
    return 10 * rank


def process(world: World) -> int:
    return os.getpid()


@SIZES
def test_results_come_in_rank_order_with_the_arguments(size: int) -> None:
    arguments = (1, "text", {"a": [None]}, torch.float16, Path("folder"))
    assert run_distributed(returns, size, *arguments) == [(rank, *arguments) for rank in range(size)]


def test_tensors_are_sent_by_value() -> None:
    parameter = torch.nn.Parameter(torch.randn(2))
    view = torch.arange(6.0).view(2, 3).t()
    packed = Packed(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0]), 2)
    for _, one, other, batch in run_distributed(returns, 2, parameter, view, packed):
        assert isinstance(one, torch.nn.Parameter)
        assert torch.equal(one, parameter)
        assert torch.equal(other, view)
        assert isinstance(batch, Packed)
        assert torch.equal(batch.cu_seqlens, packed.cu_seqlens)
        assert not one.is_shared()


@SIZES
def test_the_processes_are_used_again(size: int) -> None:
    first = run_distributed(process, size)
    assert run_distributed(process, size) == first
    assert len(set(first)) == size
    assert os.getpid() not in first


def test_processes_of_a_call_of_their_own_end_with_it() -> None:
    assert run_processes(number, 3) == [0, 10, 20]
    processes = run_processes(own_process, 2)
    assert not wait_for_end(processes)


def own_process(rank: int) -> int:
    return os.getpid()


def prints(world: World) -> None:
    print(f"first of {world.rank}\nand second")
    os.system(f"echo from a program of {world.rank} >&2")


@SIZES
def test_every_printed_line_has_its_rank(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    run_distributed(prints, size)
    printed = capsys.readouterr().out
    for rank in range(size):
        expected = [f"first of {rank}", "and second", f"from a program of {rank}"]
        assert [line for line in printed.splitlines() if line.startswith(f"[rank {rank}] ")] == [
            f"[rank {rank}] {line}" for line in expected
        ]
    run_distributed(returns, size)
    assert not capsys.readouterr().out, "what was printed before is not printed again"


class Custom(Exception):
    """Cannot be made from its message alone."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number}: {text}")


def fails(world: World, error: BaseException | None, *ranks: int) -> None:
    if world.rank in ranks:
        raise Custom(3, "custom") if error is None else error
    world.barrier("the others")


def test_a_failure_keeps_its_type_and_tells_of_every_rank() -> None:
    with pytest.raises(KeyError, match="planted") as caught:
        run_distributed(fails, 4, KeyError("planted"), 1, 2)
    notes = "\n".join(caught.value.__notes__)
    for rank in (1, 2):
        assert f"[rank {rank}] Traceback" in notes
        assert notes.count("KeyError: 'planted'") == 2
    for rank in (0, 3):
        assert f"[rank {rank}] was not done; it was here:" in notes
        assert "in barrier" in notes, "the stack of a rank that waits"


def test_an_error_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed: Custom: 3: custom") as caught:
        run_distributed(fails, 2, None, 0)
    assert "in fails" in "\n".join(caught.value.__notes__)


def returns_a_lock(world: World) -> Any:
    return threading.Lock()


def test_a_result_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        run_distributed(returns_a_lock, 2)


def exits(world: World) -> None:
    sys.exit(3)


def test_even_an_exit_is_a_failure_of_that_rank() -> None:
    with pytest.raises(SystemExit, match="3"):
        run_distributed(exits, 2)


def hangs(world: World, *ranks: int) -> None:
    if world.rank in ranks:
        time.sleep(60)


@SIZES
def test_ranks_that_hang_are_killed_and_it_is_said_where_they_were(size: int) -> None:
    processes = run_distributed(process, size)
    begun = time.monotonic()
    with pytest.raises(RankError, match=f"rank {size - 1} of {size} not done in 0.5 s") as caught:
        run_distributed(hangs, size, size - 1, timeout_seconds=0.5)
    assert time.monotonic() - begun < 4
    (note,) = caught.value.__notes__
    assert note.startswith(f"[rank {size - 1}] was not done; it was here:\n")
    assert "in hangs" in note
    assert not wait_for_end(processes)


def test_a_rank_that_is_stopped_is_killed_too() -> None:
    run_distributed(process, 2)  # so that the ranks have begun
    with pytest.raises(RankError, match="rank 1 of 2 not done") as caught:
        run_distributed(sends_itself, 2, 1, signal.SIGSTOP, timeout_seconds=0.5)
    assert "gives no sign" in "\n".join(caught.value.__notes__)


def sends_itself(world: World, rank: int, number: int) -> None:
    if world.rank == rank:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_rank_that_is_killed_is_named(number: int) -> None:
    with pytest.raises(RankError, match=f"rank 1 of 2 was killed by {signal.Signals(number).name} before it was done"):
        run_distributed(sends_itself, 2, 1, number)


def leaves(world: World) -> None:
    if world.rank == 0:
        os._exit(7)


def test_a_rank_that_leaves_is_named() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 ended with exit code 7"):
        run_distributed(leaves, 2)


def test_the_next_call_after_a_failure_has_ranks_of_its_own() -> None:
    before = run_distributed(process, 2)
    with pytest.raises(RankError):
        run_distributed(leaves, 2)
    after = run_distributed(process, 2)
    assert not set(before) & set(after)
    assert not wait_for_end(before)


def test_a_function_that_ranks_cannot_import_is_refused() -> None:
    def inner(world: World) -> None: ...

    for function in (inner, lambda world: None):
        with pytest.raises(TypeError, match="define it in a module"):
            run_distributed(function, 2)


def surroundings(world: World, name: str) -> tuple[str | None, str, int, str | None]:
    return os.environ.get(name), str(Path.cwd()), torch.get_num_threads(), os.environ.get("RANK")


def test_ranks_see_the_callers_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = run_distributed(surroundings, 2, "PLANTED")
    assert before == [(None, str(Path.cwd()), 1, None)] * 2
    monkeypatch.setenv("PLANTED", "x")
    monkeypatch.chdir(tmp_path)
    assert run_distributed(surroundings, 2, "PLANTED") == [("x", str(tmp_path), 1, None)] * 2
    monkeypatch.undo()
    assert run_distributed(surroundings, 2, "PLANTED") == before


def warns(world: World) -> None:
    warnings.warn("planted", DeprecationWarning, stacklevel=1)


def test_warnings_are_errors_where_they_are_the_callers() -> None:
    with pytest.raises(DeprecationWarning, match="planted"):
        run_distributed(warns, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "plan", DeprecationWarning)
        assert run_distributed(warns, 2) == [None, None]


def draws(world: World) -> float:
    return torch.rand(()).item()


def test_random_numbers_begin_anew_with_each_call() -> None:
    (first, other), again = run_distributed(draws, 2), run_distributed(draws, 2)
    assert first == other
    assert again == [first, other]


def opens_groups(world: World) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=dist.new_group(list(range(world.size))))
    return before


def test_groups_that_a_function_opens_are_closed_for_it() -> None:
    for _ in range(3):
        assert run_distributed(opens_groups, 2) == [1, 1]


def test_the_caller_keeps_no_file_and_no_thread() -> None:
    run_distributed(process, 2)
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        run_processes(number, 2)
        with pytest.raises(RankError):
            run_distributed(leaves, 2)
        run_distributed(process, 2)
    assert len(os.listdir("/proc/self/fd")) <= files
    assert threading.active_count() == threads
    assert not dist.is_initialized()


ROOT = Path(__file__).resolve().parents[3]

CALLER = """
import os, sys, time
from tests.testing.distributed import run_distributed

def shows(world, how):
    print("process", os.getpid(), flush=True)

def hangs(world, folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    while True:
        time.sleep(0.1)

if __name__ == "__main__":
    run_distributed(shows, 2, "")
    if sys.argv[1] != "ends":
        run_distributed(hangs, 2, sys.argv[1])
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """For temporary files, sockets among them, whose paths may have a hundred characters: fewer than tmp_path's."""
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def caller(folder: Path, argument: str, temporary: Path) -> subprocess.Popen[str]:
    """A process of its own, whose temporary files go to ``temporary``."""
    script = folder / "caller.py"
    script.write_text(CALLER)
    command = [sys.executable, str(script), argument]
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_ranks_end_with_their_caller(tmp_path: Path, temporary: Path) -> None:
    with caller(tmp_path, "ends", temporary) as running:
        out, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (0, "")
    processes = [int(line.split()[-1]) for line in out.splitlines()]
    assert len(processes) == 2
    assert not wait_for_end(processes)
    assert not list(temporary.iterdir())


def test_ranks_end_with_a_caller_that_is_killed(tmp_path: Path, temporary: Path) -> None:
    with caller(tmp_path, str(tmp_path), temporary) as running:
        deadline = time.monotonic() + 60
        while len(processes := [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]) < 2:
            assert time.monotonic() < deadline, running.communicate()
            time.sleep(0.02)
        assert all(map(is_running, processes))
        running.kill()
        left = wait_for_end(processes)
    assert not left
    ours = [path.name for path in temporary.iterdir() if "paceline" in path.name]
    assert not ours, "the ranks clear up for a caller that could not"


@pytest.mark.slow
def test_random_failures_in_a_row_leave_a_pool_that_works() -> None:
    order = random.Random(0)
    for _ in range(5):
        planted = order.choice([leaves, exits, returns_a_lock])
        with pytest.raises((RankError, SystemExit, TypeError)):
            run_distributed(planted, 2)
        assert [rank for rank, *_ in run_distributed(returns, 2)] == [0, 1]
