"""``optimizer.ema`` planned: four bytes a trained weight, from the start to the end, and nothing else."""

from __future__ import annotations

import pytest

from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.recipe.choose import choose_strategy
from tests.unit.memory.plans import HERE, recipe
from tests.unit.memory.test_data_parallel import planned
from tests.unit.memory.test_offload import planned as sharded

EMA = "optimizer.ema={decay: 0.999, warmup: true, every: 2}"
MIB = 2**20


@pytest.mark.timeout(240)
def test_four_bytes_a_trained_weight(predictor: Predictor) -> None:
    without, kept = planned(predictor, batch_size=16), planned(predictor, EMA, batch_size=16)
    weights = 4 * kept.num_trained
    assert kept.parts["average"] == pytest.approx(weights, rel=0.01)
    assert kept.allocated - without.allocated == pytest.approx(weights, abs=MIB)
    for phase in ("forward", "backward", "update", "evaluation"):
        more = kept.phases[phase] - without.phases[phase]
        assert weights - MIB < more < weights + 3 * MIB, f"{phase}: the largest weight is copied at most"


@pytest.mark.timeout(240)
def test_weights_in_bf16_have_it_in_fp32_and_are_kept_while_it_is_measured(predictor: Predictor) -> None:
    pure = "techniques.precision=pure_bf16"
    without, kept = (planned(predictor, pure, *more, batch_size=16) for more in ((), (EMA,)))
    weights = 4 * kept.num_trained
    assert kept.parts["average"] == pytest.approx(weights, rel=0.01)
    assert kept.phases["update"] - without.phases["update"] == pytest.approx(weights, abs=3 * MIB)
    assert kept.phases["evaluation"] - without.phases["evaluation"] == pytest.approx(1.5 * weights, abs=3 * MIB)


@pytest.mark.timeout(240)
def test_captured_steps_wait_for_nothing_and_shards_have_their_share(predictor: Predictor) -> None:
    captured = planned(predictor, EMA, "techniques.capture=true", batch_size=16)
    assert captured.execution["steps"].startswith("captured")
    assert captured.parts["average"] == pytest.approx(4 * captured.num_trained, rel=0.01)
    for offload, part in (("false", 0.5), ("true", 0.0)):
        shards = sharded(predictor, EMA, f"parallel.offload={offload}")
        assert shards.parts.get("average", 0) == pytest.approx(part * 4 * shards.num_trained, rel=0.02)


def test_it_is_counted_where_ranks_choose_how_to_share() -> None:
    def told(chosen: Recipe) -> str:
        _, decisions = choose_strategy(chosen, (), HERE, 2, num_parameters=2**28, num_trained=2**28)
        return next(decision.reason for decision in decisions if decision.setting == "parallel.strategy")

    assert told(recipe()).startswith("weights, gradients and states take 4.0 GiB")
    assert told(recipe(EMA)).startswith("weights, gradients and states take 5.0 GiB")
