"""Being asked to stop: a signal sets a flag, the loop looks at it between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Stop:
    """While entered, SIGTERM, SIGUSR1 and the first Ctrl-C ask for a stop at the next step bound.

    A second Ctrl-C interrupts at once. Outside the main thread, where Python takes no signals, it asks for nothing.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.requested_by: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested_by is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested_by = signal.Signals(number).name
