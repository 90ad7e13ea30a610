"""``parallel.strategy: dp`` planned: what the first of several GPUs holds beside what one GPU alone would."""

from __future__ import annotations

import pytest

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.anatomy import constants_for
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.recipe.choose import choose

GPU = gpu_for("h200")
MIB = 2**20
SPLIT = ("parallel.strategy=dp",)
PLAIN = tuple(f"techniques.{name}=false" for name in ("packing", "early_pooling", "fused_qkv", "fusion", "capture"))
CONFIG = {
    "model_type": "bert",
    "vocab_size": 1000,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "max_position_embeddings": 130,
}


def planned(predictor: Predictor, *settings: str, batch_size: int, gpus: int = 1) -> MemoryPlan:
    random = {"samples": 512, "vocabulary": 1000, "length": 64}
    data = {"source": "builtin:random", "max_length": 64, "random": random, "splits": {"validation": 0.5}}
    loop = {"batch_size": batch_size, "evaluation_batch_size": batch_size}
    recipe = Recipe.parse({"model": {"config": CONFIG}, "data": data, "loop": loop})
    recipe = recipe.with_settings([*PLAIN, "techniques.compile=false", *settings])
    return predictor.plan(choose(recipe, facts_with([GPU] * gpus, this_machine()))[0], GPU, world_size=gpus)


@pytest.mark.timeout(240)
def test_the_first_gpu_keeps_its_piece_of_the_batch_and_the_whole_optimizer(predictor: Predictor) -> None:
    alone, split = (
        planned(predictor, batch_size=32),
        planned(predictor, *SPLIT, batch_size=128, gpus=4),
    )
    assert split.samples == 128, "a micro-batch is the process's, of all GPUs"
    assert split.execution["parallel"] == "dp: 4 GPUs"
    for part in ("parameters", "gradients", "optimizer states"):
        assert split.parts[part] == pytest.approx(alone.parts[part], rel=1e-3), part
    assert split.phases["forward"] == pytest.approx(alone.phases["forward"], abs=15 * MIB), "a quarter of four times"
    assert split.phases["evaluation"] == pytest.approx(alone.phases["evaluation"], abs=15 * MIB)
    communicator = constants_for(GPU).communicator
    assert communicator
    assert (alone.communicator, split.communicator) == (0, communicator), "the GPUs' gradients meet by NCCL"
    assert any("DataParallel" in text for text in split.assumed), split.assumed


@pytest.mark.timeout(240)
def test_summed_gradients_are_a_set_of_their_own(predictor: Predictor) -> None:
    """With next to no activations it shows: the copy's gradients, and their sums over the GPUs, beside the run's."""
    alone, split = (
        planned(predictor, batch_size=2),
        planned(predictor, *SPLIT, batch_size=4, gpus=2),
    )
    gradients = alone.parts["gradients"]
    assert split.moment == "backward"
    assert split.phases["backward"] - alone.phases["backward"] == pytest.approx(gradients, rel=0.25)
    assert split.parts["passing"] == pytest.approx(2 * gradients, rel=0.25)
    frozen = planned(predictor, *SPLIT, "model.train=head", batch_size=4, gpus=2)
    assert 0 < frozen.num_trained < 0.05 * frozen.num_parameters
    # one Function hands out all weights: what has no gradient comes back as zeros, and is summed
    assert frozen.parts["passing"] == pytest.approx(2 * frozen.parts["parameters"], rel=0.1)
