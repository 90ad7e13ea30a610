"""What ranks write, on the launcher's streams: a line at a time, the rank in front."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import TextIO, final

from paceline.contract import streams

LONGEST_LINE_BYTES = 64 * 1024
"""A line that is longer is cut in two."""

DRAIN_READS = 32
"""More than enough for a pipe's 64 KiB (1 MiB at most, pipe(7)); bounded, as a stray descendant may go on writing."""

TAIL_LINES = 200
"""How many of the last lines that a rank wrote are kept."""


@final
class Screen:
    """Whole lines on a stream of the launcher."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = streams.Screen(stream)
        # rank 0 may be drawing its bar: the cursor stands at the bar's end
        self._begin = "\r\x1b[K" if self._stream.isatty() else ""

    def say(self, line: str) -> None:
        """Write a line."""
        self._stream.write(f"{self._begin}{line}\n")
        self._stream.flush()


@final
class Lines:
    """The lines that arrive on a descriptor, which is closed at their end.

    Args:
        descriptor: the reading end of a pipe; it is made non-blocking.
        take: called with each line, without its end.
    """

    def __init__(self, descriptor: int, take: Callable[[str], None]) -> None:
        os.set_blocking(descriptor, False)
        self.is_open = True
        self._descriptor = descriptor
        self._take = take
        self._begun = b""

    def fileno(self) -> int:
        """What can be waited for."""
        return self._descriptor

    def read(self) -> None:
        """Take in some of what is there; never waits."""
        if not self.is_open:
            return
        try:
            found = os.read(self._descriptor, LONGEST_LINE_BYTES)
        except BlockingIOError:
            return
        if not found:
            self.close()
            return
        *whole, self._begun = (self._begun + found).split(b"\n")
        for line in whole:
            self._pass_on(line)
        if len(self._begun) > LONGEST_LINE_BYTES:
            self._pass_on(self._begun)
            self._begun = b""

    def drain(self) -> None:
        """Take in all that the pipe can hold when its writer has ended."""
        for _ in range(DRAIN_READS):
            self.read()

    def close(self) -> None:
        """Pass on a last line without an end, and let go of the descriptor."""
        if self.is_open:
            self.is_open = False
            os.close(self._descriptor)
            if self._begun:
                self._pass_on(self._begun)

    def _pass_on(self, line: bytes) -> None:
        # of a bar that is drawn over and over on one line, its last state
        self._take(line.decode("utf-8", "backslashreplace").rstrip("\r").rpartition("\r")[2])


@final
class Errors:
    """A rank's standard error: shown as it comes, until a rank fails; from then on held back.

    The cause of the failure is to be told from what the other ranks run into because of it, and is shown once.
    """

    def __init__(self, screen: Screen, name: str) -> None:
        self._screen, self._name = screen, name
        self._is_holding = False
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        """The last lines."""
        self._held: deque[str] = deque(maxlen=TAIL_LINES)

    def take(self, line: str) -> None:
        """A further line."""
        self.tail.append(line)
        if self._is_holding:
            self._held.append(line)
        else:
            self._screen.say(f"{self._name} {line}")

    def hold(self) -> None:
        """From now on show nothing."""
        self._is_holding = True

    def release(self) -> None:
        """Show what was held back, and go on holding."""
        while self._held:
            self._screen.say(f"{self._name} {self._held.popleft()}")
