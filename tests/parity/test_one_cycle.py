"""One cycle is torch's OneCycleLR, and a run under it a hand-written loop under that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from paceline.contract.errors import RecipeError
from paceline.optim.schedule import factors
from paceline.recipe import Recipe
from paceline.recipe.parts import SchedulePart
from tests.parity.cards import run_example
from tests.parity.driving import assembled, assert_same_bits, recipe, train
from tests.parity.reference import STEPS, tiny_model, train_by_hand
from tests.parity.schedules import rates_of


def test_a_run_equals_a_hand_written_loop_under_torchs_schedule_bit_for_bit() -> None:
    chosen = recipe(schedule={"type": "one_cycle", "warmup": 0.3})
    ours, theirs = tiny_model(), tiny_model()
    losses = train(assembled(ours, chosen), chosen)
    rates = rates_of(lambda o: OneCycleLR(o, 1.0, STEPS, cycle_momentum=False), STEPS)
    expected = train_by_hand(
        theirs,
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01),
        factor=rates.__getitem__,
    )
    assert losses == expected
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 33, 200])
@pytest.mark.parametrize("settings", [{}, {"warmup": 0.45, "div_factor": 4.0, "floor": 0.0025}])
def test_it_is_torchs_at_any_length(steps: int, settings: dict[str, float]) -> None:
    part = SchedulePart(type="one_cycle", **settings)
    theirs = {
        "pct_start": part.warmup,
        "div_factor": part.div_factor,
        "final_div_factor": 1 / part.floor / part.div_factor,
    }
    if steps < 2 or part.warmup * steps == 1:  # torch divides by the steps of a phase
        assert np.isfinite(factors(part, steps)).all()
        return
    expected = rates_of(lambda o: OneCycleLR(o, 1.0, steps, cycle_momentum=False, **theirs), steps)
    np.testing.assert_allclose(factors(part, steps), expected, atol=1e-12)


def test_the_ends_are_torchs_where_nothing_is_said_and_only_there() -> None:
    plain = {"model": {"source": "any"}, "schedule": {"type": "one_cycle"}}
    assert (Recipe.parse(plain).schedule.warmup, Recipe.parse(plain).schedule.floor) == (0.3, 4e-6)
    said = Recipe.parse({**plain, "schedule": {"type": "one_cycle", "warmup": 0.1, "floor": 0.5}}).schedule
    assert (said.warmup, said.floor) == (0.1, 0.5)
    # a run keeps its recipe written out
    assert Recipe.parse(Recipe.parse(plain).resolved()).schedule == Recipe.parse(plain).schedule


def test_its_setting_is_refused_beside_others() -> None:
    with pytest.raises(RecipeError, match="div_factor: has no effect with type: linear; it is of one_cycle"):
        Recipe.parse({"model": {"source": "any"}, "schedule": {"div_factor": 10}})


def test_the_example_on_its_card() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    names = run_example("one_cycle", optimizer=optimizer)
    assert names["scheduler"].get_last_lr()[0] == pytest.approx(0.1 / 25)
