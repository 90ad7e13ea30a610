"""``paceline`` and ``python -m paceline``: the command line, listening for signals before anything else is loaded."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.getcwd():
    # the current folder, put first by ``python -m``: a user's json.py would be executed in place of Python's own
    del sys.path[0]

import signal

from paceline.contract.signals import SIGNALS, leave_word
from paceline.contract.streams import flush_output, open_standard_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

    from paceline.contract.errors import Preempted
    from paceline.contract.last_resort import LastResort

_RUNS = ("train", "trace")
"""Commands that make a run, which end with 75 when they are asked to stop; others by the signal's own number."""


def main() -> None:
    """Entry point of the ``paceline`` command."""
    # torch's C++ prints 15 lines of addresses for each message that it cannot send to a rank that has ended, which
    # paceline says in one; it is asked before torch is loaded
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    open_standard_streams(output_is_needed=not set(sys.argv[1:2]) & {*_RUNS, "launch"})
    early: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        early.append(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    import paceline.contract.calls  # noqa: F401 - for the last resort
    from paceline.contract.errors import Preempted
    from paceline.contract.last_resort import LastResort
    from paceline.contract.stop import NOT_BEGUN, Stop

    last_resort = LastResort(SIGNALS, _given_up)
    stop = Stop(NOT_BEGUN, last_resort)
    code: object = 0
    try:
        with stop:
            if early:
                stop.requested_by = signal.Signals(early[0]).name
                last_resort.asked(early[0])
                stop.check()
            from paceline.verbs.cli import main as command

            command()
    except Preempted as stopped:
        code = _told(stopped, signal.Signals[stop.requested_by or "SIGINT"])
        sys.exit(code)
    except SystemExit as ended:
        code = ended.code
        raise
    except BaseException:
        code = "a bug, whose traceback Python prints"
        raise
    finally:
        if last_resort.asked_by is None:
            for number, handler in before.items():
                signal.signal(number, handler)
            last_resort.close()
        else:
            if code == Preempted.exit_code and _makes_run():
                leave_word(last_resort.asked_by)
            _end_soon(last_resort, code if isinstance(code, int) else 1 if code else 0)
        is_asked = last_resort.asked_by is not None
        if is_asked and isinstance(code, int):
            _run_exit_functions()
        flush_output(is_failing=bool(code))
        if isinstance(code, int) and (is_asked or _is_in_torch()):
            os._exit(code)


def _told(stopped: Preempted, number: signal.Signals) -> int:
    """Say that the command was stopped; returns its exit code."""
    if _makes_run():
        # a launcher ends the other ranks where one has failed, which is what is to be read
        from paceline.machine.cluster import rank_in

        if rank_in(os.environ) == 0:
            sys.stderr.write(f"paceline: {stopped}\n")
        return stopped.exit_code
    word = "interrupted" if number is signal.SIGINT else f"stopped by {number.name}"
    sys.stderr.write(f"paceline: {word}\n")
    return 128 + number


def _is_in_torch() -> bool:
    """Return whether a thread is still in torch's C++, and would abort this process on its way back."""
    from paceline.contract.last_resort import IN_TORCH

    return any(thread.name.startswith(IN_TORCH) for thread in sys.modules["threading"].enumerate())


def _run_exit_functions() -> None:
    """Do what Python does before it takes itself apart: wait for threads, run what ``atexit`` has, write what is left.

    A stop may leave threads in C++ anywhere, torch's or ours. One that returns while Python takes itself apart ends by
    ``terminate`` ("without an active exception"), and the process with SIGABRT in place of its code.
    """
    import atexit
    import contextlib
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()


def _makes_run() -> bool:
    return bool(set(sys.argv[1:2]) & set(_RUNS))


def _end_soon(last_resort: LastResort, code: int) -> None:
    """See to it that the process, which has been asked to stop, ends with this code, and soon."""
    from paceline.contract.last_resort import EXIT_SECONDS

    for number in SIGNALS:  # whoever asks again would end it by the signal
        signal.signal(number, signal.SIG_IGN)

    def end(number: signal.Signals, words: str) -> int:
        return code

    last_resort.end = end
    last_resort.allow(lambda: EXIT_SECONDS, str)


def _given_up(number: signal.Signals, words: str) -> int:
    """The last resort: what was under way did not end. Called beside the main thread, which may hold any lock."""
    from paceline.contract.errors import Preempted

    makes_run = _makes_run()
    said = f"stopped by {number.name}, and what was under way did not end{'; ' + words if makes_run else ''}"
    # loaded at the start; nothing is imported here, for an import may be what hangs
    where = sys.modules["paceline.contract.calls"].innermost_calls(sys.modules["threading"].main_thread())
    error = Preempted(f"{said}\n  where: {where}" if where else said)
    code = error.exit_code if makes_run else 128 + number
    if makes_run:
        leave_word(number)
    failures = sys.modules.get("paceline.distributed.failures")
    told = failures is not None and makes_run and failures.tell_launcher(error, where)
    cluster = sys.modules.get("paceline.machine.cluster")  # not loaded here: an import may be what hangs
    if not told and (cluster is None or cluster.rank_in(os.environ) == 0):
        os.write(2, f"paceline: {error}\n".encode())
    return code


if __name__ == "__main__":
    main()
