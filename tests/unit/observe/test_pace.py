import math

import pytest

from paceline.contract.records import StepRecord
from paceline.observe.pace import WINDOW_STEPS, Pace


def step(number, *, seconds=0.1, loss=1.0, samples=8, tokens=80, slots=100, counted=8, skipped=False):
    return StepRecord(
        step=number,
        epoch=0,
        loss=loss,
        gradient_norm=1.0,
        learning_rates=(1e-3,),
        samples=samples,
        tokens=tokens,
        slots=slots,
        correct=None,
        counted=counted,
        skipped=skipped,
        seconds=seconds,
        peak_bytes=None,
    )


def test_slow_first_steps_do_not_count():
    pace = Pace(0, 100)
    for number in (1, 2):
        pace.add(step(number, seconds=60))
        assert pace.seconds_left is None
        assert pace.samples_per_second is None
    for number in range(3, 11):
        pace.add(step(number))
    assert pace.seconds_left == pytest.approx(9.0)
    assert pace.samples_per_second == pytest.approx(80)
    assert pace.tokens_per_second == pytest.approx(800)
    assert pace.padding_share == pytest.approx(0.2)


def test_rates_follow_a_change_of_speed():
    pace = Pace(0, 10_000)
    for number in range(1, 1001):
        pace.add(step(number, seconds=0.1))
    for number in range(1001, 1001 + WINDOW_STEPS):
        pace.add(step(number, seconds=10.0))
    assert pace.samples_per_second == pytest.approx(0.8)


def test_a_resumed_run_has_only_the_rest_before_it():
    pace = Pace(90, 100)
    assert pace.step == 90
    for number in range(91, 96):
        pace.add(step(number))
    assert pace.seconds_left == pytest.approx(0.5)


def test_loss_is_the_mean_per_label_of_recent_finite_steps():
    pace = Pace(0, 10)
    assert math.isnan(pace.loss)
    pace.add(step(1, loss=1.0, counted=1))
    pace.add(step(2, loss=math.nan, counted=5, skipped=True))
    pace.add(step(3, loss=4.0, counted=3))
    assert pace.loss == pytest.approx(13 / 4)
    assert pace.num_skipped == 1


def test_images_have_neither_tokens_nor_padding():
    pace = Pace(0, 10)
    for number in range(1, 6):
        pace.add(step(number, tokens=8, slots=8))
    assert pace.tokens_per_second is None
    assert pace.padding_share is None
    assert pace.samples_per_second == pytest.approx(80)
