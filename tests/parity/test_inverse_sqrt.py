"""Inverse square root is transformers' schedule, and a run under it a hand-written loop under that."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import get_inverse_sqrt_schedule

from paceline.contract.errors import RecipeError
from paceline.optim.schedule import factors
from paceline.recipe import Recipe
from paceline.recipe.parts import SchedulePart
from tests.parity.cards import run_example
from tests.parity.driving import assembled, recipe, train
from tests.parity.reference import STEPS, tiny_model, train_by_hand
from tests.parity.schedules import rates_of


def test_a_run_equals_a_hand_written_loop_under_transformers_schedule_bit_for_bit() -> None:
    chosen = recipe(schedule={"type": "inverse_sqrt", "warmup": 4})
    ours, theirs = tiny_model(), tiny_model()
    losses = train(assembled(ours, chosen), chosen)
    rates = rates_of(lambda o: get_inverse_sqrt_schedule(o, 4), STEPS)
    expected = train_by_hand(
        theirs,
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01),
        factor=rates.__getitem__,
    )
    assert losses == pytest.approx(expected, rel=1e-6)
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("warmup", "timescale"), [(0, None), (10, None), (10, 40), (0, 3)])
def test_it_is_transformers(warmup: int, timescale: int | None) -> None:
    found = factors(SchedulePart(type="inverse_sqrt", warmup=warmup, timescale=timescale), 500)
    expected = rates_of(lambda o: get_inverse_sqrt_schedule(o, warmup, timescale), 500)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timescale": 5}, "timescale: has no effect with type: linear; it is of inverse_sqrt"),
        ({"type": "inverse_sqrt", "floor": 0.1}, "floor: has no effect with type: inverse_sqrt"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.parse({"model": {"source": "any"}, "schedule": settings})


def test_the_example_on_its_card() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert run_example("inverse_sqrt", optimizer=optimizer)["scheduler"].get_last_lr()[0] == 0.0
