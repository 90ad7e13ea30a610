"""Out of memory at run time: what was going on, what the device held, and what would make the run fit."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch

from paceline.contract.errors import MemoryFullError, PacelineError, UserError, first_line
from paceline.contract.records import MemoryPlan
from paceline.contract.spans import came_out_of
from paceline.machine.facts import Facts, Gpu
from paceline.machine.gpus import facts_with
from paceline.memory.changes import TracedChange, cheapest_changes, samples_of_a_process
from paceline.memory.predict import Predictor
from paceline.memory.search import usable_bytes
from paceline.observe.formats import size
from paceline.recipe import Recipe
from paceline.recipe.choose import choose, num_processes
from paceline.recipe.techniques import CATALOGUE, opened

SHOWN: Final = 3
"""Changes that a message offers."""

PATIENCE_SECONDS: Final = 20.0
"""How long the end of a run waits for traces of what would make it fit."""

PASSES: Final = {
    "data wait": "making a batch",
    "clip": "in the update",
    "update": "in the update",
    "backward": "in the backward pass",
    "forward": "in the forward pass",
}
"""Name of a span -> where in a step that is, for people."""

COMPARISON: Final = "comparing the model's fast path with its plain one"
"""The comparison of packed batches, or of early pooling, with the model's plain path, on a few texts."""

STAGES: Final = {
    "evaluating": "an evaluation",
    "predicting": "a prediction",
    "warming up": "the warm-up",
    "accumulating": "a step",
    "updating": "a step",
    "embedding": "embedding the samples",
    "making the optimizer": "making the optimizer",
    "comparing": COMPARISON,
    "placing and checking": "placing and checking the model",
}
"""Name of an activity -> what it is, for people; the innermost counts."""

WITHOUT_STEPS: Final = (STAGES["evaluating"], STAGES["predicting"], STAGES["embedding"])
"""What is done in batches of ``loop.evaluation_batch_size``."""

SPLITTABLE: Final = "what on_oom: split makes smaller"
"""Name of the activity that ``loop.on_oom: split`` would begin anew."""

ALIKE: Final = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED", "can't allocate memory", "not enough memory: you")
"""In the messages of errors that mean the same: of the driver, cuBLAS and cuDNN, and of torch on the host."""

_NUMBERS: Final = {
    "asked": r"Tried to allocate ([\d.]+ \w+)",
    "total": r"total capacity of ([\d.]+ \w+)",
    "free": r"of which ([\d.]+ \w+) is free",
    "allocated": r"([\d.]+ \w+) is allocated by PyTorch",
    "cached": r"([\d.]+ \w+) is reserved by PyTorch but unallocated",
}
_UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


Advice = Sequence[tuple[tuple[str, ...], TracedChange | None]]
"""Settings, and what they were found to do where they were traced."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """What torch said when the memory was full, in bytes: then, not now, when much of it is free again."""

    asked: int | None = None
    total: int | None = None
    """The GPU's whole memory."""
    free: int | None = None
    """What was free of the GPU's memory."""
    allocated: int | None = None
    """By tensors of this process."""
    cached: int | None = None
    """Reserved beside them."""

    @classmethod
    def parse(cls, message: str) -> Shortage:
        """From the message of ``torch.OutOfMemoryError``; None for what it does not say."""
        found = {name: re.search(pattern, message) for name, pattern in _NUMBERS.items()}
        return cls(**{name: _bytes(match[1]) for name, match in found.items() if match})


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known of a run when its memory is full."""

    recipe: Recipe
    resume: str
    """What a person does to go on."""
    largest: int
    """Samples of a micro-batch, at most."""
    evaluated: int
    """Samples of an evaluation's batch."""
    step: int = 0
    """That is under way, from 1; 0: none yet."""
    total_steps: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    """``Engine.held``."""
    plan_command: str = ""
    """What makes a plan of the run; empty without a GPU."""
    fewest: int = 1
    """Samples that are kept together in a micro-batch: a smaller one would not come of asking for it."""
    has_states: bool = False
    """Whether the run would go on from a checkpoint, with the optimizer's states in it."""
    can_split: bool = True
    """Whether a step could be made again in smaller micro-batches (``loop.on_oom: split``)."""
    offers: Callable[[Shortage], Sequence[TracedChange]] = lambda _: ()
    """What would make it fit, as traced."""


@contextmanager
def explained(situation: Callable[[], Situation]) -> Iterator[None]:
    """Inside, what fails for want of memory is told as an error of the settings.

    Raises:
        MemoryFullError: in place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(mark in str(error) for mark in ALIKE):
            raise
        raise exhausted(error, situation()) from error


def exhausted(error: BaseException, at: Situation) -> MemoryFullError:
    """The error that teaches: where, what the device held, and what makes it fit."""
    names, shortage = came_out_of(error), Shortage.parse(str(error))
    phase = place_of(error, at.step, at.total_steps)
    batched = _stage(names) in WITHOUT_STEPS
    setting, now = ("evaluation", at.evaluated) if batched else ("micro", at.largest)
    setting = f"loop.{setting}_batch_size"
    traced = [] if batched else [made for made in at.offers(shortage) if made.fits]
    advice: list[tuple[tuple[str, ...], TracedChange | None]] = [(made.change.settings, made) for made in traced]
    plain_advice = _plain_advice(at, names, setting, now)
    advice += [(plain, None) for plain in plain_advice if not _is_among(plain, advice)]
    if at.has_states:  # of the old kind, which the new one cannot go on with
        advice = [one for one in advice if not any(setting.startswith("optimizer.type=") for setting in one[0])]
    settings = [setting for settings, _ in advice[:SHOWN] for setting in settings]
    fix = ", or ".join(_typed(settings, made) for settings, made in advice[:SHOWN])
    fix += "; " if fix else "a GPU with more memory, shorter texts or smaller images, or a smaller model; "
    if at.plan_command and not traced:
        fix += f"{at.plan_command} says what fits; "
    if now > 1 and _splits(names, at):
        fix += f"--set loop.on_oom=split halves {'batches' if batched else 'micro-batches'} by itself; "
    return MemoryFullError(
        f"out of memory {phase}: {setting} = {now}",
        _held(error, shortage, at.held),
        f"{fix}then {at.resume}",
        phase=phase,
        settings=settings,
    )


def place_of(error: BaseException, step: int = 0, total_steps: int = 0) -> str:
    """Where an error arose, for people: ``in the backward pass of step 12 of 300``.

    An error remembers the spans and activities that it came out of, so that telling it costs nothing where there is
    none.
    """
    names = came_out_of(error)
    stage = _stage(names)
    passed = next((PASSES[name] for name in names if name in PASSES), "")
    if stage == "a step" and step:
        stage = f"step {step} of {total_steps}"
    if not stage:
        return "before the first step" if not step else f"after step {step - 1} of {total_steps}"
    joint = " for " if passed.startswith("making") else " of "
    return f"{passed}{joint}{stage}" if passed and stage != "an evaluation" else f"in {stage}"


def traced_offers(
    recipe: Recipe,
    facts: Facts,
    shortage: Shortage,
    *,
    num_gpus: int,
    known: MemoryPlan | None = None,
    seconds: float = PATIENCE_SECONDS,
) -> Sequence[TracedChange]:
    """What ``paceline plan`` would offer, as far as it is found in time; nothing where the run cannot be traced.

    That the GPU was full counts for more than the plan: a change has to save what was missing at least.

    Args:
        recipe: as the run settled it.
        facts: with the run's GPU first.
        num_gpus: of the whole run.
        known: a plan of the run, if there is one already.
        seconds: after which no further trace is waited for.
    """
    gpu, deadline, reopened = facts.gpus[0], time.monotonic() + seconds, _opened(recipe)
    with Predictor() as predictor:
        timer = threading.Timer(seconds, predictor.kill)
        timer.daemon = True
        timer.start()

        def plan_with(settings: tuple[str, ...], gpus: int | None = None) -> MemoryPlan:
            count, asked = gpus or num_gpus, reopened.with_settings(settings)
            changed = choose(asked, facts_with([gpu] * count, facts), num_processes(asked, count))[0]
            try:
                if time.monotonic() > deadline:
                    raise UserError("no time is left to trace it")
                return predictor.plan(changed, gpu, world_size=count)
            except UserError:
                raise
            except PacelineError as error:
                raise UserError("it cannot be traced", str(error)) from error

        try:
            plan = known or plan_with(())
            limit = min(_usable(gpu, shortage, plan.outside), plan.total - (shortage.asked or 1))
            now, _ = samples_of_a_process(recipe, plan, num_gpus)
            return cheapest_changes(
                plan_with, recipe=recipe, gpu=gpu, plan=plan, limit_bytes=limit, largest=now - 1, gpus=num_gpus
            )
        except UserError:
            return ()
        finally:
            timer.cancel()
            predictor.kill()


def _opened(recipe: Recipe) -> Recipe:
    """With what is switched on left open, as a resume leaves it: a change may have no room for it."""
    return recipe.with_settings(opened(recipe))


def _usable(gpu: Gpu, shortage: Shortage, outside: int) -> int:
    """What the run can have of its GPU, its context and NCCL's memory included: other programs may have some of it."""
    whole = shortage.total or usable_bytes(gpu.memory_bytes or 0)
    if shortage.free is None or shortage.allocated is None:
        return whole
    return min(whole, shortage.free + shortage.allocated + (shortage.cached or 0) + outside)


def _stage(names: Sequence[str]) -> str:
    return next((STAGES[name] for name in names if name in STAGES), "")


def _held(error: BaseException, shortage: Shortage, held: Mapping[str, int]) -> str:
    """What the device was full of."""
    kinds = [f"{kind} {size(num_bytes)}" for kind, num_bytes in held.items() if num_bytes]
    if shortage.allocated is None or shortage.total is None or shortage.free is None:
        said = first_line(error)
        return f"{said}; alive were {', '.join(kinds)}, activations and all else" if kinds else said
    if held:
        kinds.append(f"activations and all else {size(max(0, shortage.allocated - sum(held.values())))}")
    others = shortage.total - shortage.free - shortage.allocated - (shortage.cached or 0)
    wanted, left = size(shortage.asked or 0), f"{size(shortage.free)} of {size(shortage.total)}"
    told = f"{wanted} more were asked for, and {left} were free; tensors took {size(shortage.allocated)}"
    told += f" ({', '.join(kinds)})" if kinds else ""
    told += f", torch's allocator kept {size(shortage.cached or 0)} more"
    return told + (f", the driver and other programs {size(others)}" if others > 0 else "")


def _plain_advice(at: Situation, names: Sequence[str], setting: str, now: int) -> list[tuple[str, ...]]:
    """What saves memory in most runs, untraced."""
    recipe, smallest = at.recipe, at.fewest if setting == "loop.micro_batch_size" else 1
    if any(PASSES.get(name) == PASSES["update"] for name in names):  # activations are gone by then
        return [("optimizer.type=adamw8bit",)] if recipe.optimizer.type == "adamw" else []
    if _stage(names) == COMPARISON:  # of a few texts, whatever the micro-batch
        switches = [f"techniques.{name}" for name in ("packing", "early_pooling")]
        on = [name for name in switches if getattr(recipe.techniques, name.partition(".")[2]) is not False]
        return [tuple(f"{name}=false" for name in on)] if on else []
    found: list[tuple[str, ...]] = [(f"{setting}={-(-now // 2)}",)] if now > smallest else []
    if setting == "loop.micro_batch_size":
        entries = (entry for entry in CATALOGUE if not entry.is_on(recipe))
        found.extend((f"{entry.setting}={entry.saving.value}",) for entry in entries if entry.saving)
    return found


def _is_among(plain: Sequence[str], advice: Advice) -> bool:
    """Whether a change that was traced sets the same."""
    told = {setting.partition("=")[0] for settings, _ in advice for setting in settings}
    return any(setting.partition("=")[0] in told for setting in plain)


def _splits(names: Sequence[str], at: Situation) -> bool:
    """Whether ``on_oom: split`` would have been of use."""
    recipe = at.recipe
    return at.can_split and recipe.loop.on_oom == "fail" and recipe.model.train != "features" and SPLITTABLE in names


def _typed(settings: Sequence[str], made: TracedChange | None) -> str:
    """A change as it is typed, and what it is known to do."""
    gpus = f"--gpus {made.change.gpus} " if made and made.change.gpus else ""
    told = gpus + " ".join(f"--set {setting}" for setting in settings)
    return told if made is None else f"{told} (saves {size(made.saving_bytes)}; {made.change.speed})"


def _bytes(text: str) -> int:
    number, unit = text.split()
    return round(float(number) * _UNITS.get(unit, 1))
