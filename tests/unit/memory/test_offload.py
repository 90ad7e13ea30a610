"""``parallel.offload`` planned: what is left of a run on its GPU when shards stay in main memory."""

from __future__ import annotations

import pytest

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.anatomy import constants_for
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from tests.unit.memory.test_data_parallel import CONFIG

GPU = gpu_for("h200")
GPUS = 2
RECIPE = {
    "model": {"config": CONFIG},
    "data": {"source": "builtin:random", "max_length": 64, "random": {"samples": 64, "vocabulary": 1000, "length": 64}},
    "loop": {"batch_size": 8},
    "techniques": {"packing": False, "early_pooling": False, "compile": False, "capture": False, "fusion": False},
    "parallel": {"strategy": "fsdp"},
}


def planned(predictor: Predictor, *settings: str) -> MemoryPlan:
    facts = facts_with([GPU] * GPUS, this_machine())
    chosen, _ = choose(Recipe.parse(RECIPE).with_settings(settings), facts, GPUS)
    return predictor.plan(chosen, GPU, world_size=GPUS)


@pytest.mark.timeout(240)
def test_weights_gradients_and_states_are_not_on_the_gpu(predictor: Predictor) -> None:
    kept, away = planned(predictor), planned(predictor, "parallel.offload=true")
    share = 4 * kept.num_parameters // GPUS
    assert kept.phases["optimizer"] > 4 * share, "weights, gradients and two states, before anything is captured"
    little = sum(constants_for(GPU).workspaces) + 0.05 * share
    assert away.phases["batch"] < little, "between steps there is nothing of the model on the GPU"
    assert away.phases["update"] < little, "the update is made in main memory"
    # the shards in use, and gradients on their way
    assert 0.5 * 4 * share < kept.phases["backward"] - away.phases["backward"] < 1.1 * 4 * share
    assert away.execution["parallel"].endswith("kept in main memory")
    assert any("main memory" in text for text in away.assumed), away.assumed
