"""A run's first steps on a GPU, stage by stage: what the context, the model, each pass and the update add to it.

The run is put together by the functions that ``train`` uses. What ``train`` never does is done here: after each stage
the GPU is waited for and looked at. So figures of speed come from further steps, in which nothing waits.

As a program it measures one recipe in a process that does nothing else, see ``measure.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn

from paceline.contract.child import take_over_output
from paceline.contract.errors import UserError, in_a_line
from paceline.contract.files import compiled_folder
from paceline.contract.records import StageRecord
from paceline.data.dataset import Dataset
from paceline.engine.compile_cache import kept_cache
from paceline.engine.evaluate import largest_batch
from paceline.engine.numerics import numerics
from paceline.memory.gauge import Gauge, GpuGauge, NoGauge, Reading
from paceline.prepare.assemble import Assembled, assemble
from paceline.prepare.course import Course
from paceline.prepare.preparation import build_for, encoded, model_for, settle_shapes, size_of_vocabulary
from paceline.recipe import Recipe
from paceline.seams import Batch, Forward, Mesh, StepInput
from paceline.techniques.compile import fused

SETTLING_STEPS: Final = 5
"""Steady steps before the timed ones: shapes that come again are captured, compiled code is specialised."""

TIMED_STEPS: Final = 20

Tell = Callable[[StageRecord], None]


@dataclass(frozen=True, kw_only=True)
class Steady:
    """What the steps came to once they were all alike; see ``MemoryStages``."""

    micro_batch_size: int
    num_steps: int
    step_seconds: float
    samples_per_second: float
    execution: Mapping[str, str]


@final
class Stages:
    """Tells of each stage as it ends.

    Args:
        gauge: reads the GPU.
        tell: receives the stages in order.
    """

    def __init__(self, gauge: Gauge, tell: Tell) -> None:
        self._gauge, self._tell = gauge, tell
        self.now = "context"
        """The stage that is going on: where an error comes from."""

    def begin(self, name: str) -> None:
        """A stage begins."""
        self.now = name

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """What is done inside is a stage."""
        self.begin(name)
        yield
        self.end(name, self._gauge.read())

    def end(self, name: str, reading: Reading) -> None:
        """A stage has ended with this reading."""
        self._tell(StageRecord(name=name, **dataclasses.asdict(reading)))


@final
class Passes:
    """A forward pass that reads the GPU before and after itself while it listens: so the two passes are told apart.

    Args:
        forward: the pass.
        gauge: reads the GPU.
        entered: told of each pass as it begins.
    """

    def __init__(self, forward: Forward, gauge: Gauge, entered: Callable[[str], None] = lambda _: None) -> None:
        self._forward, self._gauge, self._entered = forward, gauge, entered
        self._found: dict[str, Reading] = {}
        self._listens = False

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        if not self._listens or _is_capturing(batch.labels.device):
            return self._forward(model, batch)
        if self._found:  # what came since the forward pass before
            self._note("backward")
        self._entered("forward")
        out = self._forward(model, batch)
        self._note("forward")
        self._entered("backward")
        return out

    def listen(self, passes: Callable[[], object]) -> dict[str, Reading]:
        """The readings of these passes: of ``forward`` and ``backward``, or of both as ``passes`` when replayed."""
        self._found, self._listens = {}, True
        try:
            passes()
        finally:
            self._listens = False
        self._note("backward" if self._found else "passes")
        return self._found

    def _note(self, name: str) -> None:
        self._found[name] = self._gauge.read().after(self._found.get(name))


def measure_stages(recipe: Recipe, stages: Stages, gauge: Gauge) -> Steady:
    """Make the first steps of a run, the largest first.

    Args:
        recipe: as ``choose`` made it for this machine; of one process.
        stages: is told of each stage.
        gauge: reads the recipe's device.

    Raises:
        UserError: what ``train`` would say of the recipe.
        torch.OutOfMemoryError: in the stage ``stages.now``.
    """
    device = torch.device(recipe.device)
    recipe, dataset, model = _read(recipe)
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            numerics(recipe.techniques.precision, deterministic=recipe.deterministic, device=recipe.device)
        )
        if device.type == "cuda" and recipe.techniques.compile is not False:
            stack.enter_context(kept_cache(compiled_folder()))
        with stages.during("context"):
            torch.zeros(1, device=device)
        with stages.during("model"):
            model = model.to(device)
        with stages.during("checks"):
            build = build_for(recipe, model, dataset, device)
        stack.callback(build.layout.close)
        recipe = recipe.with_settings(f"{decision.setting}={decision.value}" for decision in build.decisions)
        passes = Passes(build.forward, gauge, stages.begin)
        course = Course(recipe, dataset, build, Mesh())
        course.check_smallest()
        with stages.during("optimizer"):
            # the learning rate's table is as long as the run, or as what is done here
            length = max(course.total_steps, 2 + SETTLING_STEPS + TIMED_STEPS)
            assembled = assemble(recipe, dataclasses.replace(build, forward=passes), total_steps=length)
        stack.callback(assembled.engine.close)
        return _stepped(recipe, dataset, course, assembled, passes, stages, gauge)


def _stepped(
    recipe: Recipe,
    dataset: Dataset,
    course: Course,
    assembled: Assembled,
    passes: Passes,
    stages: Stages,
    gauge: Gauge,
) -> Steady:
    engine, layout = assembled.engine, assembled.build.layout
    largest = course.largest_step()
    if course.warms_up(assembled.build.device):
        with stages.during("warm-up"):
            engine.warm_up(course.largest(course.start))
    stages.begin("passes")
    for name, reading in passes.listen(lambda: engine.accumulate(largest)).items():
        stages.end(name, reading)
    with stages.during("update"):
        engine.update()

    def step(given: StepInput) -> int:
        engine.accumulate(given)
        engine.update()
        return sum(map(len, given.microbatches))

    stages.begin("steady")
    step(dataclasses.replace(largest, step=1))  # beside states that the first update made
    following = _from_the_first(course)
    for given in itertools.islice(following, SETTLING_STEPS):
        step(given)
    settled, started = gauge.read(), time.perf_counter()
    samples = sum(map(step, itertools.islice(following, TIMED_STEPS)))
    reading = gauge.read()
    seconds = max(time.perf_counter() - started, 1e-9)
    stages.end("steady", reading.after(settled))
    evaluated = largest_batch(layout, dataset.splits, recipe.loop.evaluated_together)
    if evaluated is not None:
        batch = layout.collate(evaluated)
        with stages.during("evaluation"):
            engine.infer(batch)
            if averaged := engine.averaged():
                with averaged:
                    engine.infer(batch)
    return Steady(
        micro_batch_size=max(map(len, largest.microbatches)),
        num_steps=course.total_steps,
        step_seconds=seconds / TIMED_STEPS,
        samples_per_second=samples / seconds,
        execution={**assembled.build.execution, **fused(assembled.build.model), **engine.execution},
    )


def _from_the_first(course: Course) -> Iterator[StepInput]:
    """The run's steps in their order, behind the two that were made of the largest."""
    at = course.start
    for number in itertools.count(2):
        yield course.input(at, number)
        at = course.after(at)


def _read(recipe: Recipe) -> tuple[Recipe, Dataset, nn.Module]:
    """Data and model on the host, and the recipe with the sizes that they decide."""
    recipe, _, config, _ = settle_shapes(recipe)
    dataset, tokenizer = encoded(recipe)
    return recipe, dataset, model_for(recipe, config, dataset, size_of_vocabulary(recipe, dataset, tokenizer))


def _is_capturing(device: torch.device) -> bool:
    """Whether this pass is being captured as a graph, in which nothing may be waited for."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def main() -> None:
    """Measure the recipe that comes in as a line of JSON; each stage, and then the end, goes out as one."""
    send = take_over_output()
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_asker, daemon=True).start()
    recipe = Recipe.parse(request["recipe"])
    device = torch.device(recipe.device)
    gauge = GpuGauge(device, request["others"] or 0) if device.type == "cuda" else NoGauge()
    stages = Stages(gauge, lambda stage: send({"stage": dataclasses.asdict(stage)}))
    try:
        send({"steady": dataclasses.asdict(measure_stages(recipe, stages, gauge))})
    except torch.OutOfMemoryError as error:
        send({"out_of_memory": stages.now, "message": str(error).partition("\n")[0]})
    except UserError as error:
        send({"problem": str(error)})
    except Exception as error:
        problem = f"it failed in the stage {stages.now!r}: {in_a_line(error)}"
        send({"problem": problem, "traceback": traceback.format_exc()})


def _end_with_asker() -> None:
    """Without anybody to tell, there is no use in keeping the GPU."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
