"""A trial leaves the model, its gradients, torch's random numbers and its precision as they were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.compare import exactly, results, trial_of
from paceline.recipe.parts import TaskPart
from paceline.seams import Batch
from paceline.tasks import task_for


class Net(nn.Module):
    """A layer with dropout, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 3), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.used(x), 0.5, self.training)


def forward(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch.inputs)  # type: ignore[no-any-return]


BATCH = Batch(inputs={"x": torch.ones(4, 2)}, labels=torch.tensor([0, 1, 2, 0]), weights=torch.ones(4))
TASK = task_for("classification", ("a", "b", "c"), TaskPart())


def test_results_are_those_of_a_copy_without_dropout() -> None:
    model = Net().bfloat16()
    before = torch.get_rng_state()
    with exactly(torch.device("cpu")), torch.no_grad():
        torch.manual_seed(3)
        trial = trial_of(model)
        with torch.enable_grad():
            logits, gradients = results(trial, forward, TASK, BATCH)
            again = results(trial, forward, TASK, BATCH)
    assert torch.equal(torch.get_rng_state(), before)
    assert logits.dtype == torch.float32, "a model in half precision is tried in full"
    assert not logits.requires_grad
    assert torch.equal(again.logits, logits)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert not gradients["unused.weight"].any(), "no gradient is as good as one of zero"
    assert gradients["used.weight"].any()
    assert all(parameter.grad is None for parameter in (*model.parameters(), *trial.parameters()))
    assert model.training


def test_a_model_of_which_nothing_is_trained_has_logits_alone() -> None:
    trial = trial_of(Net().double().requires_grad_(False))
    logits, gradients = results(trial, lambda model, batch: model(batch.inputs["x"].double()), TASK, BATCH)
    assert (logits.dtype, gradients) == (torch.float64, {})


def test_inside_products_are_full_and_gradients_on() -> None:
    with torch.no_grad(), torch.autocast("cpu"), exactly(torch.device("cpu")):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
