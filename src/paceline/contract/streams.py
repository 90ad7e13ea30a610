"""Standard streams that are always there, take every character, and end no run when nobody reads them.

Little is imported here: signals are not listened to yet.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

READER_GONE = 141
"""As shells count a program that SIGPIPE has ended: ``paceline check run | head`` is no failure."""


def open_standard_streams(*, output_is_needed: bool) -> None:
    """Replace the standard streams of this process by some that can be used whatever it was started with.

    A stream that was closed is opened on the null device; a file opened next would get its number otherwise, and what
    libraries print to it. Characters that the encoding lacks are written as escapes.

    Args:
        output_is_needed: standard output holds the result. Else the command goes on without its readers.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number, is_needed in (("stdout", 1, output_is_needed), ("stderr", 2, False)):
        before = getattr(sys, name)
        raw = _Output(number, is_needed=is_needed)
        is_unbuffered = getattr(before, "write_through", False)
        errors = getattr(before, "errors", "strict")
        stream = io.TextIOWrapper(
            raw if is_unbuffered else io.BufferedWriter(raw),  # type: ignore[type-var]
            encoding=getattr(before, "encoding", None) or "utf-8",
            errors="backslashreplace" if errors == "strict" else errors,
            line_buffering=getattr(before, "line_buffering", True),
            write_through=is_unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def flush_output(*, is_failing: bool) -> None:
    """Write what is left before Python does, which would end with 120 where that fails.

    Args:
        is_failing: the command failed, and that says more than a reader that left.

    Raises:
        SystemExit: see ``_Output``.
    """
    raw = getattr(sys.stdout, "buffer", None)
    raw = getattr(raw, "raw", raw)
    if isinstance(raw, _Output):
        raw.is_needed &= not is_failing
        sys.stdout.flush()


class _Output(io.FileIO):
    """Writes to a descriptor until that takes no more; the rest is dropped.

    Raises:
        SystemExit: output that is needed finds no reader (141), or no room (2). No Exception: libraries on the way up
            take those for failures of their own, and end with 1.
    """

    def __init__(self, number: int, *, is_needed: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self.is_needed, self._is_gone = is_needed, False

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        size = len(view)
        while view and not self._is_gone:
            try:
                written = super().write(view)
            except OSError as error:
                self._is_gone = True
                if self.is_needed:
                    raise self._end(error) from None
                break
            if written is None:  # a pipe that does not block, and is full
                select.select([], [self], [])
            view = view[written or 0 :]
        return size

    def _end(self, error: OSError) -> SystemExit:
        if isinstance(error, BrokenPipeError):
            return SystemExit(READER_GONE)
        write_error(f"paceline: standard output cannot be written: {error.strerror}")
        return SystemExit(2)


class Screen:
    """A text stream, perhaps another program's, that outlives what it cannot write or do; None: nobody reads."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write what the stream's encoding has, and escapes for the rest."""
        fitting = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        self._attempt("write", fitting)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        self._attempt("flush")

    def isatty(self) -> bool:
        """Return whether this is a terminal."""
        return bool(self._attempt("isatty"))

    def fileno(self) -> int:
        """Return the descriptor, or raise OSError."""
        number = self._attempt("fileno")
        if not isinstance(number, int):
            raise io.UnsupportedOperation("fileno")
        return number

    def _attempt(self, method: str, *arguments: str) -> object:
        call = getattr(self._stream, method, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except (OSError, ValueError):
            # a closed pipe or stream: nobody reads this any more, so there is nobody to tell; the run itself goes on
            if method in ("write", "flush"):
                self._stream = None
            return None


@contextlib.contextmanager
def whole_streams() -> Iterator[None]:
    """Have libraries find standard output and error with all methods, where a caller has replaced or closed them."""
    with contextlib.ExitStack() as stack:
        if not hasattr(sys.stdout, "isatty"):
            stack.enter_context(contextlib.redirect_stdout(Screen(sys.stdout)))
        if not hasattr(sys.stderr, "isatty"):
            stack.enter_context(contextlib.redirect_stderr(Screen(sys.stderr)))
        yield


def write_error(line: str) -> None:
    """Write a line on standard error, where there is one."""
    screen = Screen(sys.stderr)
    screen.write(f"{line}\n")
    screen.flush()
