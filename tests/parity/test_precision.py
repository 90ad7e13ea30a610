"""Precision: bf16 equals a hand-written autocast loop; fp16's loss scaling skips what overflows and nothing else."""

import numpy as np
import pytest
import torch
from torch import nn

from paceline.machine.device import matmul_precision
from paceline.optim.gradients import FlatGradients
from paceline.optim.optimizer import build_optimizer, parameter_groups
from paceline.optim.updates import DeviceGated
from paceline.recipe.parts import OptimizerPart, ParallelPart, SchedulePart
from paceline.seams import Update
from paceline.techniques.precision import narrow_weights, summed_in
from tests.parity.driving import assembled, assert_same_bits, recipe, train
from tests.parity.reference import tiny_model, train_by_hand


def test_bf16_equals_a_hand_written_autocast_loop_bit_for_bit() -> None:
    chosen = recipe(techniques={"precision": "bf16"})
    ours, theirs = tiny_model(), tiny_model()
    losses = train(assembled(ours, chosen), chosen)
    expected = train_by_hand(
        theirs,
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01),
        wrap=lambda: torch.autocast("cpu", torch.bfloat16),
    )
    assert losses == expected
    assert_same_bits(ours, theirs)


def test_pure_bf16_equals_a_hand_written_loop_over_a_model_in_bf16_bit_for_bit() -> None:
    chosen = recipe(techniques={"precision": "pure_bf16"})
    ours, theirs = tiny_model(), tiny_model().to(torch.bfloat16)
    losses = train(assembled(ours, chosen), chosen)
    expected = train_by_hand(
        theirs, make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01)
    )
    assert losses == expected
    assert_same_bits(ours, theirs)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_pure_bf16_follows_fp32_and_rounds(packs: bool) -> None:
    fp32, pure = recipe(), recipe(techniques={"precision": "pure_bf16", "packing": packs})
    one = train(assembled(tiny_model(dropout=0.0), fp32), fp32)
    other = train(assembled(tiny_model(dropout=0.0), pure), pure)
    assert one != other
    assert one == pytest.approx(other, rel=0.03)


def test_the_states_of_pure_bf16_are_bf16_too() -> None:
    chosen = recipe(techniques={"precision": "pure_bf16"})
    run = assembled(tiny_model(), chosen)
    train(run, chosen, steps=1)
    states = {name: tensor for name, tensor in flat_state(run).items() if name.endswith(("exp_avg", "exp_avg_sq"))}
    assert states
    assert {tensor.dtype for tensor in states.values()} == {torch.bfloat16}


def test_batch_normalisation_and_buffers_stay_as_they_are_in_pure_bf16() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4))
    narrow_weights(model, torch.bfloat16)
    assert {p.dtype for part in (model[0], model[2]) for p in part.parameters()} == {torch.bfloat16}
    assert {t.dtype for t in (*model[1].parameters(), model[1].running_mean)} == {torch.float32}
    assert model(torch.ones(2, 3, 5, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_tied_weights_stay_tied_in_pure_bf16() -> None:
    model = nn.ModuleDict({"read": nn.Embedding(5, 4), "write": nn.Linear(4, 5, bias=False)})
    model["write"].weight = model["read"].weight
    narrow_weights(model, torch.bfloat16)
    assert model["write"].weight is model["read"].weight


def test_bf16_gradients_are_summed_in_fp32_unless_bf16_is_asked_for() -> None:
    wide, narrow = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16)
    assert summed_in(ParallelPart(), wide) is None, "in their own format, which may be wider"
    assert summed_in(ParallelPart(), narrow) is torch.float32
    assert summed_in(ParallelPart(reduce_dtype="bf16"), wide) is torch.bfloat16


def test_bf16_stays_near_fp32_but_is_not_it() -> None:
    fp32, bf16 = recipe(), recipe(techniques={"precision": "bf16"})
    one = train(assembled(tiny_model(dropout=0.0), fp32), fp32)
    other = train(assembled(tiny_model(dropout=0.0), bf16), bf16)
    assert one != other
    assert one == pytest.approx(other, rel=0.02)


def test_an_overflowing_step_under_loss_scaling_changes_nothing() -> None:
    chosen = recipe(techniques={"precision": "fp16"})
    model = tiny_model()
    run = assembled(model, chosen)
    train(run, chosen, steps=3)
    before = {name: tensor.clone() for name, tensor in flat_state(run).items()}
    _, scalars = run.engine.state()
    update = overflow(run, model)
    after, later = flat_state(run), run.engine.state()[1]
    assert not update.finite
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert later["applied"] == scalars["applied"] == 3
    assert later["loss_scale"]["scale"] == scalars["loss_scale"]["scale"] / 2
    train(run, chosen, steps=1, first=4)
    assert run.engine.state()[1]["applied"] == 4, "the step after a skipped one is applied with the next rate"


def test_a_run_under_loss_scaling_goes_on_with_its_scale_and_its_count() -> None:
    chosen = recipe(techniques={"precision": "fp16"})
    model, other = tiny_model(), tiny_model()
    run, resumed = assembled(model, chosen), assembled(other, chosen)
    overflow(run, model)
    train(run, chosen, steps=2)
    tensors, state = run.engine.state()
    resumed.engine.load({stem: {n: t.clone() for n, t in named.items()} for stem, named in tensors.items()}, state)
    assert resumed.engine.state()[1]["loss_scale"] == {"scale": 65536.0 / 2, "good_steps": 2}
    assert train(resumed, chosen, steps=3, first=2) == train(run, chosen, steps=3, first=2)
    assert_same_bits(other, model)


def test_a_non_finite_gradient_in_fp32_is_not_applied_either() -> None:
    chosen = recipe()
    model = tiny_model()
    run = assembled(model, chosen)
    train(run, chosen, steps=2)
    before = {name: tensor.clone() for name, tensor in flat_state(run).items()}
    assert not overflow(run, model).finite
    after = flat_state(run)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_matmul_precision_is_put_back() -> None:
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    before = [place.fp32_precision for place in places]
    for mode, wanted in (("tf32", "tf32"), ("fp32", "ieee")):
        with matmul_precision(mode):
            assert [place.fp32_precision for place in places] == [wanted] * 3
    assert [place.fp32_precision for place in places] == before


def overflow(run, model) -> Update:
    """A step whose gradient is infinite: one label's logit is made infinite by its bias's gradient."""
    hook = model.classifier.bias.register_hook(lambda gradient: gradient * float("inf"))
    run.engine.accumulate_batches([run.build.layout.collate(torch.arange(8).numpy())], 8, step=3)
    hook.remove()
    return run.engine.update()


def flat_state(run) -> dict[str, torch.Tensor]:
    tensors, _ = run.engine.state()
    return {f"{part}.{name}": tensor for part, named in tensors.items() for name, tensor in named.items()}


def test_fused_sgd_skips_its_very_first_step_without_a_trace() -> None:
    """The fused kernel would allocate its momentum and leave it unwritten."""
    weight = torch.nn.Parameter(torch.ones(4))
    part = OptimizerPart(type="sgd", lr=0.1, momentum=0.9)
    groups = parameter_groups([("w", weight)], part, SchedulePart())
    updates = DeviceGated(build_optimizer(groups, part, fused=True), np.full((4, 1), 0.1), torch.device("cpu"))
    gradients, one = FlatGradients([weight]), torch.ones(())
    weight.grad.fill_(float("inf"))
    updates.apply(gradients, one, torch.tensor(False))
    assert torch.equal(weight.detach(), torch.ones(4))
    assert updates.applied == 0
    weight.grad.fill_(1.0)
    updates.apply(gradients, one, torch.tensor(True))
    torch.testing.assert_close(weight.detach(), torch.full((4,), 1 - 0.1 * 1.9))  # nesterov: gradient + 0.9 momentum
