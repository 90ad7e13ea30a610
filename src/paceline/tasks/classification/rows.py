"""Labels that name one class each."""

from __future__ import annotations

import math
from collections import Counter
from typing import final

from paceline.contract.errors import DataError, excerpt
from paceline.data.sources.label_column import Interpreted, LabelColumn, not_finite
from paceline.data.sources.label_lists import one_label_a_row, read_lists
from paceline.data.task_rows import TaskRows

_MOST_CLASSES, _FEW_ROWS = 0.5, 20
"""From 20 rows on, more words than half of them are no classes: another column was picked by mistake."""


@final
class ClassRows(TaskRows):
    """One class a sample; its labels are the classes' names."""

    kind = "classification"

    def takes(self, column: LabelColumn) -> bool:
        """Take any column that no other task took, if it can hold classes."""
        distinct, numbers = column.distinct, column.numbers
        if numbers.others and column.are_mostly((*numbers.values, *numbers.others)):
            raise _several_notations(column)
        words = len(distinct) - len(numbers.values)
        if len(column.cells) >= _FEW_ROWS and words > _MOST_CLASSES * len(column.cells):
            raise DataError(
                f"{len(distinct):,} different labels in {len(column.cells):,} rows",
                file=column.file,
                column=column.name,
                found=column.names[0],
                why="a class needs several rows to be learned from; this looks like texts or names of rows",
                fix="--set data.label=COLUMN names another column; if these are classes: --set"
                " task.type=classification",
            )
        return True

    def read(self, column: LabelColumn, *, is_guess: bool) -> Interpreted:
        if column.holds_lists:
            lists = read_lists(column, one_each=True)
            if any(len(names) != 1 for names in lists.named):
                raise one_label_a_row(self.kind, column)
            one = [names[0] if names else "" for names in lists.labels]
            return Interpreted(kind=self.kind, labels=one, problems=lists.problems, notices=lists.notices)
        names, numbers = column.names, column.numbers.values
        problems = column.mixed()
        lost = {name for name, number in numbers.items() if not math.isfinite(number)}
        # among words, "nan" or "infinity" may be a class; among numbers it is a value that got lost
        if lost and (column.family == "numbers" or len(numbers) == len(column.distinct) > len(lost)):
            mixed = {problem.index for problem in problems}
            problems += [
                not_finite(index, name) for index, name in enumerate(names) if name in lost and index not in mixed
            ]
            problems.sort(key=lambda problem: problem.index)
        notices = []
        if is_guess and column.family != "true or false" and len(numbers) == len(column.distinct):
            why = f"it holds {len(numbers) - len(lost):,} different numbers"
            notices.append(column.guessed(self.kind, why))
        if len(set(numbers.values()) - {math.nan}) < len(numbers) - len(lost):
            twice = Counter(numbers.values()).most_common(1)[0][0]
            spelt = " and ".join(repr(name) for name, number in numbers.items() if number == twice)
            notices.append(f"label column {column.name!r}: {spelt} are one number but count as different classes")
        return Interpreted(kind=self.kind, labels=names, problems=tuple(problems), notices=tuple(notices))


ROWS = ClassRows()


def _several_notations(column: LabelColumn) -> DataError:
    numbers = column.numbers
    examples = [excerpt(next(iter(numbers.values))), excerpt(numbers.others[0])]
    return DataError(
        f"numbers in several notations: {' and '.join(examples)}",
        file=column.file,
        column=column.name,
        why="as classes they would have no order, and one number could be two classes",
        fix="write all of them alike; if these are classes: --set task.type=classification",
    )
