"""Cosine with restarts is transformers' schedule, and a run under it a hand-written loop under that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import get_cosine_with_hard_restarts_schedule_with_warmup

from paceline.contract.errors import RecipeError
from paceline.optim.schedule import factors
from paceline.recipe import Recipe
from paceline.recipe.parts import SchedulePart
from tests.parity.cards import run_example
from tests.parity.driving import assembled, assert_same_bits, recipe, train
from tests.parity.reference import STEPS, tiny_model, train_by_hand
from tests.parity.schedules import rates_of


def peers(cycles: int, warmup: int, steps: int) -> list[float]:
    return rates_of(lambda o: get_cosine_with_hard_restarts_schedule_with_warmup(o, warmup, steps, cycles), steps)


def test_a_run_equals_a_hand_written_loop_under_transformers_schedule_bit_for_bit() -> None:
    chosen = recipe(schedule={"type": "cosine_restarts", "warmup": 2, "cycles": 3})
    ours, theirs = tiny_model(), tiny_model()
    losses = train(assembled(ours, chosen), chosen)
    expected = train_by_hand(
        theirs,
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01),
        factor=factors(SchedulePart(type="cosine_restarts", warmup=2, cycles=3), STEPS).__getitem__,
    )
    assert losses == expected
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize(("cycles", "warmup", "steps"), [(2, 0, 40), (3, 7, 100), (5, 10, 64)])
def test_it_is_transformers(cycles: int, warmup: int, steps: int) -> None:
    found = factors(SchedulePart(type="cosine_restarts", warmup=warmup, cycles=cycles), steps)
    np.testing.assert_allclose(found, peers(cycles, warmup, steps), atol=1e-9)


def test_each_decay_ends_above_the_floor() -> None:
    found = factors(SchedulePart(type="cosine_restarts", warmup=0, cycles=4, floor=0.2), 400)
    assert [found[start] for start in (0, 100, 200, 300)] == [1.0] * 4
    assert found.min() == pytest.approx(0.2, abs=1e-3)


def test_its_setting_is_refused_beside_others() -> None:
    with pytest.raises(RecipeError, match="cycles: has no effect with type: cosine; it is of cosine_restarts"):
        Recipe.parse({"model": {"source": "any"}, "schedule": {"type": "cosine", "cycles": 4}})


def test_the_example_on_its_card() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert run_example("cosine_restarts", optimizer=optimizer)["scheduler"].get_last_lr()[0] == 0.0
