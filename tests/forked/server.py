"""The interpreter that has imported what is slow to import, and the processes that are made of it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import platform
import runpy
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.forked.asked import ASKING, Asked, Program, program
from tests.forked.asking import CLONE, Server, instead_of

CLONE_PARENT = 0x00008000
CLONE_CHILD_CLEARTID = 0x00200000
CLONE_CHILD_SETTID = 0x01000000
PR_GET_TID_ADDRESS = 40
PR_SET_PDEATHSIG = 1

PRELOADED = (
    "paceline.verbs.train",
    "paceline.verbs.cli",
    "paceline.run.run",
    "paceline.verbs.launch.launcher",
    "torch._dynamo",
    "torch.optim",
    "transformers.models.bert.modeling_bert",
)

MOVED, READY = 200, 300
"""Numbers from which files are kept while those that are asked for are given to others: nobody asks for such."""

LARGEST = 1 << 17
"""Bytes of a request."""


def main(connection: int) -> None:
    """Serve on this socket; comes back in each process that is made, when what it runs has ended."""
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would have one thread of several"
    _become(*_serve(socket.socket(fileno=connection)))


def _serve(connection: socket.socket) -> tuple[Asked, list[int]]:
    """Answer until nobody asks any more; comes back in every process that is made, with what it is to be."""
    # those to a group are not meant for a server; one to a process that was just made waits until it listens
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    while True:
        request, files, *_ = socket.recv_fds(connection, LARGEST, 64)
        if not request:
            os._exit(0)
        made = _fork_sibling()
        if not made:
            connection.close()
            return pickle.loads(request), files
        connection.send(str(made).encode())
        for file in files:
            os.close(file)


def _fork_sibling() -> int:
    """As os.fork, of a process with one thread; the child is the parent's."""
    python, system, number = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True), ctypes.c_ulong()
    # where glibc keeps the thread's id, by which a thread sends signals to it; glibc's own fork says so, too
    if system.prctl(PR_GET_TID_ADDRESS, ctypes.byref(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | signal.SIGCHLD
    places = (0, 0, number.value, 0) if platform.machine() == "x86_64" else (0, 0, 0, number.value)
    python.PyOS_BeforeFork()
    made = system.syscall(*map(ctypes.c_long, (CLONE, flags, *places)))
    if made == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if made < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return int(made)


# ---- a process that is made


class _Exec(BaseException):
    """Stands for exec of an interpreter."""

    def __init__(self, words: Sequence[str], found: Program) -> None:
        self.words, self.program = words, found


def _become(asked: Asked, files: Sequence[int]) -> None:
    """Be the process that is asked for, until what it runs has ended.

    Args:
        files: those that it has, and last a pipe that is closed when it is what was asked for.
    """
    for number in ASKING:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in asked.ignored else default)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    if asked.session:
        os.setsid()
    if asked.group >= 0:
        os.setpgid(0, asked.group)
    if asked.umask >= 0:
        os.umask(asked.umask)
    *files, makes_ready = files
    makes_ready = fcntl.fcntl(makes_ready, fcntl.F_DUPFD_CLOEXEC, READY)
    _take_files([*asked.files, makes_ready], [*files, makes_ready])
    os.chdir(asked.folder)
    os.environ.clear()
    os.environ.update(asked.variables)
    _serve_own(asked.variables)
    words, found = asked.words, asked.program
    while True:
        _show(words, os.environ)
        if makes_ready >= 0:
            os.close(makes_ready)
            makes_ready = -1
        try:
            return _run(words, found)
        except _Exec as instead:
            words, found = tuple(instead.words), instead.program
            _take_files([n for n in _open_files() if n < 3 or os.get_inheritable(n)], None)


def _open_files() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            os.fstat(int(name))
            found.append(int(name))
    return found


def _take_files(numbers: Sequence[int], files: Sequence[int] | None) -> None:
    """Have these files under these numbers, or keep those, and no others."""
    if files is not None:
        high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, MOVED) for file in files]
        for file, number in zip(high, numbers, strict=True):
            os.dup2(file, number)
    kept = {*numbers, *((_own.fileno(),) if _own is not None else ())}
    for number in _open_files():
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)


_own: socket.socket | None = None


def _serve_own(variables: Mapping[str, str]) -> None:
    """What this process starts is forked from a copy of it as it is now."""
    global _own
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _own = ours
        subprocess.Popen._execute_child = instead_of(Server(ours, variables, os.getpid()))
        os.execvp = _execvp
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    ours.close()
    _take_files([0, 1, 2, theirs.fileno()], [nothing, nothing, nothing, theirs.fileno()])
    _become(*_serve(theirs))
    sys.exit()  # not back into what the process runs that this is a copy of


_real_execvp = os.execvp


def _execvp(file: str, words: Sequence[str]) -> NoReturn:
    found = program(words) if file == sys.executable else None
    if found is not None:
        raise _Exec(words, found)
    _real_execvp(file, words)


def _show(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Have /proc show them as of a program that was started so."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # fields 48 to 51 of proc(5); the first two are cut off
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    for start, end, texts in (
        (arg_start, arg_end, list(words)),
        (env_start, env_end, [f"{name}={text}" for name, text in variables.items()]),
    ):
        content = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - start - 1]
        ctypes.memmove(start, content.ljust(end - start, b"\0"), end - start)


def _run(words: Sequence[str], found: Program) -> None:
    _open_streams("-u" in found.options or bool(os.environ.get("PYTHONUNBUFFERED")))
    told = [word for word in os.environ.get("PYTHONWARNINGS", "").split(",") if word]
    sys.warnoptions[:] = told + [found.options[at + 1] for at, word in enumerate(found.options) if word == "-W"]
    warnings._processoptions(sys.warnoptions)
    folder = os.path.dirname(os.path.abspath(found.what)) if found.kind == "script" else ""
    if found.kind == "-m":
        folder = os.getcwd()
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    is_safe = {"-P", "-I"} & set(found.options) or os.environ.get("PYTHONSAFEPATH")
    sys.path[0:1] = [*([] if is_safe else [folder]), *inherited]
    sys.orig_argv[:] = words
    sys.argv[:] = [found.what if found.kind == "script" else found.kind, *found.arguments]
    if found.kind == "-m":
        runpy.run_module(found.what, run_name="__main__", alter_sys=True)
    elif found.kind == "script":
        runpy.run_path(found.what, run_name="__main__")
    else:
        made = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(found.what, "<string>", "exec"), made.__dict__)


def _open_streams(unbuffered: bool) -> None:
    encoding = sys.stdout.encoding
    sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        stream: Any = open(number, "w", encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=number == 2 or stream.isatty(), write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
