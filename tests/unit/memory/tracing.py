"""What a trace of a run is made of, in the settings that change it most."""

from __future__ import annotations

from paceline.memory.constants import constants_for
from tests.unit.memory.apart import main
from tests.unit.memory.runs import GPU, assert_near, flat, traced

WHOLE = "techniques.early_pooling=false"


def check_parts_add_up_to_the_peak(settings: tuple[str, ...] = ()) -> None:
    plan = traced(*settings).plan
    assert sum(plan.parts.values()) == plan.allocated > 0
    assert sum(plan.activations.values()) == plan.parts["activations"]
    assert plan.phases[plan.moment] == max(plan.phases.values()) == plan.allocated <= plan.reserved
    assert plan.moment in ("forward", "backward")
    assert plan.parts["workspaces"] >= sum(constants_for(GPU).workspaces)
    assert {"model", "optimizer", "batch", "forward", "backward", "update", "evaluation"} <= set(plan.phases)
    assert (plan.samples, plan.slots, plan.capacity) == (16, 16 * 64, GPU.memory_bytes)


def check_weights_gradients_and_states_are_those_of_adamw() -> None:
    found = traced()
    plan, all_weights = found.plan, flat(found.weights)
    assert (plan.num_parameters, plan.num_trained) == (sum(found.weights), sum(found.trained))
    assert plan.parts["parameters"] == plan.parts["gradients"] == all_weights
    assert_near(plan.parts["optimizer states"], 2 * all_weights)


def check_the_peak_grows_with_the_batch() -> None:
    # of a short last block, filler sequences have a position too
    one, two = traced(WHOLE), traced(WHOLE, "loop.batch_size=32")
    assert (two.plan.samples, two.plan.slots) == (32, 32 * 64)
    assert 1.95 < two.kept / one.kept < 2.0 + 1e-9, two.kept / one.kept
    assert two.plan.allocated > one.plan.allocated
    assert two.plan.parts["parameters"] == one.plan.parts["parameters"]


def check_a_last_block_that_is_pooled_early_keeps_less() -> None:
    early, whole = traced(), traced(WHOLE)
    # of two blocks; with one short, the peak comes in the backward pass, when some has gone
    assert 0.4 < early.kept / whole.kept < 0.75, early.kept / whole.kept


def check_recompute_keeps_less() -> None:
    kept, recomputed = traced(WHOLE), traced(WHOLE, "techniques.recompute=true")
    assert recomputed.kept < 0.35 * kept.kept
    assert recomputed.plan.allocated < kept.plan.allocated
    assert recomputed.plan.moment == "backward", "where a block is computed again"


def check_batch_normalisation_is_seen() -> None:
    images = {"factory": "tests.unit.memory.runs:convolutional"}
    assert traced(config=images).plan.normalises_batches
    # taken to pieces by the compiler, and no evaluation shows it whole
    alone = ("techniques.compile=true", "data.splits.validation=0", "data.splits.test=0")
    assert traced(*alone, config=images).plan.normalises_batches
    assert not traced().plan.normalises_batches


def check_the_same_run_is_traced_alike() -> None:
    assert traced().events == traced("seed=0").events
    assert traced().events != traced("loop.batch_size=32").events


if __name__ == "__main__":
    main(globals())
