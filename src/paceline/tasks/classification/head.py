"""A head with a row for each class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from paceline.models.heads import NEVER, Row, TaskHead, linear_classifier

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@final
class ClassHead(TaskHead):
    """Logits of the classes, of which a softmax is taken."""

    problem_type = "single_label_classification"

    def written_problem(self, num_outputs: int) -> str | None:
        # transformers reads no configuration that says one class; paceline.json does
        return None if num_outputs == 1 else self.problem_type

    def claims(self, config: PretrainedConfig) -> bool:
        return True

    def num_thresholds(self, num_labels: int) -> int:
        return int(num_labels == 2)

    def solve(
        self, features: NDArray[np.float64], labels: NDArray[Any], classifier: str, num_outputs: int, bias: bool
    ) -> list[Row]:
        rows: list[Row] = [(np.zeros(features.shape[1]), NEVER)] * num_outputs
        classes = np.unique(labels)
        if len(classes) == 1:
            rows[int(classes[0])] = (np.zeros(features.shape[1]), 0.0)
            return rows
        solver = linear_classifier(classifier, bias).fit(features, labels)
        weight, offset = solver.coef_, np.broadcast_to(solver.intercept_, len(solver.coef_))
        if len(classes) == 2:
            # one decision value z; logits -z/2 and z/2 have the softmax of sigmoid(z)
            weight, offset = np.stack([-weight[0], weight[0]]) / 2, np.array([-offset[0], offset[0]]) / 2
        for row, label in enumerate(classes):
            rows[int(label)] = (weight[row], float(offset[row]))
        return rows


HEAD = ClassHead()
