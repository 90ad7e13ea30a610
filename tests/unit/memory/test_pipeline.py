"""``parallel.pipeline`` planned: what the first stage holds beside what it would hold of the whole model."""

from __future__ import annotations

import pytest

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from tests.unit.memory.test_data_parallel import CONFIG, GPU, PLAIN

BLOCK = 4 * 512 * 512 + 2 * 512 * 2048 + 9 * 512 + 2048
"""Numbers of one of the six blocks: matrices, biases and two norms."""


def planned(predictor: Predictor, *settings: str) -> MemoryPlan:
    random = {"samples": 512, "vocabulary": 1000, "length": 64}
    data = {"source": "builtin:random", "max_length": 64, "random": random, "splits": {"validation": 0.5}}
    loop = {"batch_size": 64, "micro_batch_size": 4, "evaluation_batch_size": 4}
    recipe = Recipe.parse({"model": {"config": CONFIG}, "data": data, "loop": loop})
    recipe = recipe.with_settings([*PLAIN, "techniques.compile=false", *settings])
    return predictor.plan(choose(recipe, facts_with([GPU] * 4, this_machine()), 4)[0], GPU, world_size=4)


def activations(plan: MemoryPlan) -> int:
    """At most, in forward passes."""
    held = sum(plan.parts[part] for part in ("parameters", "gradients", "optimizer states", "workspaces"))
    return plan.phases["forward"] - held


@pytest.mark.timeout(240)
def test_the_first_stage_keeps_its_blocks_and_the_activations_of_what_is_under_way(predictor: Predictor) -> None:
    whole = planned(predictor)
    half = planned(predictor, "parallel.pipeline=2")
    assert half.num_parameters == whole.num_parameters, "of the model, not of a rank"
    for part, size in (("parameters", 4), ("gradients", 4), ("optimizer states", 8)):
        # beside three of the blocks the last stage has pooler and head
        gone = whole.parts[part] - half.parts[part]
        assert gone == pytest.approx((3 * BLOCK + 512 * 512) * size, rel=0.02), part
    assert any("the first stage" in told for told in half.assumed)
    # of eight micro-batches two at a time, or all
    gpipe = planned(predictor, "parallel.pipeline=2", "parallel.schedule=gpipe")
    assert activations(gpipe) == pytest.approx(4 * activations(half), rel=0.15)
