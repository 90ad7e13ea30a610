"""Lines of a text file, decoded one by one so that every problem is known by its line and byte."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Self, cast

from paceline.data.sources.encoding import detect
from paceline.data.sources.rows import MAX_CELL_CHARACTERS
from paceline.errors import DataError

MAX_LINE_BYTES = 4 * MAX_CELL_CHARACTERS
"""Bounds what one line may take of the memory; a cell that is too long is reported by its column below this."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Lines:
    """The lines of a file, gzip-compressed when its name ends in ``.gz``, each with its line end.

    A line that does not decode or holds a NUL is handed out all the same, with replacement characters: a reader above
    keeps its place in the file; ``take_problem`` then tells what is wrong with the lines since ``mark``.

    Raises:
        DataError: from iteration, for what hides the rest of the file: a cut or damaged gzip file, an
            endless line, a file that cannot be read.
    """

    def __init__(self, path: Path, name: str, encoding: str = "auto") -> None:
        self.path, self.name = path, name
        self.number = 0
        """Lines handed out so far."""
        self.first = ""
        """First line handed out since ``mark``."""
        self._problem: Callable[..., DataError] | None = None
        self._marked = True
        self._file: BinaryIO | None = None
        self.encoding = self._detected() if encoding == "auto" else codecs.lookup(encoding).name
        """How the file is decoded, as set or as its bytes say."""
        self._wide: io.TextIOWrapper | None = None

    @property
    def notices(self) -> tuple[str, ...]:
        """What to tell about the encoding: nothing of UTF-8, else which it is and how the first rows read."""
        if self.encoding == "utf-8":
            return ()
        with Lines(self.path, self.name, self.encoding) as again:
            rows = [line.rstrip("\r\n") for line, _ in zip(again, range(2), strict=False)]
        shown = " / ".join(row[:80] for row in rows)  # as it is: the reader's eye judges the decoding
        return (f"{self.name}: read as {self.encoding} (--set data.encoding=... to change); it begins {shown!r}",)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file: an error that is kept somewhere would keep it open."""
        if self._file is not None:
            self._file.close()

    def mark(self) -> int:
        """Say that a new row begins; returns the number of its first line."""
        self._marked = True
        self._problem = None
        return self.number + 1

    def take_problem(self, columns: Sequence[str] = (), cells: Sequence[str] = ()) -> DataError | None:
        """The first problem in the lines handed out since ``mark``, once.

        Args:
            columns: names of the cells, where the lines make a row.
            cells: what was made of the lines.
        """
        problem, self._problem = self._problem, None
        if problem is None:
            return None
        marks = ("\0", "\ufffd")  # a NUL, and what stands for bytes that are no UTF-8
        if len(cells) != len(columns):
            return problem()
        where = [column for column, cell in zip(columns, cells, strict=True) if any(mark in cell for mark in marks)]
        return problem(column=where[0] if where else None)

    def __iter__(self) -> Iterator[str]:
        with self._open() as file:
            self._file = file
            if self.encoding.startswith(("utf-16", "utf-32")):
                # a byte 0x0a is no line end there
                self._wide = io.TextIOWrapper(file, encoding=self.encoding, errors="replace", newline="\n")
            offset = 0
            while raw := self._read_line(file):
                self.number += 1
                read = len(raw)
                if self.number == 1:
                    raw = self._without_mark(raw)
                line = self._decode(raw, offset + read - len(raw))
                offset += read
                if self._marked:
                    self.first, self._marked = line, False
                yield line

    def _detected(self) -> str:
        with self._open() as file:
            try:
                return detect(file)
            except (EOFError, OSError, zlib.error):
                return "utf-8"  # reading the lines says what is wrong, and where

    def _open(self) -> BinaryIO:
        try:
            if self.path.suffix.lower() == ".gz":
                return cast(BinaryIO, gzip.open(self.path, "rb"))
            return self.path.open("rb")
        except OSError as error:
            raise unreadable(self.name, error) from None

    def _read_line(self, file: BinaryIO) -> bytes:
        try:
            raw = self._wide.readline(MAX_LINE_BYTES + 1).encode() if self._wide else file.readline(MAX_LINE_BYTES + 1)
        except EOFError:
            raise DataError(
                "the gzip file is cut off",
                file=self.name,
                line=self.number + 1,
                why=f"it ends in the middle of its compressed data, after {self.number:,} whole lines",
                fix=f"copy or download it again; `gzip -t {self.name}` checks it",
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                "not a whole gzip file",
                file=self.name,
                line=self.number + 1,
                why=str(error),
                fix=f"copy or download it again, or drop .gz from its name; `gzip -t {self.name}` checks it",
            ) from None
        except OSError as error:
            raise unreadable(self.name, error) from None
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(
                f"a line of over {MAX_LINE_BYTES // 1_000_000} MB",
                file=self.name,
                line=self.number + 1,
                found=raw[:200].decode(errors="replace"),
                why="rows of that length are a mistake in all data seen so far, and would fill the memory",
                fix="write one row a line; is the file of another format?",
            )
        return raw

    def _without_mark(self, raw: bytes) -> bytes:
        return raw.removeprefix(_BYTE_ORDER_MARK)

    def _decode(self, raw: bytes, offset: int) -> str:
        if b"\0" in raw and self._problem is None:
            self._problem = partial(holds_nul, self.name, self.number, raw, offset)
        encoding = "utf-8" if self._wide else self.encoding
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError as error:
            if self._problem is None:
                self._problem = partial(bad_encoding, error, self.name, self.number, offset)
            return raw.decode(encoding, errors="replace")


def bad_encoding(
    error: UnicodeDecodeError, file: str, line: int, offset: int = 0, column: str | None = None
) -> DataError:
    """The error for bytes that are no UTF-8; ``offset`` is where the decoded bytes begin in the file."""
    raw = error.object
    # bytes 0x80 to 0x9f are control characters in Latin-1 and quotes and dashes in Windows-1252
    likely = "cp1252" if any(0x80 <= byte <= 0x9F for byte in raw[error.start : error.start + 200]) else "latin-1"
    around = bytes(raw[max(0, error.start - 20) : error.start + 20]).decode("latin-1")
    if error.encoding not in ("utf-8", "utf8"):
        return DataError(
            f"not {error.encoding}",
            file=file,
            line=line,
            column=column,
            found=around,
            why=f"byte 0x{raw[error.start]:02x} at byte offset {offset + error.start:,} begins no character of it",
            fix="convert the file to UTF-8 in the program that wrote it",
        )
    return DataError(
        "not UTF-8",
        file=file,
        line=line,
        column=column,
        found=around,
        why=f"byte 0x{raw[error.start]:02x} at byte offset {offset + error.start:,} begins no UTF-8 character",
        fix=f"convert the file, for example from {likely}: {_filtered(file, f'iconv -f {likely} -t utf-8')}",
    )


def holds_nul(
    file: str, line: int | None, raw: bytes, offset: int | None = None, column: str | None = None
) -> DataError:
    """The error for a NUL in ``raw``, which no text holds and tokenizers and databases trip over."""
    at = raw.index(b"\0")
    place = f" (byte offset {offset + at:,})" if offset is not None else ""
    return DataError(
        "a NUL character",
        file=file,
        line=line,
        column=column,
        found=raw[max(0, at - 20) : at + 20].decode(errors="replace"),
        why=f"text holds no NUL{place}; the file was damaged, or is not a text file",
        fix=f"export it again, or remove them: {_filtered(file, _NO_NULS)}",
    )


_NO_NULS = r"tr -d '\000'"


def _filtered(file: str, command: str) -> str:
    """The shell command that sends ``file`` through ``command``, into a file that paceline reads."""
    path = Path(file)
    if path.suffix.lower() == ".gz":
        return f"gzip -dc {file} | {command} > fixed{Path(path.stem).suffix}"
    return f"{command} < {file} > fixed{path.suffix}"


def unreadable(name: str, error: OSError) -> DataError:
    """The error for a file that the operating system does not let us read."""
    return DataError("cannot be read", file=name, why=error.strerror or str(error), fix="check its permissions")
