"""The labels of all rows: interpreted as a column, and compared with the classes that train or a model has."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import cast

from paceline.contract.errors import DataError, excerpt
from paceline.contract.label_names import listed, rows_by_truth, rows_by_value
from paceline.data.bad_rows import BadRows, row_text
from paceline.data.columns import Roles
from paceline.data.labels import kept_head, match_known, unknown_label
from paceline.data.sources.gather import Gathered
from paceline.data.sources.label_column import Interpreted, Labels
from paceline.data.sources.labels import interpret
from paceline.data.task_rows import rows_of
from paceline.recipe.parts import DataPart


def interpret_rows(
    part: DataPart,
    gathered: Gathered,
    roles: Roles,
    task: str,
    bad: BadRows,
    head: Sequence[str],
    classes: Sequence[str],
) -> Interpreted:
    """Interpret the labels as a whole, and drop rows whose label fits neither the column nor the known classes.

    Args:
        part: the recipe's data part.
        gathered: the rows; those that are dropped are taken out.
        roles: the columns.
        task: as in ``interpret``.
        bad: receives the rows that are dropped.
        head: class names of the checkpoint's head, see ``read``.
        classes: classes of a trained model, see ``read``.

    Raises:
        DataError: the column holds no labels of the task, or the first row that does not fit where these stop the run.
    """
    column = roles.columns["label"]
    file = gathered.files[0]
    found = interpret(gathered.labels, task, column, file, places=roles.places, point=part.decimal)
    problems = []
    for problem in found.problems:
        file, line = gathered.place(problem.index)
        error = DataError(
            problem.problem, file=file, line=line, column=column, found=problem.found, why=problem.why, fix=problem.fix
        )
        problems.append((problem.index, error))
    known = {index for index, _ in problems}
    problems += list(_unseen_classes(gathered, found, column, known, head))
    problems += list(_unknown_classes(gathered, found, column, known, classes))
    for index, error in sorted(problems, key=lambda entry: entry[0]):
        values = {"text": gathered.contents[index], "label": gathered.labels[index]}
        bad.report(error, row_text({} if roles.is_image else values))
    gone = {index for index, _ in problems}
    gathered.drop(gone)
    labels = cast(Labels, [label for index, label in enumerate(found.labels) if index not in gone])
    notices = found.notices
    if part.label_separator is not None and all(isinstance(one, tuple) and len(one) < 2 for one in labels):
        notices += (f"data.label_separator = {part.label_separator!r} stands in no label: no row has more than one",)
    return Interpreted(kind=found.kind, labels=labels, notices=notices)


def _unseen_classes(
    gathered: Gathered, found: Interpreted, column: str, ignored: set[int], head: Sequence[str]
) -> Iterator[tuple[int, DataError]]:
    """Rows of later splits whose class neither a training row has nor a head that is kept."""
    task = rows_of(found.kind)
    if not task.has_classes or "train" not in gathered.splits:
        return
    sets = [task.classes_of(label) for label in found.labels]
    trained, everywhere = set[str](), set[str]()
    for index, (names, split) in enumerate(zip(sets, gathered.splits, strict=True)):
        if index not in ignored:
            everywhere.update(names)
            trained.update(names if split == "train" else ())
    whole = kept_head(trained, everywhere, head)
    known = {*trained, *(whole or ())}
    who = "the training rows and the model's head have" if whole else "the training rows have"
    for index, (names, split) in enumerate(zip(sets, gathered.splits, strict=True)):
        unseen = [name for name in names if name not in known]
        if unseen and index not in ignored:
            file, line = gathered.place(index)
            spellings = sorted(known)
            numbers, truths = rows_by_value(unseen[:1], spellings), rows_by_truth(unseen[:1], spellings)
            same = [
                f"; {excerpt(spellings[row])} {means}, another class"
                for row, means in (
                    *((row, "is the same number") for row in numbers.values()),
                    *((row, "means the same") for name, row in truths.items() if name not in numbers),
                )
            ]
            yield (
                index,
                DataError(
                    "a class that is missing from train",
                    file=file,
                    line=line,
                    column=column,
                    found=unseen[0],
                    why=f"the row is of the {split} split; {who} only {listed(spellings)}{''.join(same)}",
                    fix="correct the label, move rows of the class to train, or remove them",
                ),
            )


def _unknown_classes(
    gathered: Gathered, found: Interpreted, column: str, ignored: set[int], classes: Sequence[str]
) -> Iterator[tuple[int, DataError]]:
    """Rows whose class a trained model with ``classes`` does not know."""
    task = rows_of(found.kind)
    if not task.has_classes or not classes:
        return
    sets = [task.classes_of(label) for label in found.labels]
    rows, _ = match_known({name for names in sets for name in names}, classes)
    for index, names in enumerate(sets):
        unknown = next((name for name in names if name not in rows), None)
        if unknown is not None and index not in ignored:
            file, line = gathered.place(index)
            fix = ""
            if found.num_places == len(classes):
                setting = shlex.join(["--set", f"data.label=[{','.join(classes)}]"])
                fix = f"{setting}, if the places of the lists are the model's classes in this order"
            yield index, unknown_label(unknown, classes, column=column, fix=fix, file=file, line=line)
