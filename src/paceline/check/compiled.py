"""Compiled blocks compute what they do as written."""

from __future__ import annotations

from paceline.check.accumulation import gradients
from paceline.check.claim import NotApplicable
from paceline.check.difference import Measured, difference, different, furthest
from paceline.check.subject import PLAIN_SGD, STEADY, Subject

CLOSE = 1e-3
"""Compiled kernels add in an order of their own, and fuse what rounds in between."""


def check(subject: Subject) -> str:
    """Loss and gradients of a step, compiled and not."""
    if subject.prepared.recipe.techniques.compile is not True:
        raise NotApplicable("nothing is compiled (techniques.compile = false)")
    with subject.numbers():
        plain, _ = _step(subject, "techniques.compile=false")
        found, execution = _step(subject, "techniques.compile=true")
    seen = difference(plain, found, CLOSE)
    if seen is not None:
        raise different(seen, "compiled and as written")
    told = f" ({execution})" if execution else ""
    return f"a step{told}; loss and gradients differ by {furthest(plain, found):.1e} of their norm at most"


def _step(subject: Subject, setting: str) -> tuple[Measured, str]:
    steps = subject.steps(*subject.calm, PLAIN_SGD, STEADY, setting)
    engine = steps.assembled.engine
    engine.warm_up(steps.course.largest(steps.course.start))
    loss = engine.accumulate(steps.course.input(steps.course.start, 0)).loss.clone()
    found = {"loss": {"": loss}, "gradient": gradients(steps)}
    execution = {**steps.build.execution, **engine.execution}.get("compile", "")
    engine.close()
    return found, execution
