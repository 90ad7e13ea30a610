"""Being asked to stop: at once where nothing would be lost, at the next step bound where a step would be."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

from paceline.errors import Preempted


class Stop:
    """While entered, SIGTERM, SIGUSR1 and Ctrl-C end the run in good order.

    Inside ``noted`` a signal is only noted, and the loop looks at ``requested_by`` between steps. Elsewhere there is
    nothing to save, so that what is under way is interrupted at once. A second Ctrl-C interrupts anywhere.

    A signal that the process was started to ignore stays ignored. Outside the main thread, where Python takes no
    signals, nothing is asked for.

    Args:
        then: what a person does after a stop outside the steps, for the message; may be set anew as the run goes on.

    Raises:
        Preempted: from ``with``, after an interruption at once.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, then: str = "") -> None:
        self.requested_by: str | None = None
        self.then = then
        self._only_noted = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in self.SIGNALS}
            # None: a handler that is not Python's, which could not be put back
            self._before = {n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if isinstance(error, _Interruption):
            raise Preempted(f"stopped by {self.requested_by}; {self.then}") from None

    def check(self) -> None:
        """Between pieces of work that can be done another time.

        Raises:
            Preempted: a stop was asked for.
        """
        if self.requested_by:
            raise Preempted(f"stopped by {self.requested_by}; {self.then}")

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, a signal only sets ``requested_by``."""
        outer, self._only_noted = self._only_noted, True
        try:
            yield
        finally:
            self._only_noted = outer

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested_by is None:
            self.requested_by = signal.Signals(number).name
            if not self._only_noted:
                raise _Interruption
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


class _Interruption(BaseException):
    """What a signal raises where it is found.

    No Exception: code on the way up takes those for failures of its own. No KeyboardInterrupt: Python itself exits
    with 130 after one that came up through ``exec``, as while a dataclass is made, even when it was caught.
    """
