"""A head with one row, whose output is the number itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from paceline.models.heads import Row, TaskHead

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@final
class TargetHead(TaskHead):
    """One output, of no class."""

    problem_type = "regression"
    rows_are_classes = False

    def claims(self, config: PretrainedConfig) -> bool:
        return bool(config.num_labels == 1)

    def solve(
        self, features: NDArray[np.float64], labels: NDArray[Any], classifier: str, num_outputs: int, bias: bool
    ) -> list[Row]:
        from sklearn.linear_model import Ridge
        from sklearn.svm import LinearSVR

        if classifier == "svm":
            # the squared loss has a fast primal solver; liblinear shrinks the intercept unless it is scaled up
            solver = LinearSVR(
                fit_intercept=bias, intercept_scaling=100.0, random_state=0, max_iter=20_000,
                loss="squared_epsilon_insensitive", dual=False,
            )  # fmt: skip
        else:
            solver = Ridge(fit_intercept=bias)
        solver.fit(features, np.asarray(labels, np.float64).ravel())
        return [(solver.coef_.ravel(), float(np.ravel(solver.intercept_)[0]) if bias else 0.0)]


HEAD = TargetHead()
