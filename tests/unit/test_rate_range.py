"""The range test's curve and what it suggests, on losses that are made up; and that its steps are a plain loop's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.prepare.assemble import assemble
from paceline.prepare.course import Course
from paceline.run.rate_range import RateRange, _swept, centred
from paceline.seams import Mesh
from paceline.verbs.lr import shown, suggestion
from tests.parity import driving
from tests.parity.reference import STEPS, tiny_model, train_by_hand

RATES = tuple(np.geomspace(1e-7, 1.0, 71).tolist())


def found(losses: np.ndarray) -> RateRange:
    kept = tuple(losses.tolist())
    return RateRange(name="made", optimizer="adamw", rates=RATES[: len(kept)], losses=kept, ended="it was made up")


def valley() -> np.ndarray:
    """Flat, fastest at 1e-4, lowest at 1e-2, and then up: over the rate's logarithm."""
    at = np.log10(RATES)
    return 1.0 - 0.5 / (1 + np.exp(-3 * (at + 4))) + np.where(at > -2, (at + 2) ** 2, 0.0)


def test_the_steepest_descent_and_a_tenth_of_the_lowest_loss_are_found() -> None:
    test = found(valley())
    assert test.steepest == pytest.approx(1e-4, rel=0.3)
    assert test.tenth_of_lowest == pytest.approx(1e-3, rel=0.6)
    assert (test.suggestion, test.rule) == (test.steepest, "steepest descent")
    assert "Suggested: --lr 1.0e-04 (steepest descent; a tenth of the rate with the lowest loss" in suggestion(test)


def test_the_more_careful_rule_is_followed() -> None:
    at = np.log10(RATES)
    test = found(np.where(at < -3, 1.0, np.where(at < -2, 1.0 - 0.5 * (at + 3), 0.5 + 5 * (at + 2))))
    assert test.suggestion == test.tenth_of_lowest
    assert test.suggestion < test.steepest
    assert test.rule == "a tenth of the rate with the lowest loss"


@pytest.mark.parametrize("losses", [np.ones(71), np.linspace(1, 2, 71), np.array([1.0, 0.5])], ids=str)
def test_where_the_loss_hardly_falls_nothing_is_suggested(losses: np.ndarray) -> None:
    test = found(losses)
    assert (test.suggestion, test.rule) == (None, "")
    assert suggestion(test).startswith("No rate is suggested")
    assert shown(test).count("\n") > 16


def test_the_mean_does_not_lag() -> None:
    rising = np.arange(100.0)
    np.testing.assert_allclose(centred(rising)[10:-10], rising[10:-10])


def swept(chosen, first: float, last: float) -> tuple[list[float], str]:
    run = driving.assembled(tiny_model(), chosen)
    rates = np.geomspace(first, last, STEPS)
    again = assemble(chosen, run.build, STEPS, factors=rates / chosen.optimizer.lr)
    return _swept(again, Course(chosen, driving.dataset(), run.build, Mesh()), rates, lambda _: None)


def test_steps_are_those_of_a_hand_written_loop_with_growing_rates() -> None:
    chosen = driving.recipe()
    losses, ended = swept(chosen, 1e-6, 1e-2)
    rates = np.geomspace(1e-6, 1e-2, STEPS) / 1e-3
    expected = train_by_hand(
        tiny_model(),
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01),
        factor=rates.__getitem__,
    )
    assert losses == expected
    assert ended == "the last rate was reached"


def test_it_ends_where_the_loss_diverges() -> None:
    losses, ended = swept(driving.recipe(optimizer={"clip_norm": None}), 1e-2, 1e3)
    assert len(losses) < STEPS
    assert ended in ("the running loss was 4 times its lowest", "loss or gradient was no number")
