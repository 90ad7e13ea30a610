"""``parallel.tensor`` planned: what one rank holds beside what it would hold of whole blocks."""

from __future__ import annotations

import pytest

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from tests.unit.memory.test_data_parallel import CONFIG, GPU, PLAIN

NUMBERS = 6 * (4 * 512 * 512 + 2 * 512 * 2048 + 3 * 512 + 2048)
"""Of six blocks' matrices, and of the biases that are cut with them."""


def planned(predictor: Predictor, tensor: int) -> MemoryPlan:
    random = {"samples": 512, "vocabulary": 1000, "length": 64}
    data = {"source": "builtin:random", "max_length": 64, "random": random, "splits": {"validation": 0.5}}
    recipe = Recipe.parse({"model": {"config": CONFIG}, "data": data, "loop": {"batch_size": 64}})
    recipe = recipe.with_settings([*PLAIN, "techniques.compile=false", f"parallel.tensor={tensor}"])
    return predictor.plan(choose(recipe, facts_with([GPU] * 4, this_machine()), 4)[0], GPU, world_size=4)


@pytest.mark.timeout(240)
def test_a_rank_keeps_half_of_the_blocks_and_takes_twice_the_samples(predictor: Predictor) -> None:
    whole, half = planned(predictor, 1), planned(predictor, 2)
    assert (whole.samples, half.samples) == (16, 32), "groups split the batch, not processes"
    assert half.execution["tensor"] == "2 shards of each block"
    assert half.num_parameters == whole.num_parameters, "of the model, not of a rank"
    for part, size in (("parameters", 4), ("gradients", 4), ("optimizer states", 8)):
        assert whole.parts[part] - half.parts[part] == pytest.approx(NUMBERS // 2 * size, rel=0.01), part
