"""DeepSpeed planned: shards, what is offloaded, and that it is said by whose rules."""

from __future__ import annotations

import pytest

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.anatomy import constants_for
from paceline.memory.changes import single_changes
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from tests.unit.memory.test_offload import RECIPE

GPU = gpu_for("h200")
PARTS = ("precision=fp32", "embedding_gradient=false", "fused_qkv=false")
CLOSE = 0.03


def planned(predictor: Predictor, gpus: int, *settings: str) -> MemoryPlan:
    facts = facts_with([GPU] * gpus, this_machine())
    changed = [*(f"techniques.{part}" for part in PARTS), "parallel.strategy=deepspeed", *settings]
    chosen, _ = choose(Recipe.parse(RECIPE).with_settings(changed), facts, gpus)
    return predictor.plan(chosen, GPU, world_size=gpus)


def weights(plan: MemoryPlan) -> int:
    return 4 * plan.num_parameters


def held(plan: MemoryPlan, phase: str) -> float:
    """At the highest, without the workspaces of products, in weights' bytes."""
    return (plan.phases[phase] - sum(constants_for(GPU).workspaces)) / weights(plan)


@pytest.mark.timeout(240)
def test_every_stage_holds_what_its_rules_say(predictor: Predictor) -> None:
    for stage in (1, 2, 3):
        one = planned(predictor, 1, f"parallel.stage={stage}")
        # weights, their copy, two states; stage 3 also the buffer for gradients and those of the shards
        assert held(one, "batch") == pytest.approx(6 if stage == 3 else 4, rel=CLOSE), stage
        assert one.execution["parallel"] == f"deepspeed: ZeRO stage {stage}"
        assert one.execution["compared"] == "a plan has nothing to compare"


@pytest.mark.timeout(240)
def test_ranks_share_what_the_stage_shards(predictor: Predictor) -> None:
    for stage, whole, shared in ((2, 1, 3), (3, 1, 5)):
        two = planned(predictor, 2, f"parallel.stage={stage}")
        assert held(two, "batch") == pytest.approx(whole + shared / 2, rel=CLOSE), stage


@pytest.mark.timeout(240)
def test_what_is_offloaded_is_not_on_the_gpu(predictor: Predictor) -> None:
    states = planned(predictor, 1, "parallel.stage=2", "parallel.offload=optimizer")
    assert held(states, "update") == pytest.approx(1.05, abs=0.05), "the weights, and room for the largest gradient"
    everything = planned(predictor, 1, "parallel.stage=3", "parallel.offload=parameters")
    assert held(everything, "batch") == pytest.approx(1, abs=0.05), "the buffer, and small weights"
    assert any("main memory" in text for text in everything.assumed)


def test_it_is_told_by_whose_rules(predictor: Predictor) -> None:
    found = planned(predictor, 1, "parallel.stage=2")
    assert any("DeepSpeed" in text and "rules of its code" in text for text in found.assumed), found.assumed


def test_what_does_not_fit_is_offered_an_offloaded_update_on_the_gpus_there_are() -> None:
    plain = Recipe.parse(RECIPE).with_settings(["parallel.strategy=auto"])
    offered = [
        change.settings for change in single_changes(plain, GPU) if "parallel.strategy=deepspeed" in change.settings
    ]
    assert offered == [("parallel.strategy=deepspeed", "parallel.offload=optimizer")]
    on = plain.with_settings(["parallel.strategy=deepspeed"])
    assert not any("parallel.strategy=deepspeed" in change.settings for change in single_changes(on, GPU))
