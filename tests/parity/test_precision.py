"""Precision: bf16 equals a hand-written autocast loop; fp16's loss scaling skips what overflows and nothing else."""

import pytest
import torch

from paceline.engine.engine import Update
from paceline.techniques.precision import matmul_precision
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
    before = torch.backends.cuda.matmul.fp32_precision
    with matmul_precision("tf32"):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


def overflow(run, model) -> Update:
    """A step whose gradient is infinite: one label's logit is made infinite by its bias's gradient."""
    hook = model.classifier.bias.register_hook(lambda gradient: gradient * float("inf"))
    run.engine.accumulate([run.build.layout.collate(torch.arange(8).numpy())], 8, step=3)
    hook.remove()
    return run.engine.update()


def flat_state(run) -> dict[str, torch.Tensor]:
    tensors, _ = run.engine.state()
    return {f"{part}.{name}": tensor for part, named in tensors.items() for name, tensor in named.items()}
