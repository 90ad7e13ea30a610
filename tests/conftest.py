"""What every test is held to: it leaves the process, the environment and the repository as it found them.

Each test gets a cache folder of its own, the Hub is offline and only loopback addresses can be reached. A test that
leaves something behind fails with the name of what it left; the state is put back, so that no other test suffers.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.memory.expandable import ask_for_it
from paceline.memory.predict import Predictor
from tests.forked.asking import forks, starts
from tests.sampling import pytest_addoption, pytest_collection_modifyitems

__all__ = ["pytest_addoption", "pytest_collection_modifyitems"]

ROOT = Path(__file__).resolve().parents[1]

LIBRARY_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "CUDA_MODULE_LOADING",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
}
"""Set by pytest for each test, and by torch and OpenMP (KMP_...) when they are loaded or first used."""

LIBRARY_THREADS = ("pytest_timeout", "tqdm", "InductorSubproc", "subproc_worker_timer")
"""Beginnings of the names (or types) of threads that libraries keep for the life of the process."""

KEPT_PROCESSES = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
    "tests.testing",
    "tests.forked",
)
"""In the command lines of processes that serve more than one test: Python's own, torch's compilers, pools of ranks,
the server of forked interpreters (what it forks shows words of its own)."""

CACHES = {".coverage", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__"}
"""Names that tools, not tests, may add to the repository's root."""

GRACE_SECONDS = 2.0
"""How long a thread or process that is already ending may take."""

_homes = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    """Before anything of the Hub or torch is imported: caches of this process alone, offline, one thread a worker."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and every run of a test would inherit that
    home = Path(tempfile.mkdtemp(prefix="paceline-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    os.environ["HF_HOME"] = str(home / "huggingface")
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    ask_for_it(os.environ)  # as the command line does
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # what a script starts in the background ignores it, and hands that on to every process of a test
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # workers share the cores: more threads than cores make every one of them slower
        os.environ["OMP_NUM_THREADS"] = "1"
    config.stash[HOME] = home


HOME = pytest.StashKey[Path]()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected stays: Python need not look through it for garbage, now or in any test."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="session", autouse=True)
def command_line_is_made_once() -> Iterator[None]:
    """Typer makes it anew for every command, which takes longer than many a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def disks_are_not_waited_for() -> Iterator[None]:
    """What tests write need not outlive a power cut: a flush takes milliseconds, and a save of a run makes twenty.

    Which of them come, and in what order, is seen all the same by who puts a function of their own in ``os.fsync``.
    """

    def flushed(file: int) -> None:
        os.fstat(file)  # an OSError where it is closed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", flushed)
        yield


@pytest.fixture
def forked_interpreters() -> Iterator[None]:
    """Python commands that the test starts are forked from an interpreter that has imported torch."""
    with forks():
        yield


@pytest.fixture
def real_interpreters(forked_interpreters: None) -> Iterator[None]:
    """Those of a test are started anew, where those of its module are forked."""
    with starts():
        yield


@pytest.fixture(scope="session")
def models_beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``predictor``: what is written there, it can import."""
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="session")
def predictor(models_beside: Path) -> Iterator[Predictor]:
    """One process plans for all tests that ask for it: it imports torch and transformers once, in three seconds."""
    with Predictor() as made:
        with contextlib.chdir(models_beside):
            made.start()
        yield made


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail the test that leaks a variable, a thread, a process, a process group, a file or a torch setting."""
    variables, threads, children = dict(os.environ), set(threading.enumerate()), _children()
    files = set(os.listdir(ROOT))
    torch_state = TorchState() if "torch" in sys.modules else None
    yield
    problems = [
        *_changed_variables(variables),
        *_process_group(),
        *(torch_state.restore() if torch_state else []),
        *_new_threads(threads),
        *_new_children(children),
        *_new_files(files),
    ]
    if problems:
        pytest.fail("the test leaves behind: " + "; ".join(problems), pytrace=False)


@pytest.fixture(autouse=True)
def own_surroundings(leaves_nothing_behind: None, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """A cache folder of the test's own, and no way to the network but loopback."""
    monkeypatch.setenv("PACELINE_CACHE", str(pytestconfig.stash[HOME] / f"paceline-{next(_homes)}"))
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, _loopback_only(getattr(socket.socket, name)))


def _loopback_only(connect: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            host = str(address[0])
            if not (host == "localhost" or host == "::1" or host.startswith("127.")):
                raise OSError(errno.ENETUNREACH, f"tests reach loopback only, not {host}")
        return connect(self, address)

    return guarded


class TorchState:
    """Torch's settings that hold for the whole process, as they were when this was made."""

    def __init__(self) -> None:
        self._before = self._read()

    def restore(self) -> list[str]:
        """What was changed since; everything is put back."""
        import torch

        now = self._read()
        changed = [f"torch {name} = {now[name]} (was {was})" for name, was in self._before.items() if now[name] != was]
        if not changed:
            return []
        before = self._before
        torch.set_default_dtype(before["default dtype"])
        torch.use_deterministic_algorithms(
            before["deterministic algorithms"], warn_only=before["deterministic warnings only"]
        )
        torch.backends.cudnn.deterministic = before["cudnn.deterministic"]
        torch.backends.cudnn.benchmark = before["cudnn.benchmark"]
        torch.set_num_threads(before["threads"])
        torch.set_grad_enabled(before["gradients enabled"])
        for name, holder in _precision_holders().items():
            holder.fp32_precision = before[name]
        return changed

    @staticmethod
    def _read() -> dict[str, Any]:
        import torch

        return {
            "default dtype": torch.get_default_dtype(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "deterministic warnings only": torch.is_deterministic_algorithms_warn_only_enabled(),
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "threads": torch.get_num_threads(),
            "gradients enabled": torch.is_grad_enabled(),
            **{name: holder.fp32_precision for name, holder in _precision_holders().items()},
        }


def _precision_holders() -> dict[str, Any]:
    import torch

    return {
        "backends.fp32_precision": torch.backends,
        "backends.cuda.matmul.fp32_precision": torch.backends.cuda.matmul,
        "backends.cudnn.conv.fp32_precision": torch.backends.cudnn.conv,
        "backends.cudnn.rnn.fp32_precision": torch.backends.cudnn.rnn,
        "backends.mkldnn.matmul.fp32_precision": torch.backends.mkldnn.matmul,
    }


def _changed_variables(before: dict[str, str]) -> list[str]:
    now = dict(os.environ)
    names = sorted({name for name, _ in before.items() ^ now.items()})
    leaked = [name for name in names if name not in LIBRARY_VARIABLES and not name.startswith("KMP_")]
    for name in leaked:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name} = {now.get(name)!r} (was {before.get(name)!r})" for name in leaked]


def _process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["an open process group"]


def _new_threads(before: set[threading.Thread]) -> list[str]:
    leaked = []
    deadline = time.monotonic() + GRACE_SECONDS
    for thread in set(threading.enumerate()) - before:
        kind = f"{type(thread).__module__}.{type(thread).__name__}"
        # a dummy stands for a thread that C++ started and that called into Python, such as autograd's
        if isinstance(thread, threading._DummyThread) or thread.name.startswith(LIBRARY_THREADS):
            continue
        if kind.startswith(LIBRARY_THREADS):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            leaked.append(f"thread {thread.name!r}")
    return leaked


def _children() -> dict[int, str]:
    """Running child processes of this one: id -> command line."""
    found = {}
    for process in _listed() if _LINUX else ():
        try:
            # pid (name, which may hold anything) state parent ...
            state, parent, *_ = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(parent) == os.getpid() and state != "Z":
                command = Path(f"/proc/{process}/cmdline").read_bytes()
                found[process] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended meanwhile
            continue
    return found


def _listed() -> list[int]:
    """Processes that may be children: those that each thread has started, where the kernel says so, or all.

    Read twice a test: where there are a hundred other processes, all of them take milliseconds.
    """
    try:
        tasks = [Path(f"/proc/self/task/{task}/children") for task in os.listdir("/proc/self/task")]
        return [int(name) for task in tasks for name in task.read_text().split()]
    except OSError:  # no such file, or a thread that has ended meanwhile
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


_LINUX = sys.platform == "linux"


def _new_children(before: dict[int, str]) -> list[str]:
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        multiprocessing.active_children()  # reaps those that have ended
        leaked = {
            process: command
            for process, command in _children().items()
            if process not in before and not any(kept in command for kept in KEPT_PROCESSES)
        }
        if not leaked or time.monotonic() > deadline:
            return [f"child process {process}: {command[:80]}" for process, command in leaked.items()]
        time.sleep(0.02)


def _new_files(before: set[str]) -> list[str]:
    return [f"{name} in the repository's root" for name in sorted(set(os.listdir(ROOT)) - before - CACHES)]
