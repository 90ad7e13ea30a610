"""Labels that are numbers and name classes in their order."""

from typing import final

from paceline.contract.errors import DataError
from paceline.data.sources.label_column import Interpreted, LabelColumn
from paceline.data.task_rows import TaskRows


@final
class OrdinalRows(TaskRows):
    kind = "ordinal"

    def read(self, column: LabelColumn, *, is_guess: bool) -> Interpreted:
        if column.holds_lists or len(column.numbers.values) < len(column.distinct):
            raise DataError("a label is no number", column=column.name, fix="write the place of each class")
        return Interpreted(kind=self.kind, labels=column.names, problems=tuple(column.mixed()))


ROWS = OrdinalRows()
