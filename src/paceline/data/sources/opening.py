"""The sources of a run, opened one after the other, with the roles of their columns."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paceline.contract.errors import DataError
from paceline.contract.label_names import listed
from paceline.data.bad_rows import BadRows
from paceline.data.columns import Roles, column_list, find_roles
from paceline.data.sources import images
from paceline.data.sources.fingerprint import files_named
from paceline.data.sources.hub import PREFIX, read_hub
from paceline.data.sources.locate import locate, open_sources
from paceline.data.sources.memory import read_memory
from paceline.data.sources.picture_files import (
    find_base,
    names_files,
    names_in_place_of_texts,
    names_pictures,
    no_pictures,
)
from paceline.data.sources.rows import SAMPLE_ROWS, Row, Source
from paceline.data.sources.token_tags import no_token_classification, tag_columns
from paceline.recipe.parts import DataPart

BUILTIN = "builtin:"


@dataclass(frozen=True)
class Opened:
    """A source with its columns found; ``rows`` can be read once."""

    name: str
    rows: Iterator[Row]
    split: str | None
    roles: Roles
    notices: tuple[str, ...]
    pictures: Path | None = None
    """The folder below which the pictures are that the rows name; None where they name none."""


def locate_files(part: DataPart, rows: object | None = None) -> dict[str, Path]:
    """The file or folder of each setting that names one, found without reading any.

    Args:
        part: the recipe's data part.
        rows: as in ``read``.

    Raises:
        DataError: nothing is there, or no reader takes it.
    """
    if rows is None and part.source.startswith(BUILTIN):
        return {}
    from_file = rows is None and not part.source.startswith(PREFIX)
    named = [(setting, name) for setting, name in files_named(part) if from_file or setting != "source"]
    return {setting: locate(name, f"data.{setting}") for setting, name in named}


def open_all(part: DataPart, rows: object | None, bad: BadRows, *, labelled: bool, modality: str) -> Iterator[Opened]:
    """Open each source with the roles of its columns, which the first one settles; close it when the next is asked for.

    Args:
        part: the recipe's data part.
        rows: rows in memory in place of ``part.source``.
        bad: takes rows that cannot be used.
        labelled: whether labels and splits are read.
        modality: what the model takes: ``text``, ``image`` or ``any``.

    Raises:
        DataError: from iteration; a source cannot be used.
    """
    roles: Roles | None = None
    empty: Source | None = None
    held: tuple[str, ...] = ()
    before: list[Source] = []
    for source in _sources(part, rows, bad, labelled=labelled):
        with ExitStack() as stack:
            if close := getattr(source.rows, "close", None):
                stack.callback(close)
            sample = list(islice(source.rows, SAMPLE_ROWS))
            notices = (*held, *source.notices)
            if not sample and source.is_piece:
                empty, held = source, (*notices, f"{source.name}: holds no rows")
                continue
            if not sample:
                bad.settle(0)
                raise _no_rows(source, in_memory=rows is not None)
            columns = source.columns or tuple(dict.fromkeys(key for row in sample for key in row.values))
            if roles is None:
                roles = _roles(part, source, columns, sample, labelled=labelled, modality=modality)
                notices = (*roles.notices, *notices)
            _require_columns(part, roles, source, columns, before)
            before.append(source)
            base, found = _pictures(roles, source, sample)
            split = source.split if labelled else None
            yield Opened(source.name, chain(sample, source.rows), split, roles, (*notices, *found), base)
            held = ()
    if roles is None and empty is not None:
        bad.settle(0)
        raise _no_rows(empty, in_memory=False)


def _pictures(roles: Roles, source: Source, sample: Sequence[Row]) -> tuple[Path | None, tuple[str, ...]]:
    """The folder of the pictures that rows name, and a notice about it."""
    cells = [row.values.get(roles.content) for row in sample]
    if not roles.is_image or source.folder is None or not names_pictures(cells):
        return None, ()
    written = [cell for cell in cells if isinstance(cell, str)]
    return find_base(source.folder, source.name, written, source.split)


def _sources(part: DataPart, rows: object | None, bad: BadRows, *, labelled: bool) -> Iterator[Source]:
    """What to read, in order; each opened when its turn comes, but all known to exist before the first."""
    paths = locate_files(part, rows)
    if rows is not None:
        sources = (replace(source, folder=Path()) for source in read_memory(rows, labelled=labelled))
        yield from _without(paths, sources)
    elif "source" not in paths:
        yield from _without(paths, read_hub(part.source))
    for setting, path in paths.items():
        name = getattr(part, setting)
        opened = open_sources(path, name, part, bad, labelled=labelled)
        if setting == "source":
            yield from _without(paths, opened)
            continue
        for source in opened:
            if source.split not in (None, setting) or (source.roles is not None and source.roles.split):
                inner = f"{name}/{setting}" if (path / setting).is_dir() else "FILE"
                raise DataError(
                    f"data.{setting} = {name!r}: holds several splits",
                    why=f"all rows of it would be {setting}",
                    fix=f"name the file or folder of one: data.{setting}={inner}",
                )
            yield replace(source, split=setting)


def _without(paths: Mapping[str, Path], sources: Iterable[Source]) -> Iterator[Source]:
    """Sources, none of them of a split that has a file of its own."""
    for source in sources:
        if source.split in paths:
            raise DataError(
                "the split is given twice",
                file=source.name,
                why=f"data.{source.split} names a file for it",
                fix=f"leave data.{source.split} out, or name the file of the training rows: --data FILE",
            )
        yield source


def _no_rows(source: Source, *, in_memory: bool) -> DataError:
    if in_memory:
        return DataError("no rows", file=source.name, why="at least 1 is needed", fix="give rows")
    header = (
        f"its only line names the columns: {listed(source.columns, 30)}" if source.columns else "it holds no usable row"
    )
    return DataError(
        "only a header, no rows" if source.columns else "the file is empty",
        file=source.name,
        line=1 if source.columns else None,
        why=header,
        fix="add rows below it" if source.columns else 'write {"text": "...", "label": "..."}, one object a line',
    )


def _roles(
    part: DataPart, source: Source, columns: Sequence[str], sample: Sequence[Row], *, labelled: bool, modality: str
) -> Roles:
    values = [row.values for row in sample]
    # files that a column names are found from a table's folder or the current one
    named = [name for name in columns if source.folder is not None and names_pictures(row.get(name) for row in values)]
    roles = source.roles
    if roles is None:
        roles = _found_roles(part, source, columns, values, named, labelled=labelled, modality=modality)
    if roles.is_image:
        return roles
    are_pictures = roles.content in named
    if are_pictures and modality != "text":
        return replace(roles, is_image=True)
    cells = [row.get(roles.content) for row in values]
    if not are_pictures and (source.folder is None or not names_files(source.folder, cells)):
        return roles
    if part.text == roles.content:
        notice = f"column {roles.content!r} holds names of files, which are learned as texts"
        return replace(roles, notices=(*roles.notices, notice))
    raise names_in_place_of_texts(source.name, roles.content, cells[0], are_pictures=are_pictures)


def _found_roles(
    part: DataPart,
    source: Source,
    columns: Sequence[str],
    values: Sequence[Mapping[str, Any]],
    named: Sequence[str],
    *,
    labelled: bool,
    modality: str,
) -> Roles:
    """Roles by the names of the columns; ``named`` are those whose cells name pictures."""
    # an array in a cell is an image, and so is what Pillow and the Hub make of one
    held = [name for name in columns if any(images.is_image(row.get(name)) for row in values[:3])]
    tags = tag_columns(columns, values) if labelled else {}
    try:
        roles = find_roles(
            part,
            columns,
            values,
            file=source.name,
            labelled=labelled,
            image_columns=held,
            picture_names=named,
            modality=modality,
        )
    except DataError:
        if modality == "text" and named and part.text == "auto":
            cell = values[0].get(named[0])
            raise names_in_place_of_texts(source.name, named[0], cell, are_pictures=True) from None
        if modality == "image" and not held and not named:
            raise no_pictures(source.name, columns) from None
        if not tags:
            raise
        label = next(iter(tags))
    else:
        label = next((name for name in roles.label if name in tags), "")
        if not label:
            return roles
    raise no_token_classification(source.name, label, tags[label], values[0])


def _require_columns(
    part: DataPart, roles: Roles, source: Source, columns: Sequence[str], before: Sequence[Source]
) -> None:
    """Require the columns that have a role; ``before`` are the sources that have them."""
    needed = [roles.content, *([roles.pair] if roles.pair else []), *roles.label]
    needed += [roles.split] if roles.split and source.split is None else []
    known = set(columns)
    for name in needed:
        if columns and name not in known:
            rename = f"rename the column to {name!r}, as in {before[0].name if before else 'the first file'}"
            leave_out = _leave_out(part, source, before)
            predict = f", and paceline predict RUN {shlex.quote(source.name)} labels its rows"
            labels = predict if name in roles.label else ""
            raise DataError(
                f"no column {name!r}",
                file=source.name,
                why=f"the columns are {column_list(columns)}; all files need those of the first",
                fix=f"{leave_out} leaves it out{labels}; or {rename}" if leave_out else rename,
            )


def _leave_out(part: DataPart, source: Source, before: Sequence[Source]) -> str:
    """Return the options that read the sources before this one alone; empty where none do."""
    if source.split is not None and getattr(part, source.split) is not None:
        return f"--set data.{source.split}=null"
    splits = [other.split for other in before]
    if not source.is_piece or source.split in splits or len({*splits}) < len(splits):
        return ""
    first, *others = before
    return shlex.join(
        ["--data", first.name, *chain(*(("--set", f"data.{other.split}={other.name}") for other in others))]
    )
