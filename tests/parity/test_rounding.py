"""Small updates of weights in bf16: what each rounding makes of them, beside fp32 and beside loops written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.machine.facts import this_machine
from paceline.optim.rounding import PIECE, kahan_, noise_of, stochastic_, update_in_fp32
from paceline.optim.updates import FlatUpdates, build_updates
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.parts import OptimizerPart
from paceline.seams import World
from tests.distributed import splitting
from tests.parity.cards import run_example
from tests.parity.driving import assembled, assert_same_bits, recipe, train
from tests.parity.reference import tiny_model
from tests.parity.test_flat_update import groups_of
from tests.testing.distributed import run_distributed

CPU = torch.device("cpu")
NARROW = {"precision": "pure_bf16"}


def tiny_updates(rounding: str, steps: int = 1000) -> Tensor:
    """Weights of 1 after updates of 1e-5 by SGD, of which bf16 sees none."""
    model = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    part = OptimizerPart(type="sgd", lr=1e-5, momentum=0.0, nesterov=False, rounding=rounding)
    updates, gradients = build_updates(groups_of(model, part), part, np.full((steps, 1), 1e-5), CPU)
    for _ in range(steps):
        model.weight.grad.fill_(-1.0)
        updates.apply(gradients, torch.ones(()), torch.tensor(True))
    assert updates.applied == steps
    return model.weight.detach().float()


def test_many_tiny_updates_arrive_with_kahan_and_are_lost_with_nearest() -> None:
    exact = 1.01
    assert torch.all(tiny_updates("nearest") == 1.0)
    kahan = tiny_updates("kahan")
    assert torch.all((kahan - exact).abs() < 2**-8), "as near as bf16 can be"
    assert torch.all(kahan == kahan[0, 0])


def test_many_tiny_updates_arrive_on_average_with_stochastic_rounding() -> None:
    found = tiny_updates("stochastic")
    # 4,096 weights, each a sum of 1,000 draws: a standard error of 0.0001
    assert found.mean().item() == pytest.approx(1.01, abs=5e-4)
    assert len(found.unique()) > 1


def by_hand(model: nn.Module, steps: list[dict[str, Tensor]], lr: float) -> dict[str, Tensor]:
    """Kahan over torch's own AdamW in fp32, whose states are rounded to bf16 after each step."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    rest = {name: torch.zeros_like(w) for name, w in weights.items()}
    states = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    for number, gradients in enumerate(steps, 1):
        for name, weight in weights.items():
            exact, wide = weight.float() + rest[name].float(), [state.float() for state in states[name]]
            torch._fused_adamw_(
                [exact],
                [gradients[name].float()],
                [wide[0]],
                [wide[1]],
                [],
                [torch.tensor(float(number))],
                lr=lr,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.0,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
            states[name] = wide[0].bfloat16(), wide[1].bfloat16()
            weights[name] = exact.bfloat16()
            rest[name] = (exact - weights[name].float()).bfloat16()
    return weights


def test_kahan_is_a_loop_written_by_hand_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64)).bfloat16()
    steps = [{n: torch.randn(p.shape).bfloat16() for n, p in model.named_parameters()} for _ in range(12)]
    expected = by_hand(model, steps, 1e-4)
    part = OptimizerPart(lr=1e-4, weight_decay=0.0, rounding="kahan")
    updates, gradients = build_updates(groups_of(model, part), part, np.full((1, 1), 1e-4), CPU)
    for given in steps:
        for name, parameter in model.named_parameters():
            parameter.grad.copy_(given[name])
        updates.apply(gradients, torch.ones(()), torch.tensor(True))
    assert [n for n, p in model.named_parameters() if not torch.equal(p, expected[n])] == []


def test_losses_are_nearer_to_those_of_fp32_weights() -> None:
    def losses(**settings: Any) -> list[float]:
        techniques = NARROW if settings else {}
        chosen = recipe(techniques=techniques, optimizer={"lr": 3e-5, **settings}, schedule={"type": "constant"})
        return train(assembled(tiny_model(dropout=0.0), chosen), chosen)

    def far(rounding: str) -> float:
        return float(np.abs(np.array(losses(rounding=rounding)) - wide)[-10:].mean())

    wide = np.array(losses())
    assert far("kahan") < far("nearest")


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_a_skipped_step_changes_nothing_at_all(rounding: str) -> None:
    model = nn.Linear(8, 8).bfloat16()
    part = OptimizerPart(lr=1e-3, rounding=rounding)
    updates, gradients = build_updates(groups_of(model, part), part, np.full((9, 2), 1e-3), CPU)
    names = {p: n for n, p in model.named_parameters()}

    def step(finite: bool) -> None:
        for parameter in model.parameters():
            parameter.grad.normal_()
        updates.apply(gradients, torch.ones(()), torch.tensor(finite))

    step(True)
    before = {name: tensor.clone() for name, tensor in {**updates.tensors(names), **model.state_dict()}.items()}
    step(False)
    after = {**updates.tensors(names), **model.state_dict()}
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert any("compensation" in name for name in after) is (rounding == "kahan")


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_never_stopped(rounding: str, kind: str) -> None:
    chosen = recipe(techniques=NARROW, optimizer={"type": kind, "rounding": rounding})
    whole, first, second = (tiny_model() for _ in range(3))
    run, begun, resumed = (assembled(model, chosen) for model in (whole, first, second))
    train(run, chosen, 8)  # one epoch of the reference's samples, so that the next begins anew
    train(run, chosen, 5, start=None, first=8)
    train(begun, chosen, 8)
    tensors, state = begun.engine.state()
    resumed.engine.load({stem: {n: t.clone() for n, t in named.items()} for stem, named in tensors.items()}, state)
    train(resumed, chosen, 5, first=8)
    assert_same_bits(whole, second)


def over_ranks(world: World, rounding: str) -> str:
    chosen = recipe(techniques=NARROW, optimizer={"rounding": rounding}, parallel={"strategy": "ddp"})
    run = splitting.assembled(world, chosen)
    splitting.train(run, chosen, world, 4)
    assert {p.dtype for p in run.build.model.parameters()} == {torch.bfloat16}
    return splitting.checksum({n: t.float() for n, t in run.engine.whole().items()})


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_two_ranks_hold_the_same_weights(rounding: str) -> None:
    one, other = run_distributed(over_ranks, 2, rounding)
    assert one == other


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def updated(rounding: str, piece: int) -> list[Tensor]:
        monkeypatch.setattr("paceline.optim.rounding.PIECE", piece)
        torch.manual_seed(1)
        tensors = [[torch.randn(1000).bfloat16()] for _ in range(2)] + [[torch.zeros(1000).bfloat16()]]
        given = tensors if rounding == "kahan" else tensors[:2]

        def descend(wide: Any) -> None:
            wide[0][0].sub_(1e-4 * wide[1][0])

        one = torch.ones(())
        update_in_fp32(given, descend, rounding=rounding, step=one, skipped=torch.tensor(False))
        return [column[0] for column in given]

    assert all(map(torch.equal, updated("kahan", 64), updated("kahan", PIECE)))
    coarse, fine = (updated("stochastic", piece)[0].float() for piece in (PIECE, 64))
    torch.testing.assert_close(coarse, fine, rtol=2**-7, atol=0.0)


def test_noise_is_even_and_of_its_step_and_place_alone() -> None:
    shape, step = torch.Size((100_000,)), torch.tensor(7.0)
    noise = noise_of(shape, step, 0, CPU)
    assert torch.equal(noise, noise_of(shape, torch.tensor(7.0), 0, CPU))
    assert noise.min() >= 0
    assert noise.max() < 2**16
    assert noise.float().mean().item() == pytest.approx(2**15, rel=0.01)
    for other in (noise_of(shape, step + 1, 0, CPU), noise_of(shape, step, 100_000, CPU)):
        assert (other == noise).float().mean() < 1e-3
        together = torch.stack([other, noise]).double()
        assert abs(torch.corrcoef(together)[0, 1].item()) < 0.02


def test_stochastic_rounding_is_between_the_neighbours_with_the_right_mean() -> None:
    exact = torch.full((200_000,), 1.0 + 0.3 * 2**-7)
    for sign in (1, -1):
        weight = torch.empty_like(exact, dtype=torch.bfloat16)
        stochastic_(weight, sign * exact, noise_of(exact.shape, torch.ones(()), 0, CPU))
        assert set(weight.float().unique().tolist()) == {sign * 1.0, sign * (1.0 + 2**-7)}
        assert (weight.float() * sign - 1).mean().item() == pytest.approx(0.3 * 2**-7, rel=0.02)


def test_what_kahan_keeps_is_what_rounding_took() -> None:
    weight, rest = torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    exact = torch.tensor([1.0 + 2**-10, 1.0 - 2**-12, 3.0])
    kahan_(weight, rest, exact)
    assert torch.equal(weight.float() + rest.float(), exact)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs techniques.precision = pure_bf16"),
        ({"techniques": NARROW, "model": {"source": "any", "train": "features"}}, "cannot work with model.train"),
        (
            {"techniques": NARROW, "parallel": {"strategy": "fsdp"}},
            "cannot work with parallel.strategy = fsdp: shards are updated by torch",
        ),
    ],
)
def test_what_it_cannot_work_with_is_refused(settings: dict[str, Any], message: str) -> None:
    plain = {"model": {"source": "any"}, "device": "cpu", "optimizer": {"rounding": "kahan"}, **settings}
    with pytest.raises(RecipeError, match=message):
        choose(Recipe.parse(plain), this_machine(), 2 if "parallel" in settings else 1)


def test_nearest_is_as_before_and_allocates_nothing() -> None:
    model = nn.Linear(4, 4).bfloat16()
    part = OptimizerPart()
    updates, _ = build_updates(groups_of(model, part), part, np.full((9, 2), 1e-3), torch.device("meta"))
    assert isinstance(updates, FlatUpdates)
    updates.prime()
    assert not any("compensation" in name for name in updates.tensors({p: n for n, p in model.named_parameters()}))


def test_the_example_on_its_card() -> None:
    names = run_example("rounding")
    assert names["weight"].float().mean().item() == pytest.approx(1.01, abs=2**-8)
