"""The process that traces: requests come in as lines of JSON, and plans go out. Started by ``predict``.

Every trace has a process of its own, forked from this one, which has imported what it needs: what is registered with
torch for a trace cannot be taken back, and what one leaves behind must not be counted, or collected, in the next.

It also says whether ranks can share a model, before there are ranks, weights and data. A run's own strategy cuts it in
the one place where a model has no memory, on the stand-in for a GPU: what is refused here is what every rank would
refuse, in the same words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.contract.child import take_over_output
from paceline.contract.errors import ModelError, RecipeError, TraceError, UserError
from paceline.contract.records import MemoryPlan
from paceline.machine.facts import Gpu
from paceline.memory.anatomy import plan_of
from paceline.memory.data_parallel import split_over
from paceline.memory.stand_in import UNTRACEABLE, stand_in
from paceline.memory.subject import Subject, subject_of
from paceline.memory.trace import model_of, placed, trace
from paceline.memory.world import planned_world
from paceline.models.config import read_config
from paceline.prepare.preparation import build_for
from paceline.recipe import Recipe
from paceline.recipe.catalogue.strategies import AXES
from paceline.recipe.techniques import CATALOGUE, one_process
from paceline.seams import Mesh
from paceline.techniques.compile import wake_tracer

_ANY_GPU = Gpu(name="any")
"""How a model is cut does not depend on what it runs on."""


def require_cut(recipe: Recipe, world_size: int) -> None:
    """Refuse a model that so many ranks cannot share as ``parallel.tensor`` and ``parallel.pipeline`` say.

    In a process that does nothing else, see ``stand_in``. What cannot be found out here (a model that is not on this
    machine, a forward pass that asks for numbers) is left to the ranks, and so is every other error.

    Args:
        recipe: whether ``choose`` has seen it or not.

    Raises:
        RecipeError: no blocks, too few, of another kind; heads that do not divide; a weight of two stages.
    """
    try:
        subject = subject_of(recipe)
        _cut(subject, model_of(subject), world_size)
    except (UserError, *UNTRACEABLE) as error:
        if isinstance(error, RecipeError) and error.what.startswith(tuple(entry.setting for entry in AXES)):
            raise


def _cut(subject: Subject, model: nn.Module, world_size: int) -> None:
    part = subject.recipe.parallel
    mesh = Mesh.over(planned_world(world_size), tensor=part.tensor, pipe=part.pipeline)
    # cut first of all, and no technique makes a model that can be cut of one that cannot
    switches = [entry.setting for entry in CATALOGUE if entry.setting.startswith("techniques.") and entry.off is False]
    changes = ["techniques.precision=fp32", *(f"{switch}=false" for switch in switches)]
    with stand_in(_ANY_GPU) as (device, _):
        recipe = subject.recipe.with_settings(changes)
        build_for(recipe, placed(model, device), subject.dataset, device, mesh=mesh)


IMPORTED = ("torch._dynamo", "transformers.models.auto.modeling_auto", "transformers.modeling_layers")
"""What nearly every trace needs and takes seconds to import."""


def answer(request: Mapping[str, Any]) -> MemoryPlan | None:
    """The plan that is asked for; None where that was whether ranks can share the model, and they can.

    Raises:
        UserError: what ``train`` would say of the recipe; or the model's step cannot be traced.
    """
    recipe = Recipe.parse(request["recipe"])
    if "cut_over" in request:
        require_cut(recipe, request["cut_over"])
        return None
    given = request["gpu"]
    gpu = Gpu(**{**given, "compute_capability": tuple(given["compute_capability"] or ()) or None})
    try:
        subject = subject_of(recipe, read_data=request["read_data"])
        if one_process(recipe.parallel.strategy):
            return _split(subject, gpu, request["world_size"])
        return plan_of(trace(subject, gpu, request["world_size"]), subject, gpu)
    except ValueError as error:
        # torch's, of batch normalisation: it comes before anything is computed, and a run refuses it
        if "more than 1 value per channel" not in str(error):
            raise
        fix = "--set loop.micro_batch_size=2 or more"
        raise ModelError("a micro-batch of one sample", "batch normalisation needs two to a spread", fix) from error
    except UNTRACEABLE as error:
        raise TraceError(
            "the model's step cannot be traced without a GPU",
            f"{getattr(error, 'func', error)} asks for numbers, and a plan has sizes alone",
            "on a machine with a GPU: paceline memory RECIPE, which measures the first steps",
        ) from error


def _split(subject: Subject, gpu: Gpu, num_gpus: int) -> MemoryPlan:
    """The prediction for the first GPU of a process that has several."""
    with split_over(num_gpus):
        found = trace(subject, gpu)
    said = f"on the first of {num_gpus} GPUs, what torch's DataParallel does there: read in its code, not measured"
    # one process, but its GPUs meet as ranks do
    return plan_of(replace(found, world_size=num_gpus), replace(subject, assumed=(*subject.assumed, said)), gpu)


def main() -> None:
    """Answer until there are no more requests; where processes cannot be forked, one."""
    send = take_over_output()
    for name in IMPORTED:
        importlib.import_module(name)
    asked = select.poll()
    asked.register(sys.stdin.fileno(), 0)  # that the other end is closed is told unasked
    for line in sys.stdin:
        if asked.poll(0):
            break  # nobody waits for the answer
        _import_for(json.loads(line))
        # a trace collects what it left in cycles, and need not look through all that was here before it
        gc.freeze()
        child = os.fork() if sys.platform == "linux" else 0
        if child == 0:
            send(_answered(line))
            # with the stand-in registered, torch does not always survive the end of the interpreter
            os._exit(0)
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if asked.poll(20):
                os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(ended[1])
        if status != 0:
            send({"bug": f"the trace ended without an answer (exit code {status})"})


def _import_for(request: Mapping[str, Any]) -> None:
    """Import what this trace needs, once for all that follow; where that fails, the trace says why."""
    with contextlib.suppress(Exception):
        recipe = Recipe.parse(request["recipe"])
        config = read_config(recipe.model)
        if config is not None:
            kind = type(config).__module__.replace(".configuration_", ".modeling_")
            importlib.import_module(kind)
        if recipe.techniques.compile is not False:
            importlib.import_module("torch._inductor.lowering")
        if recipe.techniques.compile is not False or recipe.techniques.fusion is not False:
            wake_tracer()
            torch._dynamo.reset()


def _answered(line: str) -> dict[str, Any]:
    try:
        found = answer(json.loads(line))
        return {"plan": None if found is None else dataclasses.asdict(found)}
    except UserError as error:
        return {"error": [type(error).__name__, error.what, error.why, error.fix]}
    except Exception:
        return {"bug": traceback.format_exc()}


if __name__ == "__main__":
    main()
