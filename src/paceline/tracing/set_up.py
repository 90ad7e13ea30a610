"""The recorder of a run's trace windows, from its recipe and what it is made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.contract.errors import RecipeError
from paceline.contract.records import Notice
from paceline.contract.stopwatch import Stopwatch
from paceline.data.dataset import Dataset
from paceline.engine.worth import flops_counter, peak_flops
from paceline.machine.device import gpu_name
from paceline.recipe import Recipe
from paceline.recipe.recipe import flatten
from paceline.recipe.windows import step_windows
from paceline.seams import Build, Engine, Ids, World
from paceline.techniques.compile import fused
from paceline.tracing.listeners import KinetoListener, Listener, NsysListener
from paceline.tracing.recorder import StepMeta, WindowRecorder

UNDER_NSYS = "NSYS_PROFILING_SESSION_ID"
"""nsys sets it for what it starts."""


def recorder_for(
    recipe: Recipe,
    build: Build,
    dataset: Dataset,
    engine: Engine,
    *,
    total_steps: int,
    steps_per_epoch: int,
    first_step: int,
    folder: Path,
    world: World,
    tell: Callable[[Notice], None],
    watch: Stopwatch,
) -> WindowRecorder | None:
    """What follows the loop, where the recipe has windows.

    Args:
        first_step: the steps that the run has made so far.
        folder: the run's.
        tell: takes what a person should read.

    Raises:
        RecipeError: a window beyond the run, or both kinds of tracing at once.
        UserError: NVTX cannot be had.
        RunFolderError: traces cannot be written.
    """
    part = recipe.trace
    if not part.steps:
        return None
    if recipe.model.train == "features":
        why = "with model.train = features no step is made"
        raise RecipeError(f"trace.steps = {', '.join(part.steps)}", why, "--set trace.steps=[]")
    windows = step_windows(part.steps, total_steps, steps_per_epoch)
    if part.kind == "kineto" and build.device.type == "cuda" and UNDER_NSYS in os.environ:
        why = "nsys listens to this process, and only one of the two can listen to a GPU"
        raise RecipeError("trace.kind = kineto under nsys", why, "--set trace.kind=nsys")
    listener: Listener = (
        NsysListener(build.device, partial(_iteration, steps_per_epoch))
        if part.kind == "nsys"
        else KinetoListener(build.device, memory=part.memory)
    )
    return WindowRecorder(
        windows,
        first_step=first_step,
        folder=folder,
        listener=listener,
        world=world,
        device=build.device,
        engine=engine,
        keeps_graphs=part.graph == "keep",
        measure=partial(_measured, build, flops_counter(build, dataset)),
        about=partial(_about, recipe, build, engine),
        tell=tell,
        watch=watch,
    )


def _iteration(steps_per_epoch: int, step: int) -> tuple[int, int]:
    epoch, at = divmod(step - 1, steps_per_epoch)
    return epoch + 1, at + 1


def _measured(
    build: Build, flops: Callable[[Ids], float | None], step: int, epoch: int, microbatches: Sequence[Ids]
) -> StepMeta:
    sizes = [build.layout.size(ids) for ids in microbatches]
    ids = np.concatenate(microbatches)
    return StepMeta(
        step=step,
        epoch=epoch,
        samples=len(ids),
        tokens=sum(size.tokens for size in sizes),
        slots=sum(size.slots for size in sizes),
        flops=flops(ids),
    )


def _about(recipe: Recipe, build: Build, engine: Engine) -> Mapping[str, Any]:
    gpu = gpu_name(build.device) if build.device.type == "cuda" else None
    execution = {**build.execution, **fused(build.model), **engine.execution}
    return {
        "device": gpu or "cpu",
        "peak_flops": peak_flops(gpu, recipe.techniques.precision),
        "execution": execution,
        "path": execution,  # as earlier releases call it
        "settings": dict(flatten(recipe.resolved())),
    }
