"""The likeliest place."""

from collections.abc import Sequence
from typing import Any, final

from paceline.tasks.predictions import TaskPredictions, rounded


@final
class OrdinalPredictions(TaskPredictions):
    def cells(
        self, label_names: Sequence[str], thresholds: Sequence[float], scores: Sequence[float], *, joined: bool
    ) -> list[Any]:
        return [label_names[max(range(len(scores)), key=scores.__getitem__)], *rounded(scores)]


PREDICTIONS = OrdinalPredictions()
