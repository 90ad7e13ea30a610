"""A run's first steps on a card, stage by stage: what the context, the model, each pass and the update add to it.

The run is put together by the functions that ``train`` uses. What ``train`` never does is done here: after each stage
the card is waited for and looked at. So figures of speed come from further steps, in which nothing waits.

As a program it measures one recipe in a process that does nothing else, see ``measure.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from paceline.data.dataset import Dataset, Tokens
from paceline.data.order import OrderState, ShuffledOrder, StepPlan
from paceline.engine.assemble import Assembled, assemble
from paceline.engine.evaluate import largest_batch
from paceline.engine.numerics import numerics
from paceline.engine.rng import augmentation_seed
from paceline.engine.statistics import check_smallest, fewest_together
from paceline.errors import RecipeError, UserError
from paceline.files import compiled_folder
from paceline.memory.gauge import CardGauge, Gauge, NoGauge, Reading
from paceline.models.config import max_positions, read_config
from paceline.models.images import own_processor, preferred_size
from paceline.preparation import build_for, encoded, model_for, shape_decisions, size_of_vocabulary
from paceline.recipe import Recipe
from paceline.records import StageRecord
from paceline.seams import Batch, Build, Forward
from paceline.techniques.compile import fused, kept_cache

SETTLING_STEPS: Final = 5
"""Steady steps before the timed ones: shapes that come again are recorded, compiled code is specialised."""

TIMED_STEPS: Final = 20

MOST_STEPS: Final = 5000
"""Steps among which the largest is looked for, as many as a plan looks at."""

Tell = Callable[[StageRecord], None]


@dataclass(frozen=True, kw_only=True)
class Steady:
    """What the steps came to once they were all alike; see ``MemoryStages``."""

    micro_batch_size: int
    num_steps: int
    step_seconds: float
    samples_per_second: float
    path: Mapping[str, str]


@final
class Stages:
    """Tells of each stage as it ends.

    Args:
        gauge: reads the card.
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
    """A forward pass that reads the card before and after itself while it listens: so the two passes are told apart.

    Args:
        forward: the pass.
        gauge: reads the card.
        entered: told of each pass as it begins.
    """

    def __init__(self, forward: Forward, gauge: Gauge, entered: Callable[[str], None] = lambda _: None) -> None:
        self._forward, self._gauge, self._entered = forward, gauge, entered
        self._found: dict[str, Reading] = {}
        self._listens = False

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        if not self._listens or _is_recorded(batch.labels.device):
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
        steps = Steps(recipe, dataset, build)
        with stages.during("optimizer"):
            # the learning rate's table is as long as the run, or as what is done here
            length = max(steps.num_steps, 2 + SETTLING_STEPS + TIMED_STEPS)
            assembled = assemble(recipe, dataclasses.replace(build, forward=passes), total_steps=length)
        stack.callback(assembled.engine.close)
        return _stepped(recipe, steps, assembled, passes, stages, gauge)


@final
class Steps:
    """The steps of a run in their order.

    Raises:
        RecipeError: there is none, or the model cannot be trained on one of them.
    """

    def __init__(self, recipe: Recipe, dataset: Dataset, build: Build) -> None:
        loop, train = recipe.loop, dataset.splits["train"]
        self._recipe, self._dataset, self._build = recipe, dataset, build
        self._order = ShuffledOrder(
            train,
            micro_batch_size=loop.micro_batch_size or loop.batch_size,
            shuffle=loop.shuffle,
            drop_last=loop.drop_last,
            lengths=dataset.inputs.lengths if isinstance(dataset.inputs, Tokens) else None,
            fewest=fewest_together(build.model),
        )
        per_epoch = self._order.steps_per_epoch(loop.batch_size)
        if not per_epoch:
            why = f"with drop_last, {len(train)} training samples make no whole batch"
            fix = f"--set loop.batch_size={len(train)} or loop.drop_last=false"
            raise RecipeError(f"loop.batch_size = {loop.batch_size}", why, fix)
        self.num_steps = min(loop.max_steps or sys.maxsize, per_epoch * loop.epochs)
        check_smallest(build, self._order, loop, train, total_steps=self.num_steps, world_size=1)
        self._made = 0
        self._at = OrderState(seed=recipe.seed, epoch=0, step=0, batch_size=loop.batch_size)

    def largest(self) -> StepPlan:
        """The step whose largest micro-batch has the most positions."""
        at, found, most = self._at, self._order.plan(self._at), (-1, -1)
        for _ in range(min(self.num_steps, MOST_STEPS)):
            plan, at = self._order.plan(at), self._order.after(at)
            height = max((self._build.layout.size(ids).slots, len(ids)) for ids in plan.microbatches)
            if height > most:
                found, most = plan, height
        return found

    def following(self) -> StepPlan:
        """The next step, from the first on."""
        plan, self._at = self._order.plan(self._at), self._order.after(self._at)
        return plan

    def accumulate(self, assembled: Assembled, plan: StepPlan) -> None:
        """Forward and backward of one step."""
        layout, seed, number = self._build.layout, self._recipe.seed, self._made
        counted = self._build.task.count(self._dataset.labels[plan.samples])
        self._made += 1
        assembled.engine.accumulate(
            (
                layout.collate(ids, augmentation_seed(seed, number, index, 0))
                for index, ids in enumerate(plan.microbatches)
            ),
            counted,
            step=number,
        )

    def largest_evaluation(self) -> Any:
        """The largest batch of an evaluation; None where the run has none."""
        layout, loop = self._build.layout, self._recipe.loop
        ids = largest_batch(layout, self._dataset.splits, loop.evaluation_batch_size or loop.batch_size)
        return None if ids is None else layout.collate(ids)


def _stepped(
    recipe: Recipe, steps: Steps, assembled: Assembled, passes: Passes, stages: Stages, gauge: Gauge
) -> Steady:
    engine, layout, switches = assembled.engine, assembled.build.layout, recipe.techniques
    largest = steps.largest()
    fullest = max(largest.microbatches, key=lambda ids: (layout.size(ids).slots, len(ids)))
    if any(switch is True for switch in (switches.compile, switches.fusion, switches.capture)):
        with stages.during("warm-up"):
            engine.warm_up(layout.collate(fullest), len(fullest) or 1)
    stages.begin("passes")
    for name, reading in passes.listen(lambda: steps.accumulate(assembled, largest)).items():
        stages.end(name, reading)
    with stages.during("update"):
        engine.update()

    def step(plan: StepPlan) -> int:
        steps.accumulate(assembled, plan)
        engine.update()
        return len(plan.samples)

    stages.begin("steady")
    step(largest)  # beside states that the first update made
    for _ in range(SETTLING_STEPS):
        step(steps.following())
    settled, started = gauge.read(), time.perf_counter()
    samples = sum(step(steps.following()) for _ in range(TIMED_STEPS))
    reading = gauge.read()
    seconds = max(time.perf_counter() - started, 1e-9)
    stages.end("steady", reading.after(settled))
    batch = steps.largest_evaluation()
    if batch is not None:
        with stages.during("evaluation"):
            engine.infer(batch)
    return Steady(
        micro_batch_size=len(fullest),
        num_steps=steps.num_steps,
        step_seconds=seconds / TIMED_STEPS,
        samples_per_second=samples / seconds,
        path={**assembled.build.path, **fused(assembled.build.model), **engine.path},
    )


def _read(recipe: Recipe) -> tuple[Recipe, Dataset, nn.Module]:
    """Data and model on the host, and the recipe with the sizes that they decide."""
    config = read_config(recipe.model)
    processor = own_processor(recipe.model, config, recipe.data.image_size)
    size = preferred_size(recipe.model, config) if recipe.model.source and processor is None else None
    shapes = shape_decisions(recipe, max_positions(config), size)
    recipe = recipe.with_settings(f"{decision.setting}={decision.value}" for decision in shapes)
    dataset, tokenizer = encoded(recipe)
    return recipe, dataset, model_for(recipe, config, dataset, size_of_vocabulary(recipe, dataset, tokenizer))


def _is_recorded(device: torch.device) -> bool:
    """Whether this pass is being recorded as a graph, in which nothing may be waited for."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def main() -> None:
    """Measure the recipe that comes in as a line of JSON; each stage, and then the end, goes out as one."""
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print what they like, and the answers are read by a program

    def say(**told: Any) -> None:
        out.write(json.dumps(told) + "\n")
        out.flush()

    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_asker, daemon=True).start()
    recipe = Recipe.parse(request["recipe"])
    device = torch.device(recipe.device)
    gauge = CardGauge(device, request["others"] or 0) if device.type == "cuda" else NoGauge()
    stages = Stages(gauge, lambda stage: say(stage=dataclasses.asdict(stage)))
    try:
        say(steady=dataclasses.asdict(measure_stages(recipe, stages, gauge)))
    except torch.OutOfMemoryError as error:
        say(out_of_memory=stages.now, message=str(error).partition("\n")[0])
    except UserError as error:
        say(problem=str(error))
    except Exception as error:
        last = f"{type(error).__name__}: {error}".partition("\n")[0]
        say(problem=f"it failed in the stage {stages.now!r}: {last}", traceback=traceback.format_exc())


def _end_with_asker() -> None:
    """Without anybody to tell, there is no use in keeping the card."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
