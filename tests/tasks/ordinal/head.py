"""A head with a row for each step from one class to the next."""

from collections.abc import Sequence
from typing import final

from paceline.models.heads import TaskHead


@final
class OrdinalHead(TaskHead):
    problem_type = "multi_label_classification"
    rows_are_classes = False

    def outputs(self, label_names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"above {name}" for name in label_names[:-1])


HEAD = OrdinalHead()
