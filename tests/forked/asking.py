"""Python commands that need not import torch: forked from an interpreter that has, in place of a start of their own.

Inside ``forks()`` whatever starts ``python -m ...``, ``-c ...`` or a script through ``subprocess`` gets a process that
is its own child, with an id, a session, variables, a folder, open files, signals and an exit code as ``exec`` would
give them, and ``/proc`` shows its words and variables. Only the imports are made already, and it has a child from the
beginning: what it starts itself, ranks of a launcher or a process that plans, is forked from that. An interpreter is
really started

* where it would read something else when it imports: another ``OMP_NUM_THREADS``, a Hub of its own;
* for options and for arguments of ``subprocess`` that are not known here;
* elsewhere than on Linux.

A child of the server could not be waited for by who asks for it. So the server, which is a child of that process, makes
a sibling (``CLONE_PARENT`` of clone(2)).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.forked.asked import ASKING, Asked, program

CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
"""Number of the system call."""

EARLY = ("HF_", "TRANSFORMERS_", "OMP_", "MKL_", "KMP_", "PYTHON", "PYTORCH_", "TORCH_LOGS", "LD_", "XDG_")
"""Beginnings of the variables that are read when something is imported."""

READ_ANEW = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS")
"""Of these, those that a process reads that is made here. No folder may hold another of the modules that are there."""

ROOM = 1 << 14
"""Bytes for the words of a process, and for its variables."""

_started = subprocess.Popen._execute_child


class Server:
    """An interpreter that has imported what is slow to import, as who asks sees it."""

    def __init__(self, connection: socket.socket, variables: Mapping[str, str], owner: int) -> None:
        self._connection, self._early, self._owner = connection, _early(variables), owner
        self._lock = threading.Lock()

    def takes(self, variables: Mapping[str, str]) -> bool:
        """Whether it has imported everything as a process with these variables would."""
        return self._owner == os.getpid() and _early(variables) == self._early

    def start(self, asked: Asked, files: Sequence[int]) -> int:
        """The process id of a child of this process, which has its session, files and words by now, as after exec.

        Raises:
            OSError: the server has ended.
        """
        ready, makes_ready = os.pipe()
        try:
            with self._lock:
                socket.send_fds(self._connection, [pickle.dumps(asked)], [*files, makes_ready])
                answer = self._connection.recv(64)
            if not answer:
                raise BrokenPipeError("the server of forked interpreters has ended")
            os.close(makes_ready)
            makes_ready = -1
            os.read(ready, 1)  # comes back when the other end is closed
        finally:
            for end in {ready, makes_ready} - {-1}:
                os.close(end)
        return int(answer)

    def execute_child(self, popen: Any, args: Any, *rest: Any) -> None:
        """In the place of ``subprocess.Popen._execute_child``."""
        (executable, preexec_fn, close_fds, pass_fds, cwd, env, _, _, shell) = rest[:9]
        (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite) = rest[9:15]
        (_, gid, gids, uid, umask, start_new_session, process_group) = rest[15:]
        words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
        variables = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        folder = os.path.realpath(os.fsdecode(cwd) if cwd is not None else ".")
        is_plain = close_fds and not shell and preexec_fn is None and executable is None
        is_plain = is_plain and (gid, gids, uid) == (None, None, None) and os.path.isdir(folder)
        found = program(words) if is_plain and self.takes(variables) else None
        if found is None:
            return _started(popen, args, *rest)
        streams = {0: p2cread, 1: c2pwrite, 2: errwrite}
        files = {number: file if file != -1 else number for number, file in streams.items()}
        files |= {number: number for number in pass_fds}
        asked = Asked(
            words=tuple(os.fsdecode(word) for word in words),
            program=found,
            folder=folder,
            variables=variables,
            files=tuple(files),
            session=start_new_session,
            group=process_group,
            umask=umask,
            ignored=tuple(n for n in ASKING if signal.getsignal(n) is signal.SIG_IGN),
        )
        sys.audit("subprocess.Popen", words[0], words, cwd, env)
        popen.pid = self.start(asked, list(files.values()))
        popen._child_created = True
        popen._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None


def _early(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in variables.items() if name.startswith(EARLY) and name not in READ_ANEW}


_server: Server | None = None


@contextlib.contextmanager
def forks() -> Iterator[None]:
    """Inside, interpreters are forked."""
    global _server
    if _server is None and CLONE is not None:
        _server = _start()
    with _in_place(_started if _server is None else instead_of(_server)):
        yield


def starts() -> contextlib.AbstractContextManager[None]:
    """Inside, they are started anew, also within ``forks()``."""
    return _in_place(_started)


@contextlib.contextmanager
def _in_place(execute_child: Any) -> Iterator[None]:
    before = subprocess.Popen._execute_child
    subprocess.Popen._execute_child = execute_child
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before


def instead_of(server: Server) -> Any:
    def execute_child(popen: Any, *arguments: Any) -> None:
        server.execute_child(popen, *arguments)

    return execute_child


def _start() -> Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}  # more would be started when numpy is imported
    with theirs:
        # not as a script: what is sent is of classes that both sides import by one name
        code = f"from tests.forked.server import main; main({theirs.fileno()})"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "." * ROOM],
            # read when torch is loaded; the command line asks for it before that
            env={**variables, "TORCH_CPP_LOG_LEVEL": "ERROR", "FORKED_ROOM": "." * ROOM},
            cwd=Path(__file__).parents[2],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return Server(ours, variables, os.getpid())
