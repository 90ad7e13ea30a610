"""Thresholds among equal scores, which no threshold tells apart."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.tasks.threshold import best_thresholds


@pytest.mark.parametrize(
    ("scores", "labels", "threshold"),
    [
        ([0.8, 0.8, 0.3], [1, 0, 0], 0.5),
        ([0.8, 0.8, 0.3], [0, 1, 0], 0.5),
        ([0.5, 0.2], [1, 0], 0.35),  # a score of one half is not above one half
        ([0.8, 0.5], [1, 0], 0.5),  # one half is taken where it is as good as any
        ([0.4, 0.4], [1, 0], 0.2),
    ],
)
def test_equal_scores_are_predicted_alike(scores: list[float], labels: list[int], threshold: float) -> None:
    found = best_thresholds(np.array(scores, np.float32)[:, None], np.array(labels)[:, None])
    assert found == pytest.approx((threshold,))
