"""From what the recipe names, or what is in memory, to a validated table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from paceline.contract.errors import DataError
from paceline.data.bad_rows import BadRows
from paceline.data.columns import Roles
from paceline.data.sources import images
from paceline.data.sources.classes import interpret_rows
from paceline.data.sources.gather import Gathered, Gatherer
from paceline.data.sources.image_depth import Depth
from paceline.data.sources.label_column import Interpreted
from paceline.data.sources.opening import BUILTIN, open_all
from paceline.data.table import Table
from paceline.data.task_rows import rows_of
from paceline.recipe.parts import DataPart


def read(
    part: DataPart,
    *,
    task: str = "auto",
    rows: object | None = None,
    quarantine: Path | None = None,
    picture: images.Picture | None = None,
    head: Sequence[str] = (),
    known: Sequence[str] = (),
    modality: str = "any",
) -> Table:
    """All rows of a recipe's data, checked.

    ``part.validation`` and ``part.test`` are read after ``part.source``; their rows are of that split, and those of
    the source are ``train`` where no split column says otherwise. All files must have the same columns for the same
    roles.

    Args:
        part: the recipe's data part.
        task: name of a task; ``auto`` asks all of them, in the order of the catalogue, whether the labels are theirs.
        rows: rows in memory as ``read_memory`` takes them, in place of ``part.source``.
        quarantine: file for the rows dropped under ``part.on_bad_row = 'skip'``.
        picture: the model's own image processor, where it has one.
        head: class names of the checkpoint's head in index order: rows of later splits may have classes that no
            training row has and a head that is kept knows.
        known: classes of a trained model, of which all labels have to be; empty: of any.
        modality: what the model takes: ``text``, ``image``, or ``any``, where it is not known.

    Raises:
        DataError: the data cannot be used; says where, why, and the smallest change that helps.
    """
    if rows is None and part.source.startswith(BUILTIN):
        return _read_builtin(part)
    bad = BadRows(part.on_bad_row, part.bad_rows_allowed, quarantine)
    gathered = Gathered()
    roles, notices = _gather(part, rows, gathered, bad, picture, modality)
    found = Interpreted(kind="", labels=[])
    if len(gathered):
        found = interpret_rows(part, gathered, roles, task, bad, head, known)
    notices += (*found.notices, *_stripped(gathered, found.kind), *bad.settle(len(gathered)))
    _check_enough(part, gathered, roles, found, [notice for notice in notices if ": ignored " in notice])
    return _table(gathered, roles, found, tuple(notices))


def read_unlabelled(
    part: DataPart,
    size: int,
    *,
    rows: object | None = None,
    tell: Callable[[str], None],
    picture: images.Picture | None = None,
    modality: str = "any",
) -> Iterator[Table]:
    """Rows to predict for, checked, in tables of at most ``size`` that keep the original rows.

    No more than one table is held at a time (but for builtins). Labels and splits that happen to be there are not
    read.

    Args:
        part: the recipe's data part.
        size: most rows of a table.
        rows: as in ``read``.
        tell: receives each guess and warning.
        picture, modality: as in ``read``.

    Raises:
        DataError: from iteration; the data cannot be used.
    """
    if rows is None and part.source.startswith(BUILTIN):
        yield _read_builtin(part)
        return
    bad, depth = BadRows(part.on_bad_row, part.bad_rows_allowed), Depth(part.image_bits)
    total, is_image = 0, False
    for opened in open_all(part, rows, bad, labelled=False, modality=modality):
        is_image = opened.roles.is_image
        for notice in opened.notices:
            tell(notice)
        while piece := list(islice(opened.rows, size)):
            gathered = Gathered()
            gatherer = Gatherer(
                roles=opened.roles,
                into=gathered,
                bad=bad,
                part=part,
                picture=picture,
                pictures=opened.pictures,
                depth=depth,
                keep_rows=True,
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


def _gather(
    part: DataPart,
    rows: object | None,
    gathered: Gathered,
    bad: BadRows,
    picture: images.Picture | None,
    modality: str,
) -> tuple[Roles, list[str]]:
    """Fill ``gathered`` from all sources; the first source settles the roles of the columns."""
    roles: Roles | None = None
    notices: list[str] = []
    depth = Depth(part.image_bits)
    given_splits = [split for split in ("validation", "test") if getattr(part, split)]
    for opened in open_all(part, rows, bad, labelled=True, modality=modality):
        roles, split = opened.roles, opened.split
        if split is None and given_splits and roles.split is None:
            split = "train"
        gatherer = Gatherer(
            roles=roles,
            into=gathered,
            bad=bad,
            part=part,
            picture=picture,
            pictures=opened.pictures,
            depth=depth,
        )
        gatherer.take(opened.rows, split, given_splits)
        notices += opened.notices
    assert roles is not None, "there is always one source"
    return roles, [*notices, *(depth.sentences() if roles.is_image else ())]


def _stripped(gathered: Gathered, kind: str) -> Iterator[str]:
    """That classes are told apart without the blanks around them; numbers are the same with and without."""
    count = gathered.num_stripped
    if count and kind and rows_of(kind).has_classes:
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
    if part.allow_single_class or not rows_of(found.kind).has_classes:
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
        names_files=gathered.names_files,
        notices=notices,
    )
