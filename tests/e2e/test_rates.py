"""Whole runs with learning rates by depth, schedules by name, and roundings: stopped, resumed, and used afterwards."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import Preempted
from paceline.verbs.evaluate import evaluate
from paceline.verbs.train import resume, train
from tests.e2e.whole_runs import Disturb, assert_same, lines, outcome, recipe
from tests.testing.marks import slow_except

NARROW = {"precision": "pure_bf16"}

VARIANTS: dict[str, dict[str, Any]] = {
    "kahan": {"techniques": NARROW, "optimizer": {"rounding": "kahan"}},
    "stochastic": {"techniques": NARROW, "optimizer": {"rounding": "stochastic", "type": "sgd"}},
    "by depth, one cycle": {
        "optimizer": {
            "layer_decay": 0.7,
            "groups": [{"match": "*classifier*", "schedule": {"type": "inverse_sqrt", "warmup": 2}}],
        },
        "schedule": {"type": "one_cycle", "warmup": 0.3},
    },
    "restarts": {"schedule": {"type": "cosine_restarts", "cycles": 3}},
}


@pytest.mark.parametrize("variant", slow_except(VARIANTS, "stochastic", "by depth, one cycle"))
def test_a_run_goes_on_to_the_bit_and_its_model_can_be_used(
    variant: str, pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    chosen = recipe(pretrained, reviews, **VARIANTS[variant])
    whole = train(chosen, out=tmp_path / "undisturbed")
    folder = tmp_path / "stopped"
    disturb.signals[5] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(chosen, out=folder)
    assert_same(outcome(resume(folder)), outcome(whole))
    assert evaluate(folder, split="test").loss == pytest.approx(whole.final["test"]["loss"], rel=1e-3)


def test_the_rates_of_each_step_are_told_by_group(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    train(recipe(pretrained, reviews, **VARIANTS["by depth, one cycle"]), out=tmp_path / "run")
    (start,) = lines(tmp_path / "run", "start")
    steps = lines(tmp_path / "run", "step")
    named = dict(zip(start["group_names"], steps[6]["learning_rates"], strict=True))
    # head and pooler have the whole rate; two blocks, and the embeddings below them
    assert {name.removesuffix(" (no decay)") for name in named} == {
        "*classifier*",
        "rest",
        "rest x 0.7",
        "rest x 0.49",
        "rest x 0.343",
    }
    assert named["rest x 0.7"] == pytest.approx(0.7 * named["rest"])
    assert named["rest x 0.343"] == pytest.approx(0.343 * named["rest"])
    assert named["*classifier*"] == pytest.approx(1e-2 * (2 / 6) ** 0.5)
