"""fp16's loss scale is arithmetic, and needs no GPU: a step under it is a step without it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError, UserError
from paceline.engine.adopt import adopt
from paceline.engine.step import Step
from paceline.optim.gradients import FlatGradients
from paceline.optim.optimizer import build_optimizer, parameter_groups
from paceline.optim.scaling import Dynamic, LossScale, Unscaled
from paceline.optim.updates import HostGated
from paceline.recipe import Recipe
from paceline.recipe.parts import LossScalePart, OptimizerPart, SchedulePart

INITIAL, INTERVAL = 65536.0, 2000
CPU, YES, NO = torch.device("cpu"), torch.tensor(True), torch.tensor(False)


def stepped(scale: LossScale, clip_norm: float | None, steps: int = 3) -> tuple[nn.Module, list[float], list[Tensor]]:
    """A model after a few steps of plain SGD, whose updates show a gradient's size; the norms, and the losses."""
    torch.manual_seed(0)
    model, norms, losses = nn.Linear(4, 3), list[float](), list[Tensor]()
    part = OptimizerPart(type="sgd", lr=0.1, momentum=0.0, nesterov=False, decay_all=True)
    groups = parameter_groups(list(model.named_parameters()), part, SchedulePart())
    gradients = FlatGradients(list(model.parameters()))

    def objective(inputs: Tensor) -> tuple[Tensor, Any]:
        return model(inputs).square().sum(), None

    step = Step(objective, gradients, scale, HostGated(build_optimizer(groups, part, fused=False), None), clip_norm)
    for _ in range(steps):
        # the scale is a power of two: not a bit differs
        losses.append(step.micro(torch.randn(5, 4), 5.0, first=True, last=True)[0])
        norm, finite, *_ = step.apply_update()
        assert finite
        norms.append(norm.item())
    return model, norms, losses


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e3], ids=["not clipped", "clipped", "a clip that never bites"])
def test_a_scaled_step_has_the_bits_of_a_plain_one(clip_norm: float | None) -> None:
    model, norms, losses = stepped(Dynamic(CPU), clip_norm)
    plain, expected, expected_losses = stepped(Unscaled(), clip_norm)
    assert norms == expected, "the norm that is told and clipped by is not that of the gradients themselves"
    assert losses == expected_losses
    assert norms[0] > 0.5, "nothing would be clipped"
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), f"{name} took another update"


def test_a_norm_below_the_clip_changes_nothing() -> None:
    model, plain = stepped(Unscaled(), 1e3)[0], stepped(Unscaled(), None)[0]
    assert all(map(torch.equal, model.parameters(), plain.parameters())), "gradients were stretched to the clip's norm"


def test_backward_starts_from_the_scaled_loss() -> None:
    weight = nn.Parameter(torch.ones(2))
    gradients = FlatGradients([weight])
    updates = HostGated(torch.optim.SGD([weight], lr=0.1), None)
    Step(lambda factor: ((weight * factor).sum(), None), gradients, Dynamic(CPU), updates, None).micro(
        1e-6, 1.0, first=True, last=True
    )
    assert weight.grad.tolist() == pytest.approx([1e-6 * INITIAL] * 2), "small gradients would vanish in fp16"


def test_the_scale_doubles_after_so_many_good_steps_in_a_row() -> None:
    scale = Dynamic(CPU)
    for _ in range(INTERVAL - 1):
        scale.adapt(YES)
    assert scale.state() == {"scale": INITIAL, "good_steps": INTERVAL - 1}
    scale.adapt(YES)
    assert scale.state() == {"scale": 2 * INITIAL, "good_steps": 0}


def test_an_overflow_halves_the_scale_and_the_count_begins_anew() -> None:
    scale = Dynamic(CPU)
    for _ in range(INTERVAL - 1):
        scale.adapt(YES)
    scale.adapt(NO)
    assert scale.state() == {"scale": INITIAL / 2, "good_steps": 0}
    scale.adapt(NO)
    scale.adapt(YES)
    assert scale.state() == {"scale": INITIAL / 4, "good_steps": 1}
    assert scale.up(torch.tensor(3.0)) == 3 * INITIAL / 4
    assert scale.down(torch.tensor(3.0)) == 12 / INITIAL


def test_a_saved_scale_is_taken_up_in_place() -> None:
    """Recorded steps read it where it was."""
    saved, scale = Dynamic(CPU), Dynamic(CPU)
    for finite in (NO, NO, YES, YES, YES):
        saved.adapt(finite)
    places = scale._scale.data_ptr(), scale._good_steps.data_ptr()
    scale.load(saved.state())
    assert scale.state() == saved.state() == {"scale": INITIAL / 4, "good_steps": 3}
    assert (scale._scale.data_ptr(), scale._good_steps.data_ptr()) == places


def test_the_defaults_are_those_of_torch() -> None:
    theirs = inspect.signature(torch.amp.GradScaler.__init__).parameters
    ours = LossScalePart().model_dump()
    assert ours == {name: theirs[name].default for name in ours}


def test_each_setting_of_torchs_scaler_does_as_it_does_there() -> None:
    settings = {"init_scale": 1000.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 2}
    scale, theirs = Dynamic(CPU, LossScalePart(**settings)), torch.amp.GradScaler("cpu", **settings)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for finite in (YES, YES, YES, NO, YES, YES, NO, NO):
        theirs.scale(weight * (1.0 if finite else torch.inf)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        scale.adapt(finite)
        assert scale.state()["scale"] == theirs.get_scale()
    assert scale.state()["scale"] == 1000 * 3 * 0.25 * 3 * 0.25**2


@pytest.mark.parametrize(
    "settings",
    [
        {"init_scale": 0.0},
        {"init_scale": float("inf")},
        {"init_scale": 1e39},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"growth_interval": 2**31},
        {"interval": 5},
    ],
    ids=str,
)
def test_a_scale_that_cannot_be_kept_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match=r"optimizer\.loss_scale"):
        Recipe.parse({"model": {"source": "m"}, "optimizer": {"loss_scale": settings}})
    with pytest.raises(UserError, match=r"True, or a dict of init_scale"):
        adopt(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()), torch.sum, loss_scaling=settings)


def test_a_loop_of_ones_own_begins_with_the_scale_it_names() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = adopt(model, optimizer, lambda model, rows: model(rows).sum(), loss_scaling={"init_scale": 8.0})
    engine.accumulate([torch.ones(1, 2)], denominator=1)
    assert engine.update().loss_scale == 8.0
