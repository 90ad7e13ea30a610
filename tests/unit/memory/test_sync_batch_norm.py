"""Batch norms over ranks, and mixed images, planned: torch has no shapes for some of their operators by itself."""

from __future__ import annotations

import pytest

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from tests.testing.tiny import tiny_resnet_config

GPU = gpu_for("h200")
RECIPE = {
    "model": {"config": tiny_resnet_config(num_channels=3)},
    "data": {"source": "builtin:random", "random": {"samples": 64, "image": (32, 32, 3)}},
    "loop": {"batch_size": 32},
    "techniques": {"compile": False, "capture": False},
    "parallel": {"strategy": "ddp"},
}


def planned(predictor: Predictor, *settings: str) -> MemoryPlan:
    chosen, _ = choose(Recipe.parse(RECIPE).with_settings(settings), facts_with([GPU] * 2, this_machine()), 2)
    return predictor.plan(chosen, GPU, world_size=2)


@pytest.mark.timeout(240)
def test_batch_norms_over_ranks_keep_what_plain_ones_keep(predictor: Predictor) -> None:
    plain, over_ranks = planned(predictor), planned(predictor, "parallel.sync_batch_norm=true")
    assert over_ranks.execution["batch_norm"] == "over 2 ranks"
    little = 64 * 2**10
    assert over_ranks.phases["backward"] == pytest.approx(plain.phases["backward"], abs=little)


@pytest.mark.timeout(240)
def test_mixed_images_take_the_partners_too(predictor: Predictor) -> None:
    plain, mixed = planned(predictor), planned(predictor, "data.augment.mixup=0.2")
    a_batch = 16 * 3 * 32 * 32 * 4
    assert a_batch <= mixed.phases["batch"] - plain.phases["batch"] <= 4 * a_batch
