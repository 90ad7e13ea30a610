"""The step on a GPU: never waits, skips without a trace, and equals the hand-written loop up to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from paceline.data.dataset import Images
from paceline.data.layout import ImageLayout
from paceline.prepare.assemble import Assembled, assemble
from paceline.recipe import Recipe
from paceline.run.step_records import Late
from paceline.seams import Build
from paceline.tasks import task_for
from paceline.techniques import precision
from tests.gpu.waiting import waits_are_errors
from tests.parity.driving import assembled, recipe, train
from tests.parity.reference import tiny_model, train_by_hand

CUDA = torch.device("cuda")


def made(mode: str, **settings: object) -> tuple[Assembled, nn.Module, Recipe]:
    """A small network of our own: transformers' models look at their mask on the host."""
    generator = np.random.default_rng(0)
    images = Images(generator.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8))
    labels = generator.integers(0, 3, 64)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)).to(CUDA)
    chosen = recipe(techniques={"precision": mode}, optimizer={"decay_all": False, **settings})
    task = task_for("classification", ("a", "b", "c"), chosen.task)
    layout = ImageLayout(images, labels, CUDA, mean=(0.5,), deviation=(0.5,))
    build = Build(model=model, forward=lambda m, b: m(b.inputs["pixel_values"]), layout=layout, task=task, device=CUDA)
    return assemble(chosen, precision.apply(build, mode), 50), model, chosen


def step(run: Assembled, index: int) -> torch.Tensor:
    ids = (np.arange(8) + 8 * index) % 64
    halves = (run.build.layout.collate(part) for part in (ids[:5], ids[5:]))
    loss = run.engine.accumulate_batches(halves, 8, step=index).loss
    run.engine.update()
    return loss


@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_no_step_waits_for_the_device(mode: str, kind: str) -> None:
    run, _, _ = made(mode, type=kind)
    late: Late[int] = Late(CUDA)
    step(run, 0)
    seen = []
    with waits_are_errors():
        for index in range(1, 6):
            late.push(index, [step(run, index)])
            seen += [note for note, _ in late.ready()]
    assert [*seen, *(note for note, _ in late.flush())] == [1, 2, 3, 4, 5]


def test_the_wait_would_have_been_seen() -> None:
    with waits_are_errors(), pytest.raises(RuntimeError, match="synchron"):
        torch.ones((), device=CUDA).item()


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_an_overflow_in_the_very_first_step_leaves_no_trace(kind: str) -> None:
    run, model, _ = made("fp16", type=kind)
    before = {name: tensor.clone() for name, tensor in run.engine.whole().items()}
    hook = model[4].bias.register_hook(lambda gradient: gradient * float("inf"))
    step(run, 0)
    hook.remove()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, run.engine.whole()[name])] == []
    step(run, 1)
    step(run, 2)
    assert max((run.engine.whole()[name] - tensor).abs().max().item() for name, tensor in before.items()) < 0.1


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_an_overflowing_step_changes_nothing(kind: str) -> None:
    run, model, _ = made("fp16", type=kind)
    for index in range(3):
        step(run, index)
    tensors, scalars = run.engine.state()
    before = {f"{a}.{b}": t.clone() for a, named in tensors.items() for b, t in named.items()}
    hook = model[4].bias.register_hook(lambda gradient: gradient * float("inf"))
    step(run, 3)
    hook.remove()
    tensors, later = run.engine.state()
    after = {f"{a}.{b}": t for a, named in tensors.items() for b, t in named.items()}
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert later["applied"] == scalars["applied"] == 3
    assert later["loss_scale"]["scale"] == scalars["loss_scale"]["scale"] / 2
    step(run, 4)
    assert run.engine.state()[1]["applied"] == 4


def test_twenty_steps_stay_near_the_hand_written_loop_on_the_cpu() -> None:
    chosen = recipe(techniques={"precision": "fp32"})
    on_gpu = train(assembled(tiny_model(dropout=0.0), chosen, device="cuda"), chosen)
    by_hand = train_by_hand(
        tiny_model(dropout=0.0),
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01),
    )
    assert on_gpu == pytest.approx(by_hand, rel=2e-4)


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_lower_precision_stays_near_fp32(mode: str) -> None:
    losses = {}
    for chosen in (recipe(), recipe(techniques={"precision": mode})):
        losses[chosen.techniques.precision] = train(assembled(tiny_model(dropout=0.0), chosen, device="cuda"), chosen)
    # fp16 may skip its first steps while the scale settles, so only the start and the trend are compared
    assert losses[mode][0] == pytest.approx(losses["fp32"][0], rel=0.02)
    assert np.mean(losses[mode][-5:]) == pytest.approx(np.mean(losses["fp32"][-5:]), rel=0.05)


def test_state_taken_and_loaded_goes_on_with_the_same_losses() -> None:
    one, _, _ = made("bf16")
    for index in range(4):
        step(one, index)
    tensors, scalars = one.engine.state()
    saved = {stem: {name: t.clone().cpu() for name, t in named.items()} for stem, named in tensors.items()}
    expected = [step(one, index).item() for index in range(4, 8)]
    other, _, _ = made("bf16")
    other.engine.load(saved, scalars)
    assert [step(other, index).item() for index in range(4, 8)] == pytest.approx(expected, rel=1e-6)
