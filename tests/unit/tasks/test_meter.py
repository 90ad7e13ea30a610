import warnings

import pytest
import torch

from paceline.tasks.metrics import (
    OF_ALL_SCORES,
    classification_metrics,
    multi_label_metrics,
    regression_metrics,
)

KNOWN = {
    "classification": (classification_metrics, 3),
    "multi_label": (multi_label_metrics, 3),
    "regression": (regression_metrics, 1),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_every_metric_is_a_sum_or_is_computed_of_all_scores(kind: str) -> None:
    """What ranks are told to add up must be made to be added up, and be whole or a fraction throughout."""
    known, classes = KNOWN[kind]
    for name, make in known().items():
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            metric = make(classes)
        assert not metric.sync_on_compute, f"{name} would gather its states by itself, within one rank's compute"
        sums = {
            reduction is not None and reduction.__name__ == "dim_zero_sum" for reduction in metric._reductions.values()
        }
        tensors = all(isinstance(state, torch.Tensor) for state in metric.metric_state.values())
        assert (name in OF_ALL_SCORES) != (sums == {True} and tensors), f"{name} is {metric._reductions}"
