"""Being asked to stop: at once where nothing would be lost, at the next step bound where a step would be."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from paceline.contract.errors import Preempted
from paceline.contract.last_resort import GIVE_UP_SECONDS, LastResort, Seconds
from paceline.contract.signals import SIGNALS

NOT_BEGUN = "no step was made, so nothing is lost: start it again"
"""What a person does after a stop before the first step."""

AGAIN_SECONDS = 0.1
"""After how long a stop asks again that came where it could not be heard: in the middle of an import, or of a callback
whose errors Python only prints."""


class Stop:
    """While entered, SIGTERM, SIGUSR1, SIGUSR2, SIGHUP (a lost terminal) and Ctrl-C end the run in good order.

    Inside ``noted`` a signal is only noted, and the loop looks at ``requested_by`` between steps. Elsewhere there is
    nothing to save, so that what is under way is interrupted at once; but an import is seen through, for modules that
    are cut off half-way stay in the process, and fail later and elsewhere. What is raised in a callback of a weak
    reference, or in ``__del__``, Python prints and drops: there the stop asks again. A second Ctrl-C interrupts
    anywhere.

    One may be entered inside another; a stop that the outer one has been asked for is the inner one's, too.

    A signal that the process was started to ignore stays ignored. Outside the main thread, where Python takes no
    signals, nothing is asked for.

    Args:
        then: what a person does after a stop outside the steps, for the message; may be set anew as the run goes on.
        last_resort: ends the process; None: that of the one it is entered in, if any.

    Raises:
        Preempted: from ``with``, after an interruption at once.
    """

    SIGNALS = SIGNALS

    def __init__(self, then: str = "", last_resort: LastResort | None = None) -> None:
        self.requested_by: str | None = None
        self.then = then
        self.given_up: Callable[[], str] | None = None
        """What a person does after the last resort; None: as ``then`` says."""
        self._last_resort = last_resort
        self._before_last_resort: tuple[Seconds | None, Callable[[], str]] | None = None
        self._only_noted = False
        self._before: dict[signal.Signals, Any] = {}
        self._waiting: threading.Timer | None = None
        """Asks again, where it was not heard."""
        self._hook_before: Any = None
        self._is_again = False

    @classmethod
    def current(cls) -> Stop | None:
        """The innermost that is entered."""
        stop = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        return stop if isinstance(stop, Stop) else None

    @property
    def asked_by(self) -> str | None:
        """The signal that asked to stop, also where the main thread has not come to its handler yet."""
        noted = self._last_resort.asked_by if self._last_resort is not None else None
        return self.requested_by or (noted.name if noted is not None else None)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in self.SIGNALS}
            # None: a handler that is not Python's, which could not be put back
            self._before = {n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, self._ask)
            self._hook_before, sys.unraisablehook = sys.unraisablehook, self._dropped
            found = {getattr(handler, "__self__", None) for handler in self._before.values()}
            outer = [stop for stop in found if isinstance(stop, Stop)]
            self._last_resort = self._last_resort or (outer[0]._last_resort if outer else None)
            if self._last_resort is not None:
                self._before_last_resort = self._last_resort.allow(_give_up_seconds, self._words)
            asked = [stop.requested_by for stop in outer if stop.requested_by]
            if asked:
                self.requested_by = asked[0]
                self._give_back()
                self.check()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        waited = self._waiting is not None
        self._give_back()
        if isinstance(error, _Interruption) or (error is None and waited):
            raise Preempted(f"stopped by {self.requested_by}; {self.then}") from None

    def check(self) -> None:
        """Between pieces of work that can be done another time.

        Raises:
            Preempted: a stop was asked for.
        """
        if self.requested_by:
            raise Preempted(f"stopped by {self.requested_by}; {self.then}")

    @contextlib.contextmanager
    def noted(self, seconds: Seconds | None = None) -> Iterator[None]:
        """Inside, a signal only sets ``requested_by``.

        Args:
            seconds: how long what is inside may go on after a signal, before the last resort; None: as it takes.
        """
        outer, self._only_noted = self._only_noted, True
        try:
            with self._allowed(seconds):
                yield
        finally:
            self._only_noted = outer

    @contextlib.contextmanager
    def at_once(self, then: str) -> Iterator[None]:
        """Inside, a signal interrupts, as it does where nothing is ``noted``; and so does one that was noted before.

        Args:
            then: what a person does after that.
        """
        outer, self._only_noted = self._only_noted, False
        after, self.then = self.then, then
        try:
            with self._allowed(_give_up_seconds):
                self._interrupt_if_asked()
                yield
                # whatever was interrupted may have taken that for a failure of its own
                self._interrupt_if_asked()
        except _Interruption:
            raise
        except BaseException:
            self.then = after
            raise
        else:
            self.then = after
        finally:
            self._only_noted = outer

    def _interrupt_if_asked(self) -> None:
        if self.requested_by:
            raise _Interruption

    @contextlib.contextmanager
    def _allowed(self, seconds: Seconds | None) -> Iterator[None]:
        if self._last_resort is None or not self._before:
            yield
            return
        before = self._last_resort.allow(seconds, self._words)
        try:
            yield
        finally:
            self._last_resort.allow(*before)

    def _words(self) -> str:
        return self.given_up() if self.given_up is not None else self.then

    def _ask(self, number: int, frame: FrameType | None) -> None:
        again, self._is_again = self._is_again, False
        if again:
            self._waiting = None
        is_first = self.requested_by is None
        if is_first:
            self.requested_by = signal.Signals(number).name
        if (is_first or again) and self._only_noted:
            return
        if not (is_first or again or number == signal.SIGINT):
            return
        if _is_importing(frame):
            self._ask_later(number)
        elif is_first or again:
            raise _Interruption
        else:
            raise KeyboardInterrupt

    def _dropped(self, unraisable: Any) -> None:
        """Python's hook for errors that nobody can be given."""
        if issubclass(unraisable.exc_type, _Interruption) and self.requested_by:
            self._ask_later(signal.Signals[self.requested_by])
        else:
            self._hook_before(unraisable)

    def _ask_later(self, number: int) -> None:
        self._waiting = threading.Timer(AGAIN_SECONDS, self._ask_again, [number])
        self._waiting.daemon = True
        self._waiting.start()

    def _ask_again(self, number: int) -> None:
        if self._before:  # else nobody listens any more
            self._is_again = True
            # to the thread that waits, so that what it waits in is interrupted
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _give_back(self) -> None:
        before, self._before = self._before, {}
        if self._hook_before is not None:
            sys.unraisablehook, self._hook_before = self._hook_before, None
        if self._last_resort is not None and self._before_last_resort is not None:
            self._last_resort.allow(*self._before_last_resort)
            self._before_last_resort = None
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _give_up_seconds() -> float:
    return GIVE_UP_SECONDS


def _is_importing(frame: FrameType | None) -> bool:
    """Whether the main thread is in the middle of an import, at whatever depth."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


class _Interruption(BaseException):
    """What a signal raises where it is found.

    No Exception: code on the way up takes those for failures of its own. No KeyboardInterrupt: Python itself exits
    with 130 after one that came up through ``exec``, as while a dataclass is made, even when it was caught.
    """
