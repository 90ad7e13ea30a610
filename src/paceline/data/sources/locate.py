"""Paths that a recipe names: do they exist, and which reader takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from paceline.contract.errors import DataError, close_words
from paceline.contract.files import is_irregular
from paceline.data.bad_rows import BadRows
from paceline.data.sources.arrow import files_of_saved, is_saved, read_arrow, read_parquet, read_saved
from paceline.data.sources.cifar import files_of_cifar, is_cifar, read_cifar
from paceline.data.sources.delimited import read_delimited
from paceline.data.sources.folders import files_of, read_folder
from paceline.data.sources.formats import BINARY, DELIMITERS, DOWNLOADS, FORMATS, WORKBOOKS, file_format
from paceline.data.sources.json_files import read_json, read_json_lines
from paceline.data.sources.lines import Lines, refuse_lfs_note, require_plausible_gzip, unreadable
from paceline.data.sources.rows import SAMPLE_ROWS, Source
from paceline.data.sources.table_folders import find_tables
from paceline.data.sources.workbook import read_workbook
from paceline.recipe.parts import DataPart

_HINTS = {
    ".txt": "a folder per class with .txt files, or a .csv with a text and a label column",
    ".zip": "unzip {name}",
    ".zst": "zstd -d {name}",
    ".bz2": "bunzip2 {name}",
    ".xz": "unxz {name}",
    ".tar": "tar -xf {name}, and pass the folder",
    ".tgz": "tar -xzf {name}, and pass the folder",
}


def locate(name: str, setting: str) -> Path:
    """The file or folder that a setting names.

    Raises:
        DataError: nothing is there (names the nearest thing that is), or no reader takes it.
    """
    path = Path(name).expanduser()
    try:
        if not path.exists():
            raise _missing(path, name, setting)
        if path.is_dir():
            return path
        if is_irregular(path):
            raise DataError(
                f"{setting} = {name!r}: is no regular file",
                why="a pipe or a device gives its rows once, and data are read more than once",
                fix="write the rows to a file, and give that",
            )
    except OSError as error:
        raise unreadable(name, error) from None
    if file_format(path) not in FORMATS:
        suffix = file_format(path)
        hint = _HINTS.get(suffix, f"convert it to one of {', '.join(FORMATS)}; .gz of the text formats is read too")
        raise DataError(
            f"{setting} = {name!r}: no reader for {suffix or 'a file without suffix'}",
            why=f"read are {', '.join(FORMATS)}, folders, hub:NAME and builtin:NAME",
            fix=hint.format(name=name),
        )
    return path


def open_sources(path: Path, name: str, part: DataPart, bad: BadRows, *, labelled: bool) -> Iterator[Source]:
    """The rows of a file or folder that ``locate`` found; several where it holds splits or pieces of its own."""
    if not path.is_dir():
        for source in _open_file(path, name, part, bad):
            yield replace(source, folder=path.parent)
    elif is_saved(path):
        yield from read_saved(path, name)
    elif is_cifar(path):
        yield read_cifar(path, name, labelled=labelled)
    elif tables := find_tables(path, name):
        notices = tables.notices
        for file in tables.files:
            for source in _open_file(file.path, file.name, part, bad):
                yield replace(
                    source,
                    split=file.split,
                    notices=(*notices, *source.notices),
                    folder=file.path.parent,
                    is_piece=len(tables.files) > 1,
                )
                notices = ()
    else:
        yield read_folder(path, name, part, bad, labelled=labelled)


def files_of_folder(folder: Path, name: str) -> list[Path]:
    """The files that ``open_sources`` reads of a folder; raises the same errors."""
    if is_saved(folder):
        return files_of_saved(folder, name)
    if is_cifar(folder):
        return files_of_cifar(folder, name)
    if tables := find_tables(folder, name):
        return [file.path for file in tables.files]
    return files_of(folder, name)


def _open_file(path: Path, name: str, part: DataPart, bad: BadRows) -> list[Source]:
    refuse_lfs_note(path, name)
    if path.suffix.lower() == ".gz":
        require_plausible_gzip(path, name)
    suffix = file_format(path)
    if suffix in DELIMITERS:
        return [read_delimited(path, name, DELIMITERS[suffix], bad, part)]
    if suffix == ".arrow":
        return read_arrow(path, name)
    if suffix == ".parquet":
        return read_parquet(path, name)
    if suffix in WORKBOOKS:
        return [read_workbook(path, name, bad, part)]
    read_text = read_json if suffix == ".json" else read_json_lines
    return [read_text(path, name, bad, part.encoding)]


def fitting(part: DataPart) -> dict[str, str]:
    """Encoding, delimiter and quote for ``part.source``, of which ``part`` only says what those of other files are.

    UTF-8 and whatever else the bytes say for certain goes first; a delimiter has to stand in the header, a quote in the
    first lines. Without quotes, each of these has to have as many cells as the header.
    """
    path = Path(part.source).expanduser()
    found = {"encoding": "auto", "delimiter": "auto", "quote": "auto"}
    suffix = file_format(path)
    if suffix in BINARY or suffix not in FORMATS or not path.is_file() or is_irregular(path):
        return found
    lines = Lines(path, part.source)
    if part.encoding != "auto" and not lines.is_certain and lines.fits(part.encoding):
        found["encoding"] = part.encoding
    if suffix in DELIMITERS and (part.delimiter != "auto" or part.quote != "auto"):
        with Lines(path, part.source, found["encoding"]) as again:
            first = list(islice(again, SAMPLE_ROWS))
        if part.delimiter != "auto" and part.delimiter in next(iter(first), ""):
            found["delimiter"] = part.delimiter
        marks = {line.count(part.delimiter if part.delimiter != "auto" else DELIMITERS[suffix]) for line in first}
        is_none = part.quote == "none"
        if len(marks) == 1 if is_none else any(part.quote in line for line in first):
            found["quote"] = part.quote
    return found


def _missing(path: Path, name: str, setting: str) -> DataError:
    folder = path.parent
    if name == "-":
        why = "of standard input predict alone reads, and only texts without labels"
        return DataError(f"{setting} = '-': no such file", why=why, fix="write the rows into a .csv or .jsonl file")
    places = [place for place in (path, folder) if not place.suffix]
    fetched = ((one, place) for place in places for one in DOWNLOADS if place.name.replace("-", "").startswith(one))
    fix = next((f"paceline data {one} {place}" for one, place in fetched), "correct the path")
    if not folder.is_dir():
        return DataError(f"{setting} = {name!r}: no such file", why=f"there is no folder {str(folder)!r}", fix=fix)
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    # what was meant is of the same kind; among much else, a random neighbour is no help
    alike = [other for other in names if file_format(Path(other)) == file_format(path)]
    stems = {other.partition(".")[0]: other for other in alike}
    near = close_words(path.name.partition(".")[0], stems)
    why = f"the folder {str(folder)!r} holds {', '.join(names[:5]) or 'nothing'}{', ...' * (len(names) > 5)}"
    fix = f"did you mean {str(folder / stems[near[0]])!r}?" if near else fix
    return DataError(f"{setting} = {name!r}: no such file", why=why, fix=fix)
