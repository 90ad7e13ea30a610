"""A head with a row for each label."""

from __future__ import annotations

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from paceline.models.heads import NEVER, Row, TaskHead, linear_classifier


@final
class LabelHead(TaskHead):
    """Logits of the labels, of each of which a sigmoid is taken."""

    problem_type = "multi_label_classification"

    def num_thresholds(self, num_labels: int) -> int:
        return num_labels

    def solve(
        self, features: NDArray[np.float64], labels: NDArray[Any], classifier: str, num_outputs: int, bias: bool
    ) -> list[Row]:
        return [_solve_one(features, labels[:, c] > 0.5, classifier, bias) for c in range(num_outputs)]


HEAD = LabelHead()


def _solve_one(features: NDArray[np.float64], positive: NDArray[np.bool_], classifier: str, bias: bool) -> Row:
    if positive.all() or not positive.any():
        return np.zeros(features.shape[1]), (-NEVER if positive.all() else NEVER) * bias
    solver = linear_classifier(classifier, bias).fit(features, positive)
    return solver.coef_[0], float(np.ravel(solver.intercept_)[0]) if bias else 0.0
