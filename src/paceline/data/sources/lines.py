"""Lines of a text file, decoded one by one so that every problem is known by its line and byte."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import shlex
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, Self, cast

from paceline.contract.errors import DataError
from paceline.contract.files import LFS_NOTE, lfs_note
from paceline.data.sources.encoding import LATIN, detect
from paceline.data.sources.rows import MAX_CELL_CHARACTERS, require_plausible_size

MAX_LINE_BYTES = 4 * MAX_CELL_CHARACTERS
"""Bounds what one line may take of the memory; a cell that is too long is reported by its column below this."""

Asked = Literal["set", "told", "undecided"]
"""Who says what a file's encoding is: a setting, or its bytes, which may leave it undecided."""

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
        detected = self._detected() if encoding == "auto" else None
        self._asked: Asked = "set" if encoding != "auto" else "undecided" if detected is None else "told"
        self.encoding = detected or ("utf-8" if encoding == "auto" else codecs.lookup(encoding).name)
        """How the file is decoded, as set or as its bytes say."""
        self._wide: io.TextIOWrapper | None = None

    @property
    def notices(self) -> tuple[str, ...]:
        """What to tell about the encoding: nothing of UTF-8, else which it is and how a row reads."""
        if self.encoding == "utf-8":
            return ()
        number, row = self._telling()
        # as it is: the reader's eye judges the decoding
        at = next((at for at, character in enumerate(row) if character > "\x7f"), 0)
        shown = f"line {number:,} reads {row[max(0, at - 40) :].rstrip()[:100]!r}"
        return (f"{self.name}: read as {self.encoding} (--set data.encoding=... to change); {shown}",)

    def _telling(self) -> tuple[int, str]:
        """The first row by which an eye can judge the decoding, and its number: beyond ASCII, below the header."""
        header = (1, "")
        with Lines(self.path, self.name, self.encoding) as again, contextlib.suppress(DataError):
            for line in again:
                if again.number == 1:
                    header = (1, line[:1000])
                elif not line.isascii():
                    return again.number, line
        return header

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

    @property
    def is_certain(self) -> bool:
        """Whether the file's bytes settle its encoding; among encodings of Latin letters they only make one likely."""
        return self._asked == "told" and self.encoding not in LATIN

    def fits(self, encoding: str) -> bool:
        """Whether all of the file is of an encoding."""
        try:
            with Lines(self.path, self.name, encoding) as again:
                return all(again.take_problem() is None for _ in again)
        except DataError:
            return False

    def whole(self) -> str:
        """The text of the whole file at once, for formats that do not go by lines.

        Raises:
            DataError: it cannot be read, does not decode or holds a NUL.
        """
        with self._open() as file:
            try:
                raw = self._without_mark(file.read())
            except (EOFError, OSError, zlib.error) as error:
                raise self._unread(error) from None
        try:
            text = raw.decode(self.encoding)
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            error.encoding = self.encoding  # codecs of one byte a character call themselves charmap
            raise bad_encoding(error, self.name, line, asked=self._asked) from None
        if "\0" in text:
            raise holds_nul(self.name, text.count("\n", 0, text.index("\0")) + 1, text.encode(errors="replace"))
        return text

    def __iter__(self) -> Iterator[str]:
        with self._open() as file:
            self._file = file
            if self.encoding.startswith(("utf-16", "utf-32", "iso2022")):
                # a byte 0x0a is no line end there, or a line needs what an earlier one switched to
                self._wide = io.TextIOWrapper(file, encoding=self.encoding, errors="replace", newline="\n")
            offset = 0
            while raw := self._read_line(file):
                self.number += 1
                read = len(raw)
                # a file that was joined to others brings its mark along
                raw = self._without_mark(raw)
                line = self._decode(raw, offset + read - len(raw))
                offset += read
                if self._marked:
                    self.first, self._marked = line, False
                yield line

    def _detected(self) -> str | None:
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
        except (EOFError, OSError, zlib.error) as error:
            raise self._unread(error) from None
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

    def _unread(self, error: Exception) -> DataError:
        """Why the file cannot be read further."""
        if isinstance(error, EOFError):
            return DataError(
                "the gzip file is cut off",
                file=self.name,
                line=self.number + 1,
                why=f"it ends in the middle of its compressed data, after {self.number:,} whole lines",
                fix=f"copy or download it again; `gzip -t {self.name}` checks it",
            )
        if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
            return unreadable(self.name, error)
        return DataError(
            "not a whole gzip file",
            file=self.name,
            line=self.number + 1,
            why=str(error),
            fix=f"copy or download it again, or drop .gz from its name; `gzip -t {self.name}` checks it",
        )

    def _without_mark(self, raw: bytes) -> bytes:
        return raw.removeprefix(_BYTE_ORDER_MARK)

    def _decode(self, raw: bytes, offset: int) -> str:
        if b"\0" in raw and self._problem is None:
            self._problem = partial(holds_nul, self.name, self.number, raw, offset)
        encoding = "utf-8" if self._wide else self.encoding
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError as error:
            error.encoding = encoding
            if self._problem is None:
                self._problem = partial(bad_encoding, error, self.name, self.number, offset, asked=self._asked)
            return raw.decode(encoding, errors="replace")


def bad_encoding(
    error: UnicodeDecodeError,
    file: str,
    line: int,
    offset: int = 0,
    column: str | None = None,
    *,
    asked: Asked = "set",
) -> DataError:
    """The error for bytes that do not decode.

    Args:
        offset: where the decoded bytes begin in the file.
        asked: how the encoding was found.
    """
    raw = error.object
    name = "UTF-8" if error.encoding in ("utf-8", "utf8") else error.encoding
    likely = detect(io.BytesIO(raw)) if asked == "set" else None
    why = f"byte 0x{raw[error.start]:02x} at byte offset {offset + error.start:,} begins no {name} character"
    if asked == "told":
        why += f"; the rest of the file is {name}"
        fix = f"write the row anew in {name}, or drop it (--set data.on_bad_row=skip drops and counts such rows)"
    elif likely is not None and likely not in ("utf-8", codecs.lookup(error.encoding).name):
        shown = raw[: error.start + 40].decode(likely, "ignore").strip()[-60:]
        fix = f"--set data.encoding={likely}, as which it reads {shown!r}"
    else:
        fix = (
            "--set data.encoding=NAME says what the file was written in (cp1251, big5, euc_jp, cp1253, ...), or save it"
            " as UTF-8 in the program that wrote it"
        )
    return DataError(
        f"not {name}",
        file=file,
        line=line,
        column=column,
        found=bytes(raw[max(0, error.start - 20) : error.start + 20]).decode(errors="backslashreplace"),
        why=why,
        fix=fix,
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
        fix=f"export it again, or remove them: {filtered(file, _NO_NULS)}",
    )


_NO_NULS = r"tr -d '\000'"


def filtered(file: str, command: str) -> str:
    """The shell command that sends ``file`` through ``command``, into a file that paceline reads."""
    path, typed = Path(file), shlex.quote(file)
    if path.suffix.lower() == ".gz":
        return f"gzip -dc {typed} | {command} > fixed{Path(path.stem).suffix}"
    return f"{command} < {typed} > fixed{path.suffix}"


def require_plausible_gzip(path: Path, name: str) -> None:
    """Refuse a compressed file that would fill the memory; what is wrong with it otherwise, its reader says.

    Raises:
        DataError: what it expands to is large, and many times the file.
    """
    packed, size = path.stat().st_size, 0
    fix = f"gzip -dk {shlex.quote(name)} unpacks it, if it is data; then give the file without .gz"
    with contextlib.suppress(EOFError, OSError, zlib.error), gzip.open(path, "rb") as file:
        while piece := file.read(2**20):
            size += len(piece)
            require_plausible_size(size, packed, name, fix)


def refuse_lfs_note(path: Path, name: str) -> None:
    """Refuse what git leaves in a file's place where git-lfs is missing.

    Raises:
        DataError: says how to fetch the file; or it cannot be read.
    """
    try:
        note = lfs_note(path)
    except OSError as error:
        raise unreadable(name, error) from None
    if note is not None:
        why, fix = note
        raise DataError(LFS_NOTE, file=name, why=why, fix=fix)


def unreadable(name: str, error: OSError) -> DataError:
    """The error for a file that the operating system does not let us read."""
    return DataError("cannot be read", file=name, why=error.strerror or str(error), fix="check its permissions")
