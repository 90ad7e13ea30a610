"""What a trace of a run is made of, in the settings that change it most."""

from __future__ import annotations

import numpy as np

from paceline.contract.stopwatch import Stopwatch
from paceline.machine.facts import this_machine
from paceline.memory.anatomy import constants_for
from paceline.prepare.assemble import assemble
from paceline.prepare.preparation import prepare_run
from paceline.recipe.choose import choose
from tests.unit.memory.apart import main
from tests.unit.memory.runs import BERT, GPU, assert_near, flat, recipe, traced

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


def check_adapters_are_planned_as_they_are() -> None:
    """Beside a run on this machine's CPU, which has no flat buffers."""
    for more in ((), ("model.lora.dora=true",)):
        settings = ("model.train=lora", "model.lora.merge=true", *more)
        plan, held = traced(*settings).plan, after_a_step(*settings)
        for name, num_bytes in held.items():
            assert abs(plan.parts[name] / num_bytes - 1) < 0.02, (
                f"{name}: {plan.parts[name]:,}, {num_bytes:,} are there"
            )
        assert 0.05 < plan.num_trained / plan.num_parameters < 0.15


def after_a_step(*settings: str) -> dict[str, int]:
    """Bytes that the run of a model has on a CPU after its first step."""
    chosen, decisions = choose(recipe(BERT, "device=cpu", *settings), this_machine())
    run = prepare_run(chosen, decisions, facts=this_machine(), watch=Stopwatch())
    assembled = assemble(run.recipe, run.build, total_steps=2)
    assembled.engine.accumulate_batches([run.build.layout.collate(np.arange(4))], 4, step=0)
    assembled.engine.update()
    parameters = list(run.build.model.parameters())
    states = assembled.engine.state()[0]["optimizer"]
    return {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None),
        "optimizer states": sum(tensor.nbytes for tensor in states.values()),
    }


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


if __name__ == "__main__":
    main(globals())
