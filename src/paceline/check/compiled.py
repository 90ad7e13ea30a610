"""Compiled blocks compute what they do as written."""

from __future__ import annotations

from paceline.check.accumulation import gradients
from paceline.check.claim import NotApplicable
from paceline.check.difference import Measured, within
from paceline.check.subject import PLAIN_SGD, STEADY, Steps, Subject
from paceline.contract.errors import RecipeError
from paceline.techniques.compile import compile_in_evaluation, compiled_passes

CLOSE = 1e-3
"""Compiled kernels add in an order of their own, and fuse what rounds in between."""


def check(subject: Subject) -> str:
    """Loss and gradients of a step, compiled and not."""
    if subject.prepared.recipe.techniques.compile is not True:
        raise NotApplicable("nothing is compiled (techniques.compile = false)")
    with subject.numbers():
        plain, _, _ = _step(subject, "techniques.compile=false")
        found, count, execution = _step(subject, "techniques.compile=true")
    if not count:
        raise NotApplicable(f"no block was compiled ({execution}), and there is nothing to compare")
    away = within(plain, found, CLOSE, "compiled and as written")
    return f"a step, compiled: {execution}; loss and gradients differ by {away:.1e} of their norm at most"


def warm_up(subject: Subject, steps: Steps) -> None:
    """Compile, as a run does before its first step.

    Raises:
        NotApplicable: the compiler fails, and a run, whose ``auto`` chose it, goes on without.
        RecipeError: it fails where the recipe asks for it.
    """
    try:
        steps.assembled.engine.warm_up(steps.course.largest(steps.course.start))
    except RecipeError as error:
        if not subject.was_chosen("techniques.compile"):
            raise
        raise NotApplicable(f"{error.why}; a run goes on without") from None


def _step(subject: Subject, setting: str) -> tuple[Measured, int, str]:
    """Loss and gradients, how many modules were compiled, and what the run would say of it."""
    steps = subject.steps(*subject.calm, PLAIN_SGD, STEADY, setting)
    model, engine = steps.build.model, steps.assembled.engine
    # the model is still: it stays in evaluation mode, in which a run compiles nothing
    compile_in_evaluation(model)
    warm_up(subject, steps)
    loss = engine.accumulate(steps.course.input(steps.course.start, 0)).loss.clone()
    found = {"loss": {"": loss}, "gradient": gradients(steps)}
    count, execution = compiled_passes(model), {**steps.build.execution, **engine.execution}.get("compile", "")
    engine.close()
    return found, count, execution
