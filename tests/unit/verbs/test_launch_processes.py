"""Real ranks, each a few lines of Python: what is passed on, how they end, and that none is left."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.contract.errors import UserError
from paceline.verbs.launch import Ranks, launch

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux alone, and /proc is read"),
]

LAUNCH = """
import sys
from paceline.verbs.launch import Ranks, launch, launcher
launcher.SETTLE_SECONDS = float(sys.argv[4])
sys.exit(launch([sys.executable, "-c", sys.argv[2]], Ranks(count=int(sys.argv[1])), grace_seconds=float(sys.argv[3])))
"""

WAIT = "time.sleep(60)"
"""What a rank does that is to be ended."""

RANK = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
Path(f"here-{rank}").touch()
def ready():  # all ranks are here
    deadline = time.monotonic() + 20
    while not all(Path(f"here-{other}").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
        assert time.monotonic() < deadline
        time.sleep(0.005)
"""
"""What every rank of these tests begins with; it runs in the folder of the test."""

TOLD = """
from paceline.distributed.failures import failures_told
from paceline.contract.errors import DataError, Preempted, UserError
ready()
"""

STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@contextmanager
def started(place: Path, num_ranks: int, code: str, grace_seconds: float = 5.0) -> Iterator[subprocess.Popen[str]]:
    """A launcher as a shell in the foreground would start it; at the end no rank of it is left."""
    # ranks that end by themselves are given the time to: their number is waited for, not the clock
    settle_seconds = "0.3" if WAIT in code else "20"
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(num_ranks), RANK + code, str(grace_seconds), settle_seconds],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # where the tests run in the background Ctrl-C is ignored, and a child would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            yield process
        finally:
            process.kill()
    until(lambda: not processes_in(place), "the launcher left processes behind", 5)


def ended(place: Path, num_ranks: int, code: str, grace_seconds: float = 5.0) -> tuple[int, str, str]:
    """Exit code, output and errors of a launch."""
    with started(place, num_ranks, code, grace_seconds) as process:
        out, err = process.communicate(timeout=40)
    return process.returncode, out, err


def processes_in(folder: Path) -> list[int]:
    """Processes whose working folder is this one, as that of all ranks and what they start is."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and Path(os.readlink(entry / "cwd")) == folder:
                found.append(int(entry.name))
        except OSError:  # it has ended, also where nobody has asked for its exit code yet
            continue
    return found


def until(reached: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def all_here(place: Path, num_ranks: int) -> None:
    until(lambda: all((place / f"ready-{rank}").exists() for rank in range(num_ranks)), "the ranks did not start")


READY = 'ready(); Path(f"ready-{rank}").touch()\n'
"""What ``all_here`` waits for, where a handler has to be set before."""


def test_ranks_find_their_place_and_rank_0_the_store(tmp_path: Path) -> None:
    code, _, err = ended(
        tmp_path,
        3,
        """
import json, socket
from paceline.machine.cluster import find_place
from dataclasses import asdict
found = {"place": asdict(find_place(os.environ)), "port": int(os.environ["MASTER_PORT"])}
if "PACELINE_STORE_FD" in os.environ:
    store = socket.socket(fileno=int(os.environ["PACELINE_STORE_FD"]))
    found["listens"] = bool(store.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)), store.getsockname()
Path(f"found-{rank}.json").write_text(json.dumps(found))
""",
    )
    assert (code, err) == (0, "")
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(3)]
    port = found[0]["port"]
    for rank in range(3):
        expected = {"rank": rank, "world_size": 3, "local_rank": rank, "local_world_size": 3}
        unset = {"is_local_guessed": False, "own_gpus": None}
        assert found[rank]["place"] == {**expected, **unset, "started": "paceline", "init_method": "env://"}
        assert found[rank]["port"] == port
        assert found[rank].get("listens") == ([True, ["127.0.0.1", port]] if rank == 0 else None)


def test_lines_of_the_others_carry_their_rank(tmp_path: Path) -> None:
    # in one write, so that nothing comes between where it is unbuffered
    code, out, err = ended(
        tmp_path, 3, 'sys.stdout.write(f"out {rank}\\n"); sys.stderr.write(f"err {rank} without an end")'
    )
    assert code == 0
    assert sorted(out.splitlines()) == ["[rank 1] out 1", "[rank 2] out 2", "out 0"]
    for line in ("[rank 1] err 1 without an end\n", "[rank 2] err 2 without an end\n", "err 0 without an end"):
        assert line in err


def test_what_is_printed_comes_at_once(tmp_path: Path) -> None:
    with started(tmp_path, 2, 'print("now") if rank else None; time.sleep(60)') as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "[rank 1] now\n"


def test_floods_pass_and_ranks_that_close_their_ends_are_waited_for(tmp_path: Path) -> None:
    code, out, err = ended(
        tmp_path,
        4,
        """
if rank == 3:
    os.closerange(1, 50)
    time.sleep(0.3)
    Path("done").touch()
    os._exit(0)
for _ in range(2000):
    sys.stdout.write("x" * 400 + "\\n")
sys.stderr.write("e" * 200_000)
""",
    )
    assert code == 0
    assert (tmp_path / "done").exists()
    assert out.count("[rank 1] " + "x" * 400 + "\n") == out.count("[rank 2] " + "x" * 400 + "\n") == 2000
    assert err.count("e") == 600_000


@pytest.mark.parametrize(
    ("code", "expected", "message"),
    [
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3 if rank == 1 else 0)", 3, "paceline: rank 1 failed first: exit code 3; the others were ended\n"),
        ("os.kill(os.getpid(), 11) if rank == 0 else time.sleep(60)", 139, "rank 0 failed first: ended by SIGSEGV;"),
        ("os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)", 137, "ended by SIGKILL (the kernel sends it when"),
        ("sys.exit('text') if rank == 1 else time.sleep(60)", 1, "[rank 1] text\npaceline: rank 1 failed first: exit"),
        ("sys.exit(75)", 75, ""),
        ("sys.exit(75 if rank == 1 else 0)", 75, ""),
        ("sys.exit(75 if rank == 0 else 1)", 1, "rank 1 failed first"),
    ],
)
def test_exit_codes(tmp_path: Path, code: str, expected: int, message: str) -> None:
    found, _, err = ended(tmp_path, 2, code)
    assert found == expected, err
    assert message in err
    assert message or not err


@pytest.mark.parametrize(
    ("code", "expected", "message"),
    [
        # on every rank the same, on one alone, and on rank 0
        (
            "with failures_told(): raise DataError('empty', file='a.csv', line=3, fix='fill it')",
            2,
            "paceline: a.csv:3: empty\n  fix: fill it\n",
        ),
        ("with failures_told():\n if rank == 2: raise UserError('disk full')\n time.sleep(60)", 2,
         "paceline: rank 2: disk full\n"),
        ("with failures_told():\n if rank == 0: raise UserError('disk full')\n time.sleep(60)", 2,
         "paceline: disk full\n"),
        ("with failures_told(): raise Preempted(f'saved')", 75, "paceline: saved\n"),
        # the others find out by what the first does when it goes
        (
            "with failures_told():\n if rank == 2: raise UserError('disk full')\n time.sleep(0.3)\n"
            " raise RuntimeError('Connection closed by peer')",
            2,
            "paceline: rank 2: disk full\n",
        ),
    ],
)  # fmt: skip
def test_a_message_is_shown_once(tmp_path: Path, code: str, expected: int, message: str) -> None:
    found, out, err = ended(tmp_path, 3, TOLD + code)
    assert (found, out, err) == (expected, "", message)


def test_a_bug_is_shown_with_its_traceback_and_no_other(tmp_path: Path) -> None:
    code, _, err = ended(
        tmp_path,
        3,
        TOLD + "with failures_told():\n time.sleep(0.1 * (2 - rank))\n raise ZeroDivisionError(f'of rank {rank}')",
    )
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.endswith("ZeroDivisionError: of rank 2\npaceline: rank 2 failed first; the others were ended\n")


@pytest.mark.parametrize("how", ["raise ValueError('the cause')", "os.kill(os.getpid(), 9)"])
def test_who_lost_the_connection_first_is_not_blamed(tmp_path: Path, how: str) -> None:
    """The process that fails takes longer to end than the others to notice."""
    code, _, err = ended(
        tmp_path, 3, f"ready()\nif rank == 2:\n time.sleep(0.15)\n {how}\nsys.exit('Connection closed by peer')"
    )
    assert "paceline: rank 2 failed first" in err
    assert err.count("paceline:") == 1
    assert code == (137 if "kill" in how else 1)


def test_a_rank_that_fails_ends_the_stubborn_within_the_deadline(tmp_path: Path) -> None:
    start = time.monotonic()
    code, _, err = ended(
        tmp_path,
        3,
        STUBBORN + "ready()\nif rank == 1: sys.exit(3)\n"
        "if rank == 2: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(60)",
        grace_seconds=0.5,
    )
    assert (code, err) == (3, "paceline: rank 1 failed first: exit code 3; the others were ended\n")
    assert time.monotonic() - start < 5


def test_a_rank_that_told_of_its_failure_and_hangs_is_ended_too(tmp_path: Path) -> None:
    code, _, err = ended(
        tmp_path,
        2,
        TOLD
        + "from paceline.distributed.failures import tell_launcher\n"
        + "if rank: tell_launcher(UserError('told'))\ntime.sleep(60)",
        grace_seconds=0.3,
    )
    assert (code, err) == (2, "paceline: rank 1: told\n")


def test_those_that_can_end_well_are_let(tmp_path: Path) -> None:
    code, _, _ = ended(
        tmp_path,
        2,
        """
def tidy(*_):
    Path("tidied").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, tidy)
ready()
if rank == 0:
    time.sleep(60)
time.sleep(0.1)
sys.exit(3)
""",
    )
    assert code == 3
    assert (tmp_path / "tidied").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_signals_reach_every_rank_once(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
from paceline.distributed.failures import failures_told
from paceline.contract.errors import Preempted
times = []
signal.signal({number:d}, lambda *_: times.append(1))
{READY}
while not times:
    time.sleep(0.01)
time.sleep(0.2)
with failures_told():
    raise Preempted(f"saved after {{len(times)}}")
"""
    with started(tmp_path, 3, code) as process:
        all_here(tmp_path, 3)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (75, "", "paceline: saved after 1\n")


def test_a_signal_before_the_ranks_listen_is_nobodys_failure(tmp_path: Path) -> None:
    with started(tmp_path, 2, READY + "time.sleep(60)") as process:
        all_here(tmp_path, 2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (143, "paceline: stopped by SIGTERM\n")


def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    with started(tmp_path, 2, "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + READY + "time.sleep(60)") as process:
        all_here(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        assert len(processes_in(tmp_path)) == 3, "the first ended them"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "paceline: interrupted\n")


@pytest.mark.parametrize("moment", ["running", "starting"])
def test_nobody_outlives_a_killed_launcher(tmp_path: Path, moment: str) -> None:
    """Not those that ignore all signals that can be ignored, nor those that a kill finds before their first line."""
    code = STUBBORN + "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    with started(tmp_path, 4, code + READY + "time.sleep(60)") as process:
        if moment == "running":
            all_here(tmp_path, 4)
        else:
            until(lambda: any(tmp_path.glob("here-?")), "no rank started")
        process.kill()
        process.wait()
        until(lambda: not processes_in(tmp_path), "orphans are left", 5)


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    """Also where the rank ends well, and where its helper holds the rank's output open."""
    code, _, err = ended(
        tmp_path, 2, "import subprocess\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(0.1 * rank)\nsys.exit(0)"
    )
    assert (code, err) == (0, "")
    assert not processes_in(tmp_path), "helpers are left"


def test_a_reader_that_left_does_not_end_the_run(tmp_path: Path) -> None:
    with started(tmp_path, 2, READY + "print('x' * 9999)\ntime.sleep(0.2)\nPath(f'done-{rank}').touch()") as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=20)
    assert (tmp_path / "done-1").exists()


@contextmanager
def in_a_terminal(place: Path, code: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Two ranks whose launcher is in the foreground of a terminal; our end of it."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [sys.executable, "-c", LAUNCH, "2", RANK + code, "5", "1"]
    with subprocess.Popen(
        command, cwd=place, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
    ) as process:
        try:
            yield ours, process
        finally:
            process.kill()
            process.wait()
            os.close(ours)
            os.close(theirs)


def test_rank_0_has_the_terminal(tmp_path: Path) -> None:
    """And can draw on it, though it stands in the background."""
    # in one piece: where Python does not buffer, what the other rank says would come between the words
    says = "{rank} {sys.stdout.isatty()} {sys.stderr.isatty()} {sys.stdin.isatty()} {os.get_terminal_size(1).columns}"
    code = f"sys.stdout.write(f'{says}\\n' if rank == 0 else f'{{rank}} {{sys.stdout.isatty()}}\\n')"
    with in_a_terminal(tmp_path, code) as (ours, process):
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 111, 0, 0))
        assert process.wait(timeout=20) == 0
        shown = os.read(ours, 9999).decode()
    assert "0 True True False 111\r\n" in shown
    assert "\r\x1b[K[rank 1] 1 False\r\n" in shown


def test_ctrl_c_in_a_terminal_reaches_every_rank_once(tmp_path: Path) -> None:
    code = """
times = []
signal.signal(signal.SIGINT, lambda *_: times.append(1))
READY
while not times:
    time.sleep(0.01)
time.sleep(0.2)
Path(f"times-{rank}").write_text(str(len(times)))
sys.exit(75)
""".replace("READY", READY)
    with in_a_terminal(tmp_path, code) as (ours, process):
        all_here(tmp_path, 2)
        os.write(ours, b"\x03")
        assert process.wait(timeout=20) == 75
    assert [(tmp_path / f"times-{rank}").read_text() for rank in range(2)] == ["1", "1"]


def test_a_port_in_use_and_a_program_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1: in use"):
            launch([sys.executable, "-c", ""], Ranks(count=2), port=port)
    with pytest.raises(UserError, match="no such program"):
        launch([str(tmp_path / "absent")], Ranks(count=2))


def test_more_processes_than_the_system_takes(tmp_path: Path) -> None:
    """Those that did start are ended."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + LAUNCH, "50", WAIT, "5", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert "of 50: cannot be started: Too many open files\n  fix: fewer processes" in done.stderr
    assert not processes_in(tmp_path)


def test_a_report_that_is_none_is_not_taken_for_one(tmp_path: Path) -> None:
    code, _, err = ended(
        tmp_path, 2, "os.write(int(os.environ['PACELINE_REPORT_FD']), b'5\\n{}\\n{\\xff\\n[1,\\n') and sys.exit(rank)"
    )
    assert (code, err) == (1, "paceline: rank 1 failed first: exit code 1; the others were ended\n")


@pytest.mark.parametrize("is_main", [True, False])
def test_a_launch_leaves_its_own_process_as_it_was(tmp_path: Path, is_main: bool) -> None:
    """Handlers and descriptors; and it works in any thread, though signals are then the caller's affair."""
    descriptors = set(os.listdir("/proc/self/fd"))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    codes: list[int] = []
    script = tmp_path / "rank.py"
    script.write_text("import os, sys\nsys.exit(3 * int(os.environ['RANK']))")

    def run() -> None:
        codes.append(launch([sys.executable, str(script)], Ranks(count=2)))

    if is_main:
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert codes == [3]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == handlers
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_the_command_itself_may_be_what_cannot_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    assert launch([str(program)], Ranks(count=2)) == 127
    err = capfd.readouterr().err
    assert f"paceline: {program}: No such file or directory" in err
    assert "failed first: exit code 127" in err


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_lost_one_which_was_stopped_are_stopped_too(tmp_path: Path, first: int) -> None:
    """It was given up: it hung, and so could not agree with the others on a step to stop after."""
    code = TOLD + (
        "with failures_told():\n"
        f"    if rank == {first}: raise Preempted('stopped by SIGTERM, and what was under way did not end')\n"
        "    time.sleep(0.5)\n"
        "    class LostRank(UserError): ranks = (0, 1)\n"
        "    raise LostRank('another rank has not reached a step')"
    )
    assert ended(tmp_path, 2, code) == (
        75,
        "",
        "paceline: stopped by SIGTERM, and what was under way did not end\n",
    )


def test_a_rank_that_fails_of_its_own_is_told_beside_one_that_was_stopped(tmp_path: Path) -> None:
    code = TOLD + (
        "with failures_told():\n"
        "    if rank == 0: raise Preempted('stopped by SIGTERM')\n"
        "    time.sleep(0.5)\n"
        "    raise DataError('no data')"
    )
    exit_code, _, err = ended(tmp_path, 2, code)
    assert (exit_code, err) == (2, "paceline: rank 1: no data\n")


def test_ranks_that_wait_for_one_which_was_stopped_are_stopped(tmp_path: Path) -> None:
    """They have not met it, and so do not hear of it."""
    code = TOLD + (
        "from paceline.contract.stop import Stop\n"
        "with failures_told(), Stop('nothing is lost'):\n"
        "    if rank == 1: raise Preempted('stopped by SIGUSR1')\n"
        f"    {WAIT}"
    )
    began = time.monotonic()
    assert ended(tmp_path, 3, code) == (75, "", "paceline: stopped by SIGUSR1\n")
    assert time.monotonic() - began < 30, "they were waited for"


def test_a_rank_that_does_not_listen_yet_was_stopped_all_the_same(tmp_path: Path) -> None:
    """In the hundredths of a second in which Python starts, a signal ends the process itself."""
    launching = LAUNCH.replace("grace_seconds=", "makes_run=True, grace_seconds=")
    command = [sys.executable, "-c", launching, "2", RANK + f"ready(); Path('all').touch(); {WAIT}", "5", "0.3"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until((tmp_path / "all").exists, "the ranks did not start")
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (75, "paceline: stopped by SIGTERM\n")


HANGS = (
    "signal.signal(signal.SIGTERM, lambda number, frame: Path('asked').touch())\n"
    "from paceline.distributed.failures import tell_launcher\n"
    "with failures_told():\n"
    "    if rank == 1:\n"
    "        while not Path('asked').exists(): time.sleep(0.01)\n"
    "        time.sleep({seconds})\n"
    "        tell_launcher(Preempted('stopped by SIGTERM, and it did not end'), 'read (data/x.py:7)')\n"
    "        sys.exit(75)\n"
    "    class LostRank(UserError): ranks = (1,)\n"
    "    raise LostRank('rank 1 of 2 has not reached a step')  # " + WAIT
)


def test_a_rank_that_others_waited_for_in_vain_was_not_stopped(tmp_path: Path) -> None:
    """The launcher asks it to end, and it ends as one that was asked: the run has failed all the same."""
    code, _, err = ended(tmp_path, 2, TOLD + HANGS.format(seconds=0))
    assert (code, err.splitlines()[0]) == (2, "paceline: rank 1 of 2 has not reached a step")
    assert "stopped" not in err


def test_a_rank_that_hangs_says_where(tmp_path: Path) -> None:
    """It is given longer than others, for it is given up only after some seconds."""
    code, _, err = ended(tmp_path, 2, TOLD + HANGS.format(seconds=1.5), grace_seconds=0.5)
    expected = "paceline: rank 1 of 2 has not reached a step\npaceline: rank 1 hung\n  where: read (data/x.py:7)\n"
    assert (code, err) == (2, expected)


@pytest.mark.parametrize(
    ("message", "is_told"),
    [("Timed out waiting 3000ms for recv", True), ("a.csv: empty", False)],
    ids=["waited", "own"],
)
def test_collectives_are_told_where_ranks_waited_in_vain(tmp_path: Path, message: str, is_told: bool) -> None:
    """A failure with a cause of its own also leaves others in a collective, and says enough."""
    code, _, err = ended(
        tmp_path,
        2,
        f"""
from paceline.contract.errors import UserError
from paceline.distributed import failures
told = {{"all": {{"at": 2 - rank, "ops": {{str(n): "all_reduce of 8 Float" for n in range(1, 3 - rank)}}}}}}
failures.recorded = lambda: told
with failures.failures_told():
    raise UserError({message!r})
""",
    )
    assert code == 2
    told = "paceline: collectives of all: rank 0 reached number 2, all_reduce of 8 Float; rank 1 reached number 1, "
    assert (told in err) == is_told, err
    assert ("is number 2: rank 0 made all_reduce of 8 Float; rank 1 made none" in err) == is_told
