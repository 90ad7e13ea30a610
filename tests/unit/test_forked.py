"""A process that is forked in place of a start of an interpreter is as one that was started: each test runs both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.interpreter import bound
from tests.forked.asking import CLONE, forks, starts

pytestmark = pytest.mark.skipif(CLONE is None, reason="interpreters are forked on Linux alone")

SHOWS = """
import json, os, signal, sys
print(json.dumps({
    "parent": os.getppid(), "is leader": os.getsid(0) == os.getpid(), "folder": os.getcwd(),
    "words": [sys.argv, sys.orig_argv], "path": sys.path[0], "variables": dict(os.environ), "name": __name__,
    "shown words": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
    "shown variables": sorted(open("/proc/self/environ").read().rstrip(chr(0)).split(chr(0))),
    "SIGINT": str(signal.getsignal(signal.SIGINT)), "SIGTERM": str(signal.getsignal(signal.SIGTERM)),
    "SIGHUP": str(signal.getsignal(signal.SIGHUP)), "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "warnings": sys.warnoptions, "umask": os.umask(0), "standard": [os.fstat(n).st_ino for n in range(3)],
    "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.stderr.errors], "limit": sys.getrecursionlimit(),
}))
"""


@pytest.fixture(params=[starts, forks])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """The interpreters of the test are started, or forked."""
    with request.param():
        yield request.param.__name__


@pytest.fixture
def variables() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def has_imported_torch(process: int) -> bool:
    return "libtorch" in Path(f"/proc/{process}/maps").read_text()


def test_interpreters_are_forked_only_where_that_is_asked_for(way: str, variables: dict[str, str]) -> None:
    """Else the tests here compare one way with itself."""
    code = "import sys; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert found.stdout == f"{way == 'forks'}\n"
    variables["OMP_NUM_THREADS"] = "3"
    found = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert found.stdout == "False\n", "another number of threads is read when torch is loaded"


def test_what_a_process_sees_of_itself(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    chosen = [["shows.py", "a", "--b"], ["-m", "shows", ""], ["-W", "ignore", "-c", SHOWS, "ä"], ["-P", "shows.py"]]
    for words in chosen:
        seen: list[Any] = []
        for way in (starts, forks):
            log = (tmp_path / "log").open("w")
            before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
            try:
                with way(), log:
                    done = subprocess.run(
                        [sys.executable, *words],
                        env={**variables, "RANK": "7"},
                        cwd=tmp_path,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        start_new_session=True,
                        umask=0o27,
                        check=True,
                    )
            finally:
                signal.signal(signal.SIGHUP, before)
            shown = json.loads(done.stdout)
            del shown["standard"][1]  # a pipe of its own
            seen.append(shown)
        assert seen[0] == seen[1]
        assert seen[0]["parent"] == os.getpid()
        assert "RANK=7" in seen[0]["shown variables"]
        assert seen[0]["SIGHUP"] == "1", "it was ignored by who started it"


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("pass", 0),
        ("import sys; sys.exit(75)", 75),
        ("import sys; sys.exit('why')", 1),
        ("import os; os._exit(9)", 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import os; os.abort()", -6),
        ("import signal, threading; signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)", -15),
        ("import signal; signal.raise_signal(signal.SIGHUP)", -1),
        ("1 / 0", 1),
        ("import atexit, threading; atexit.register(print, 'last'); threading.Thread(target=print).start()", 0),
        ("import os, sys; print(os.read(0, 9)); sys.stderr.write(input())", 0),
    ],
)
def test_how_a_process_ends_and_what_it_says(code: str, ended: int, variables: dict[str, str]) -> None:
    said = []
    for way in (starts, forks):
        with way():
            done = subprocess.run(
                [sys.executable, "-c", code], env=variables, input=b"one line\ntwo\n", capture_output=True
            )
        assert done.returncode == ended, done.stderr
        said.append((done.stdout, done.stderr.splitlines()[-1:]))
    assert said[0] == said[1]


def test_a_signal_at_once_is_not_lost(way: str, variables: dict[str, str]) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=variables)
        process.send_signal(number)
        assert process.wait(30) == -number


def test_what_was_asked_for_is_so_when_it_has_been_started(way: str, variables: dict[str, str]) -> None:
    for options in ({"process_group": 0}, {"start_new_session": True}):
        words = [sys.executable, "-c", "import time; time.sleep(60)"]
        process = subprocess.Popen(words, env=variables, **options)
        try:
            assert os.getpgid(process.pid) == process.pid, "who asks may send a signal to the group at once"
            assert (os.getsid(process.pid) == process.pid) == ("start_new_session" in options)
        finally:
            process.kill()
            process.wait()


def test_it_has_the_files_that_are_handed_to_it_and_no_others(way: str, variables: dict[str, str]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        kept = os.dup2(0, 77)  # inheritable, and yet not handed on
        try:
            code = f"import os, socket; socket.socket(fileno={theirs.fileno()}).send(b'here'); os.fstat({kept})"
            words = [sys.executable, "-c", code]
            done = subprocess.run(words, env=variables, pass_fds=[theirs.fileno()], capture_output=True, text=True)
        finally:
            os.close(kept)
        ours.setblocking(False)
        assert ours.recv(10) == b"here"
    assert "Bad file descriptor" in done.stderr, done.stderr


def test_a_bound_process_dies_with_its_parent(way: str, variables: dict[str, str]) -> None:
    """And is its child, by the little program between the two."""
    sleeps = [
        sys.executable,
        "-c",
        "import os, sys, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(60)",
    ]
    code = (
        "import os, subprocess, sys\nfrom paceline.contract.interpreter import bound\n"
        f"process = subprocess.Popen(bound({sleeps!r}))\n"
        "print(process.pid, os.getpid(), flush=True)\nprocess.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = sorted(parent.stdout.readline() for _ in range(2))
        assert lines[0] == lines[1], "another process than the one that Popen says"
        child = int(lines[0].split()[0])
        assert int(lines[0].split()[1]) == parent.pid
        assert has_imported_torch(child) == (way == "forks")
        parent.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists(), "it outlives its parent"
    refused = bound([sys.executable, "-c", "print('started')"])
    refused[refused.index(str(os.getpid()))] = "1"
    done = subprocess.run(refused, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (127, "")
