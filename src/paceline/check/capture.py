"""Captured steps compute what eager ones do."""

from __future__ import annotations

from torch import Tensor

from paceline.check.claim import Broken, NotApplicable
from paceline.check.difference import difference, different, furthest
from paceline.check.subject import Subject
from paceline.seams import Capturing

STEPS = 4

CLOSE = 1e-3
"""A replay has the bits of an eager step where kernels add in a fixed order."""


def check(subject: Subject) -> str:
    """The weights after some steps, captured and eager, from the same random numbers."""
    if subject.recipe.device != "cuda":
        raise NotApplicable("there are no CUDA graphs on a CPU")
    if subject.prepared.recipe.techniques.capture is not True:
        raise NotApplicable("steps are not captured (techniques.capture = false)")
    with subject.numbers(subject.recipe.techniques.precision):
        eager, _ = _run(subject, "techniques.capture=false")
        captured, replays = _run(subject, "techniques.capture=true")
    if not replays:
        raise NotApplicable("no step of these few samples was captured")
    seen = difference({"weight": eager}, {"weight": captured}, CLOSE)
    if seen is not None:
        raise different(seen, "captured and eager")
    away = furthest({"weight": eager}, {"weight": captured})
    return f"{STEPS} steps; weights differ by {away:.1e} of their norm at most"


def _run(subject: Subject, setting: str) -> tuple[dict[str, Tensor], bool]:
    steps = subject.steps(*subject.as_run, "techniques.compile=false", setting, still=False)
    course, engine = steps.course, steps.assembled.engine
    engine.warm_up(course.largest(course.start))
    at = course.start
    for step in range(min(STEPS, course.total_steps)):
        loss = engine.accumulate(course.input(at, step)).loss
        if not bool(loss.isfinite()):
            raise Broken(f"the loss of step {step + 1} is no number", tensor="loss")
        engine.update()
        at = course.after(at)
    found = {name: tensor.clone() for name, tensor in engine.whole().items() if tensor.is_floating_point()}
    replays = isinstance(engine, Capturing) and engine.replays
    engine.close()
    return found, replays
