"""Captured steps compute what eager ones do."""

from __future__ import annotations

from torch import Tensor

from paceline.check.claim import Broken, NotApplicable
from paceline.check.difference import Measured, within
from paceline.check.loop import settings_of
from paceline.check.subject import Subject
from paceline.seams import Capturing

FILLED = 64
"""Positions that a row of texts is filled up to a multiple of, in both ways: a captured run fills its rows further than
an eager one, and what is dropped goes by the places in the row."""

STEPS = 6
"""Two batches in turn: what comes again is captured, and then replayed."""

CLOSE = 1e-2
"""A replay has the bits of an eager step where kernels add in a fixed order; what is compared are changes of weights,
beside which a step that was not made, or made twice, is far away."""


def check(subject: Subject) -> str:
    """Losses, and how far weights have moved, in some steps, captured and eager, from the same random numbers."""
    if subject.recipe.device != "cuda":
        raise NotApplicable("there are no CUDA graphs on a CPU")
    if subject.prepared.recipe.techniques.capture is not True:
        raise NotApplicable("steps are not captured (techniques.capture = false)")
    changes, told = settings_of(subject.recipe)
    if not subject.dataset.is_images and subject.recipe.data.pad_to_multiple_of is None:
        changes = (*changes, f"data.pad_to_multiple_of={FILLED}")
    with subject.numbers(subject.recipe.techniques.precision):
        eager, _ = _run(subject, *changes, "techniques.capture=false")
        captured, replays = _run(subject, *changes, "techniques.capture=true")
    if not replays:
        raise NotApplicable("no step of these few samples was captured")
    away = within(eager, captured, CLOSE, "captured and eager")
    return f"{STEPS} steps{told}; losses and changes of weights differ by {away:.1e} of their norm at most"


def _run(subject: Subject, *settings: str) -> tuple[Measured, bool]:
    """Losses and changes, and whether anything was replayed."""
    steps = subject.steps(*subject.as_run, "techniques.compile=false", *settings, still=False)
    course, engine = steps.course, steps.assembled.engine
    before = {name: tensor.detach().clone() for name, tensor in engine.whole().items()}
    engine.warm_up(course.largest(course.start))
    batches, losses = (course.start, course.after(course.start)), dict[str, Tensor]()
    for step in range(min(STEPS, course.total_steps)):
        loss = engine.accumulate(course.input(batches[step % 2], step)).loss
        if not bool(loss.isfinite()):
            raise Broken(f"the loss of step {step + 1} is no number", tensor="loss")
        losses[f"step {step + 1}"] = loss.double().cpu()
        engine.update()
    found = {
        name: tensor.detach().double() - before[name].double()
        for name, tensor in engine.whole().items()
        if tensor.is_floating_point()
    }
    replays = isinstance(engine, Capturing) and engine.replays
    engine.close()
    return {"loss": losses, "change": found}, replays
