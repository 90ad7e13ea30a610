"""From what the recipe names, or what is in memory, to a validated table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from paceline.contract.errors import DataError
from paceline.data.bad_rows import BadRows
from paceline.data.columns import Roles, find_roles
from paceline.data.sources import images
from paceline.data.sources.classes import interpret_rows
from paceline.data.sources.fingerprint import files_named
from paceline.data.sources.gather import Gathered, Gatherer
from paceline.data.sources.hub import PREFIX, read_hub
from paceline.data.sources.image_depth import Depth
from paceline.data.sources.labels import Interpreted
from paceline.data.sources.locate import locate, open_sources
from paceline.data.sources.memory import read_memory
from paceline.data.sources.rows import SAMPLE_ROWS, Row, Source
from paceline.data.sources.token_tags import no_token_classification, tag_columns
from paceline.data.table import Table
from paceline.recipe.parts import DataPart

BUILTIN = "builtin:"


def read(
    part: DataPart,
    *,
    task: str = "auto",
    rows: object | None = None,
    quarantine: Path | None = None,
    picture: images.Picture | None = None,
    head: Sequence[str] = (),
    known: Sequence[str] = (),
) -> Table:
    """All rows of a recipe's data, checked.

    ``part.validation`` and ``part.test`` are read after ``part.source``; their rows are of that split, and those of
    the source are ``train`` where no split column says otherwise. All files must have the same columns for the same
    roles.

    Args:
        part: the recipe's data part.
        task: ``auto`` infers it from the labels: lists or several label columns are ``multi_label``; numbers with
            fractions, or many different numbers, ``regression``; all else ``classification``.
        rows: rows in memory as ``read_memory`` takes them, in place of ``part.source``.
        quarantine: file for the rows dropped under ``part.on_bad_row = 'skip'``.
        picture: the model's own image processor, where it has one.
        head: class names of the checkpoint's head in index order: rows of later splits may have classes that no
            training row has and a head that is kept knows.
        known: classes of a trained model, of which all labels have to be; empty: of any.

    Raises:
        DataError: the data cannot be used; says where, why, and the smallest change that helps.
    """
    if rows is None and part.source.startswith(BUILTIN):
        return _read_builtin(part)
    bad = BadRows(part.on_bad_row, part.bad_rows_allowed, quarantine)
    gathered = Gathered()
    roles, notices = _gather(part, rows, gathered, bad, picture)
    found = Interpreted(kind="", labels=[])
    if len(gathered):
        found = interpret_rows(part, gathered, roles, task, bad, head, known)
    notices += (*found.notices, *_stripped(gathered, found.kind), *bad.settle(len(gathered)))
    _check_enough(part, gathered, roles, found, [notice for notice in notices if ": ignored " in notice])
    return _table(gathered, roles, found, tuple(notices))


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


def read_unlabelled(
    part: DataPart,
    size: int,
    *,
    rows: object | None = None,
    tell: Callable[[str], None],
    picture: images.Picture | None = None,
) -> Iterator[Table]:
    """Rows to predict for, checked, in tables of at most ``size`` that keep the original rows.

    No more than one table is held at a time (but for builtins). Labels and splits that happen to be there are not
    read.

    Args:
        part: the recipe's data part.
        size: most rows of a table.
        rows: as in ``read``.
        tell: receives each guess and warning.
        picture: as in ``read``.

    Raises:
        DataError: from iteration; the data cannot be used.
    """
    if rows is None and part.source.startswith(BUILTIN):
        yield _read_builtin(part)
        return
    bad, depth = BadRows(part.on_bad_row, part.bad_rows_allowed), Depth(part.image_bits)
    total, is_image = 0, False
    for opened in _opened(part, rows, bad, labelled=False):
        is_image = opened.roles.is_image
        for notice in opened.notices:
            tell(notice)
        while piece := list(islice(opened.rows, size)):
            gathered = Gathered()
            gatherer = Gatherer(
                roles=opened.roles, into=gathered, bad=bad, part=part, picture=picture, depth=depth, keep_rows=True
            )
            gatherer.take(piece, None)
            total += len(gathered)
            if len(gathered):
                yield _table(gathered, opened.roles, None, ())
    for notice in (*bad.settle(total), *(depth.sentences() if is_image else ())):
        tell(notice)
    if not total:
        raise DataError("0 rows of data", file=part.source, why="at least 1 is needed", fix="add rows")


def _read_builtin(part: DataPart) -> Table:
    if part.validation or part.test:
        raise DataError(
            f"data.source = {part.source!r} brings its own splits",
            why="data.validation and data.test would have no effect",
            fix="leave them out",
        )
    from paceline.data.builtin import read_builtin

    return read_builtin(part)


@dataclass(frozen=True)
class _Opened:
    """A source with its columns found; ``rows`` can be read once."""

    name: str
    rows: Iterator[Row]
    split: str | None
    roles: Roles
    notices: tuple[str, ...]


def _gather(
    part: DataPart, rows: object | None, gathered: Gathered, bad: BadRows, picture: images.Picture | None
) -> tuple[Roles, list[str]]:
    """Fill ``gathered`` from all sources; the first source settles the roles of the columns."""
    roles: Roles | None = None
    notices: list[str] = []
    depth = Depth(part.image_bits)
    given_splits = [split for split in ("validation", "test") if getattr(part, split)]
    for opened in _opened(part, rows, bad, labelled=True):
        roles, split = opened.roles, opened.split
        if split is None and given_splits and roles.split is None:
            split = "train"
        gatherer = Gatherer(roles=roles, into=gathered, bad=bad, part=part, picture=picture, depth=depth)
        gatherer.take(opened.rows, split, given_splits)
        notices += opened.notices
    assert roles is not None, "there is always one source"
    return roles, [*notices, *(depth.sentences() if roles.is_image else ())]


def _opened(part: DataPart, rows: object | None, bad: BadRows, *, labelled: bool) -> Iterator[_Opened]:
    """Each source with the roles of its columns, which the first one settles; closed when the next is asked for."""
    roles: Roles | None = None
    empty: Source | None = None
    held: tuple[str, ...] = ()
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
                roles = source.roles or _roles(part, source, columns, sample, labelled=labelled)
                notices = (*roles.notices, *notices)
            _require_columns(roles, source, columns)
            split = source.split if labelled else None
            yield _Opened(source.name, chain(sample, source.rows), split, roles, notices)
            held = ()
    if roles is None and empty is not None:
        bad.settle(0)
        raise _no_rows(empty, in_memory=False)


def _sources(part: DataPart, rows: object | None, bad: BadRows, *, labelled: bool) -> Iterator[Source]:
    """What to read, in order; each opened when its turn comes, but all known to exist before the first."""
    paths = locate_files(part, rows)
    if rows is not None:
        yield from _without(paths, read_memory(rows, labelled=labelled))
    elif "source" not in paths:
        yield from _without(paths, read_hub(part.source))
    for setting, path in paths.items():
        name = getattr(part, setting)
        sources = open_sources(path, name, part, bad, labelled=labelled)
        if setting == "source":
            yield from _without(paths, sources)
            continue
        for source in sources:
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
        f"its only line names the columns: {', '.join(source.columns)}" if source.columns else "it holds no usable row"
    )
    return DataError(
        "only a header, no rows" if source.columns else "the file is empty",
        file=source.name,
        line=1 if source.columns else None,
        why=header,
        fix="add rows below it" if source.columns else 'write {"text": "...", "label": "..."}, one object a line',
    )


def _roles(part: DataPart, source: Source, columns: Sequence[str], sample: Sequence[Row], *, labelled: bool) -> Roles:
    values = [row.values for row in sample]
    # an array in a cell is an image, and so is what Pillow and the Hub make of one
    image_columns = [name for name in columns if any(images.is_image(row.get(name)) for row in values[:3])]
    tags = tag_columns(columns, values) if labelled else {}
    try:
        roles = find_roles(part, columns, values, file=source.name, labelled=labelled, image_columns=image_columns)
    except DataError:
        if not tags:
            raise
        label = next(iter(tags))
    else:
        label = next((name for name in roles.label if name in tags), "")
        if not label:
            return roles
    raise no_token_classification(source.name, label, tags[label], values[0])


def _require_columns(roles: Roles, source: Source, columns: Sequence[str]) -> None:
    needed = [roles.content, *([roles.pair] if roles.pair else []), *roles.label]
    needed += [roles.split] if roles.split and source.split is None else []
    for name in needed:
        if columns and name not in columns:
            raise DataError(
                f"no column {name!r}",
                file=source.name,
                why=f"the columns are {', '.join(map(repr, columns))}; all files need those of the first",
                fix=f"rename the column to {name!r}, as in the first file",
            )


def _stripped(gathered: Gathered, kind: str) -> Iterator[str]:
    """That classes are told apart without the blanks around them; numbers are the same with and without."""
    count = gathered.num_stripped
    if count and kind != "regression":
        labels = f"{count:,} label{'s' * (count != 1)}"
        yield f"blanks are left out around {labels}: {gathered.first_stripped}"


def _check_enough(
    part: DataPart, gathered: Gathered, roles: Roles, found: Interpreted, passed_over: Sequence[str]
) -> None:
    """Raise when what is left cannot be learned from; ``passed_over`` says what else was there."""
    file = next(iter(gathered.files), part.source)
    # to measure a model on, one row is enough
    needed = 1 if part.allow_single_class else 2
    if len(gathered) < needed:
        raise DataError(
            f"{len(gathered)} row{'s' * (len(gathered) != 1)} of data",
            file=file,
            line=gathered.place(0)[1] if len(gathered) else None,
            why=f"at least {needed} {'is' if needed == 1 else 'are'} needed",
            fix="add rows",
        )
    if gathered.splits and "train" not in gathered.splits:
        raise DataError(
            "no row belongs to train",
            file=file,
            column=roles.split,
            why=f"the rows are of {' and '.join(sorted(set(gathered.splits)))}",
            fix="name the rows to learn from train, or --set data.split=null ignores the column",
        )
    if found.kind == "regression" or part.allow_single_class:
        return
    labels = found.labels
    first = labels[0]
    if all(label == first for label in labels):
        raise DataError(
            "all rows are of one class",
            file=file,
            line=gathered.place(0)[1],
            column=roles.columns["label"],
            found=", ".join(first) if isinstance(first, tuple) else str(first),
            why="; ".join(("there is nothing to tell apart", *passed_over)),
            fix="add rows of another class; for data that is only there to measure speed,"
            " --set data.allow_single_class=true",
        )


def _table(gathered: Gathered, roles: Roles, found: Interpreted | None, notices: tuple[str, ...]) -> Table:
    pixels = images.stack(gathered.contents) if roles.is_image else None
    return Table(
        texts=None if roles.is_image else gathered.contents,
        pairs=gathered.pairs if roles.pair else None,
        images=pixels,
        labels=found.labels if found else None,
        kind=found.kind if found else None,
        splits=gathered.splits or None,
        origins=gathered.origins(),
        rows=gathered.rows or None,
        columns=roles.columns,
        notices=notices,
    )
