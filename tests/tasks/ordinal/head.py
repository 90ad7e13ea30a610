"""A head with a row for each step from one class to the next."""

from collections.abc import Sequence
from typing import final

import numpy as np

from paceline.models.heads import Row, TaskHead


@final
class OrdinalHead(TaskHead):
    problem_type = "multi_label_classification"
    rows_are_classes = False

    def outputs(self, label_names: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"above {name}" for name in label_names[:-1])

    def solve(
        self, features: np.ndarray, labels: np.ndarray, classifier: str, num_outputs: int, bias: bool
    ) -> list[Row]:
        raise NotImplementedError


HEAD = OrdinalHead()
