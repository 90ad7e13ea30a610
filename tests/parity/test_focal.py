"""``task.loss: focal`` beside the paper's formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.tasks.focal import focal_loss
from tests.parity.losses import assert_no_split_matters, assert_same, by_hand, chosen, differ, train

FOCAL = {"loss": "focal", "focal_gamma": 1.5}
BY_NAME = {"class_weights": {"0": 0.5, "1": 1.0, "2": 4.0}}


def formula(logits: torch.Tensor, labels: torch.Tensor, gamma: float = 1.5) -> torch.Tensor:
    """Equation 4 of Lin et al.: -(1 - p) ** gamma * log(p), the mean over samples."""
    right = logits.softmax(-1)[torch.arange(len(labels)), labels]
    return (-((1 - right) ** gamma) * right.log()).mean()


def sigmoid_formula(logits: torch.Tensor, labels: torch.Tensor, gamma: float = 1.5, alpha: float = -1) -> torch.Tensor:
    """As ``torchvision.ops.sigmoid_focal_loss`` writes it, the mean over samples and labels."""
    p = logits.sigmoid()
    cross_entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    right = p * labels + (1 - p) * (1 - labels)
    loss = cross_entropy * (1 - right) ** gamma
    if alpha >= 0:
        loss = (alpha * labels + (1 - alpha) * (1 - labels)) * loss
    return loss.mean()


def test_a_run_is_that_of_a_plain_loop_with_the_papers_formula() -> None:
    found = train(chosen(task=FOCAL))
    assert_same(found, by_hand(formula))
    assert differ(found, by_hand(F.cross_entropy))


def test_a_multi_label_run_is_that_of_torchvisions_formula() -> None:
    assert_same(train(chosen(task=FOCAL), "multi_label"), by_hand(sigmoid_formula, "multi_label"))


def test_alpha_is_a_weight() -> None:
    """torchvision's alpha of present labels and 1 - alpha of absent ones: a weight of one over the other."""
    logits, labels = torch.randn(20, 3), torch.randint(0, 2, (20, 3)).float()
    ours = focal_loss(logits, labels, 2.0, torch.full((3,), 0.25 / 0.75)).mean() * 0.75
    torch.testing.assert_close(ours, sigmoid_formula(logits, labels, 2.0, alpha=0.25))


def test_with_class_weights_it_is_divided_by_their_sum() -> None:
    weight = torch.tensor([0.5, 1.0, 4.0])

    def criterion(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = torch.stack([formula(logits[i : i + 1], labels[i : i + 1]) for i in range(len(labels))])
        return (each * weight[labels]).sum() / weight[labels].sum()

    assert_same(train(chosen(task={**FOCAL, **BY_NAME})), by_hand(criterion))


@pytest.mark.parametrize("kind", ["classification", "multi_label"])
@pytest.mark.parametrize("more", [{}, BY_NAME], ids=["plain", "weighted"])
def test_with_gamma_0_it_is_cross_entropy(kind: str, more: dict[str, object]) -> None:
    zero = {"loss": "focal", "focal_gamma": 0.0}
    assert_same(train(chosen(task={**zero, **more}), kind), train(chosen(task=more), kind))


@pytest.mark.parametrize("kind", ["classification", "multi_label"])
def test_no_split_matters(kind: str) -> None:
    assert_no_split_matters(kind, task={**FOCAL, "class_weights": "balanced"})


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_a_sample_that_is_certain_has_a_gradient_that_is_a_number(gamma: float) -> None:
    """(1 - p) ** gamma has no slope at p = 1 where gamma is below 1."""
    for labels in (torch.tensor([0, 1]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])):
        logits = torch.tensor([[200.0, -200.0], [200.0, -200.0]], requires_grad=True)
        loss = focal_loss(logits, labels, gamma).sum()
        loss.backward()
        assert loss.isfinite()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
