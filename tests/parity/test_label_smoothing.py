"""``task.label_smoothing`` beside torch's own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from paceline.tasks.label_smoothing import smoothed
from tests.parity.losses import assert_no_split_matters, assert_same, by_hand, chosen, differ, train

SMOOTHING = {"label_smoothing": 0.2}


def test_a_run_is_that_of_a_plain_loop_with_torchs_smoothing() -> None:
    found = train(chosen(task=SMOOTHING))
    assert_same(found, by_hand(partial(F.cross_entropy, label_smoothing=0.2)))
    assert differ(found, by_hand(F.cross_entropy))


def test_with_class_weights_it_is_torchs_of_both() -> None:
    weights = {"0": 0.5, "1": 1.0, "2": 4.0}
    criterion = torch.nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 4.0]), label_smoothing=0.2)
    assert_same(train(chosen(task={**SMOOTHING, "class_weights": weights})), by_hand(criterion))


def test_of_labels_by_themselves_it_is_that_of_two_classes() -> None:
    """A label and its absence are two classes, the logit of absence being 0."""
    logits, labels = torch.randn(6, 3), torch.randint(0, 2, (6, 3))
    ours = F.binary_cross_entropy_with_logits(logits, smoothed(labels.float(), 0.2), reduction="none")
    pairs = torch.stack([torch.zeros_like(logits), logits], dim=-1).flatten(0, 1)
    theirs = F.cross_entropy(pairs, labels.flatten(), label_smoothing=0.2, reduction="none")
    torch.testing.assert_close(ours, theirs.view_as(logits))


def test_a_multi_label_run_is_that_of_a_plain_loop() -> None:
    def criterion(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels * 0.8 + 0.1)

    assert_same(train(chosen(task=SMOOTHING), "multi_label"), by_hand(criterion, "multi_label"))


@pytest.mark.parametrize("kind", ["classification", "multi_label"])
def test_no_split_matters(kind: str) -> None:
    assert_no_split_matters(kind, task=SMOOTHING)
