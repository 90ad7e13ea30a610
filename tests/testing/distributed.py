"""Functions run on several ranks, in processes that are kept for the next test.

    def adds_up(world, number):
        return world.all_reduce(torch.tensor([float(number + world.rank)])).item()

    def test_ranks_add_up():
        assert run_distributed(adds_up, 2, 10) == [21.0, 21.0]

The processes are forked from a server that has loaded torch once, so that ranks start in milliseconds and share its
memory. Each has one thread; its environment, folder and filters of warnings are the caller's at each call; its random
numbers begin anew. What it prints appears in the caller's output with its rank before every line. The processes end
with the one that called.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist

from paceline.distributed.backends import INTERFACES
from paceline.distributed.group import joined
from paceline.distributed.sockets import STORE_FD, listen
from paceline.machine.cluster import Place, named
from paceline.seams import World

PRELOADED = (
    "paceline.run.run",
    "torch._dynamo",
    "transformers.models.bert.modeling_bert",
    "pytest",  # of the modules whose functions are run
)
"""Slow to import: loaded before forking where the caller has loaded them too."""

GROUP_SECONDS = 300.0
"""Time-out of the pool's process group; longer than that of any call, which can say where each rank was."""

START_SECONDS = 60.0
"""How long the first process may take to load torch."""

GRACE_SECONDS = 1.0
"""How long the others may take to fail too, after one has."""

DUMP_SIGNAL = signal.SIGQUIT
"""Makes a rank write where it is; no run takes it for a wish to stop."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_seconds: float = 60.0
) -> list[Any]:
    """Run ``function(world, *arguments)`` on ``world_size`` ranks joined by gloo, and return the results in rank order.

    The processes serve the next call for as many ranks too: a function leaves torch's global settings as it found them;
    process groups that it opens are closed for it. After a failure the processes are replaced.

    Args:
        function: of a module; the ranks import it by its name.
        timeout_seconds: after that, ranks that are not done are killed.

    Raises:
        Exception: what the first rank to fail raised, with every failed rank's traceback and the place of every other
            rank in its notes.
        RankError: a rank ended or did not finish in time, or raised what cannot be sent.
    """
    if world_size not in _pools:
        _pools[world_size] = _Ranks(world_size, join=True)
    try:
        return _pools[world_size].call(function, arguments, timeout_seconds)
    except BaseException:
        _pools.pop(world_size).kill()
        raise


def run_processes(
    function: Callable[..., Any], num_processes: int, *arguments: Any, timeout_seconds: float = 60.0
) -> list[Any]:
    """Run ``function(rank, *arguments)`` in processes made for this call, which have joined nothing.

    For tests of joining itself, and of processes that end. Otherwise like ``run_distributed``.
    """
    ranks = _Ranks(num_processes, join=False)
    try:
        return ranks.call(function, arguments, timeout_seconds)
    finally:
        ranks.kill()


class RankError(Exception):
    """A rank ended without an answer, gave none in time, or raised what cannot be sent."""


_pools: dict[int, _Ranks] = {}


# a fork of the caller does not own its processes
os.register_at_fork(after_in_child=_pools.clear)


@atexit.register
def _end_pools() -> None:
    while _pools:
        _pools.popitem()[1].kill()


@final
class _Ranks:
    """Processes that wait for functions to call."""

    def __init__(self, num_ranks: int, *, join: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        # no effect once the server runs
        context.set_forkserver_preload([__name__, *(name for name in PRELOADED if name in sys.modules)])
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-ranks-"))
        self._read = [0] * num_ranks
        self._connections: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        size = num_ranks if join else None
        try:
            for rank in range(num_ranks):
                ours, theirs = multiprocessing.Pipe()
                self._connections.append(ours)
                process = context.Process(target=_work, args=(rank, size, theirs, str(self._folder)))
                process.start()
                self._processes.append(process)
                theirs.close()
            if join:
                port = self._port()
                for connection in self._connections[1:]:
                    connection.send(port)
        except BaseException:
            self.kill()
            raise

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_seconds: float) -> list[Any]:
        """The results in rank order; what the ranks printed is printed."""
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__}: ranks import the function by name; define it in a module")
        request = _dumps((function, arguments, dict(os.environ), str(Path.cwd()), warnings.filters))
        try:
            for connection in self._connections:
                # a rank that has ended is found out below
                with contextlib.suppress(BrokenPipeError):
                    connection.send_bytes(request)
            answers = self._answers(timeout_seconds)
            failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, _Failure)}
            if not failures and len(answers) == len(self._processes):
                return [answers[rank] for rank in range(len(self._processes))]
            raise self._error(failures, answers, timeout_seconds)
        finally:
            self._print_logs()

    def kill(self) -> None:
        """End all processes at once."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        self._processes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _port(self) -> int:
        """Where the ranks meet, as rank 0 says."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self._connections[0].poll(START_SECONDS):
                return int(self._connections[0].recv())
        self._print_logs()
        raise RankError(f"rank 0 of {len(self._processes)} did not start")

    def _answers(self, timeout_seconds: float) -> dict[int, Any]:
        """Rank -> result or failure, in order of arrival; ranks that gave none are left out."""
        deadline = time.monotonic() + timeout_seconds
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, Any] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(connection)
                answers[rank] = self._answer(rank)
                if isinstance(answers[rank], _Failure):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _answer(self, rank: int) -> Any:
        try:
            return ForkingPickler.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join(GRACE_SECONDS)
            code = process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return _Failure(None, f"{how} before it was done")

    def _error(self, failures: dict[int, _Failure], answers: dict[int, Any], timeout_seconds: float) -> BaseException:
        """The first failure, with what is known of every rank in its notes."""
        size = len(self._processes)
        if failures:
            first, failure = next(iter(failures.items()))
            error = failure.error or RankError(f"rank {first} of {size} {failure.text.splitlines()[0]}")
        else:
            late = [rank for rank in range(size) if rank not in answers]
            error = RankError(f"{named(late)} of {size} not done in {timeout_seconds:g} s")
        for rank, failure in failures.items():
            error.add_note(f"[rank {rank}] {failure.text}")
        for rank in range(size):
            if rank not in answers:
                error.add_note(f"[rank {rank}] was not done; it was here:\n{self._place(rank)}")
        return error

    def _place(self, rank: int) -> str:
        """Where a rank is that does not answer: the stacks of its threads."""
        file = self._folder / f"place-{rank}"
        pid = self._processes[rank].pid
        if pid is None or not file.exists():
            return "(starting)"
        os.kill(pid, DUMP_SIGNAL)
        text, deadline = "", time.monotonic() + GRACE_SECONDS
        # a stopped process writes nothing; one that writes is read when it has finished
        while (now := file.read_text()) != text or (not text and time.monotonic() < deadline):
            text = now
            time.sleep(0.05)
        return text or "(gives no sign: stopped, or in the kernel)"

    def _print_logs(self) -> None:
        for rank in range(len(self._processes)):
            file = self._folder / f"log-{rank}"
            if not file.exists():
                continue
            content = file.read_bytes()[self._read[rank] :]
            self._read[rank] += len(content)
            for line in content.decode(errors="replace").splitlines():
                sys.stdout.write(f"[rank {rank}] {line}\n")


@final
class _Failure:
    """What a rank raised, where it can be sent, and its traceback."""

    def __init__(self, error: BaseException | None, text: str) -> None:
        self.error, self.text = error, text


def _work(rank: int, size: int | None, connection: Connection, folder: str) -> None:
    """A rank's life: join, then call what is sent until nobody is there to send."""
    log = os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # by lines: a rank may end without closing anything
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    faulthandler.register(DUMP_SIGNAL, file=os.open(f"{folder}/place-{rank}", os.O_WRONLY | os.O_CREAT))
    threading.Thread(target=_end_with_parent, args=(folder,), name="paceline-parent", daemon=True).start()
    torch.set_num_threads(1)
    if size is None:
        _answer_calls(rank, connection, folder)
    else:
        with _pool_world(rank, size, connection) as world:
            _answer_calls(world, connection, folder)


def _end_with_parent(folder: str) -> None:
    """However the caller ends, also by kill -9, and whatever hangs here."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        # one that was killed could not
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


@contextlib.contextmanager
def _pool_world(rank: int, size: int, connection: Connection) -> Iterator[World]:
    if rank == 0:
        listening = listen()
        port = listening.getsockname()[1]
        os.environ[STORE_FD] = str(listening.detach())
        connection.send(port)
    else:
        port = connection.recv()
    place = Place(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        started="paceline",
        init_method=f"tcp://127.0.0.1:{port}",
    )
    with joined(place, device=torch.device("cpu"), timeout_seconds=GROUP_SECONDS) as world:
        yield world


def _answer_calls(first: World | int, connection: Connection, home: str) -> None:
    kept = {name: os.environ[name] for name in INTERFACES if isinstance(first, World) and name in os.environ}
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            _end_with_parent(home)  # nobody is there any more, or will be soon
        try:
            function, arguments, environment, folder, filters = ForkingPickler.loads(request)
            os.environ.clear()
            os.environ.update(environment | kept | {"OMP_NUM_THREADS": "1"})
            os.chdir(folder)
            _filter_warnings(filters)
            torch.manual_seed(0)
            answer = _dumps(function(first, *arguments))
            _close_extra_groups()
        except BaseException as error:
            answer = _failure(error)
        connection.send_bytes(answer)


def _filter_warnings(filters: list[tuple[Any, ...]]) -> None:
    """What is an error for the caller's warnings is one here."""
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        texts = [pattern.pattern if isinstance(pattern, re.Pattern) else pattern or "" for pattern in (message, module)]
        warnings.filterwarnings(action, texts[0], category, texts[1], line)


def _close_extra_groups() -> None:
    """Groups that a function opened beside the pool's own."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        answer = _dumps(_Failure(error, text))
        ForkingPickler.loads(answer)  # an exception may be sent and not be made again
        return answer
    except Exception:
        return _dumps(_Failure(None, f"failed: {type(error).__name__}: {error}\n{text}"))


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(ForkingPickler):
    """Sends tensors by value; torch's own way shares their memory, by a thread and files that would stay behind."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            return value.__reduce_ex__(2)
        return NotImplemented
