"""Nothing is compiled anew after the warm-up."""

from __future__ import annotations

from paceline.check.claim import Broken, NotApplicable
from paceline.check.compiled import warm_up
from paceline.check.subject import Subject
from paceline.tracing.recompiles import Recompiles


def check(subject: Subject) -> str:
    """The compiler's own records over two epochs, from the second step on."""
    if subject.prepared.recipe.techniques.compile is not True:
        raise NotApplicable("nothing is compiled (techniques.compile = false)")
    with subject.numbers(subject.recipe.techniques.precision):
        steps = subject.steps(*subject.as_run, still=False)
        course, engine = steps.course, steps.assembled.engine
        warm_up(subject, steps)
        if "compile" in engine.execution:
            engine.close()
            raise NotApplicable(f"blocks run as written: {engine.execution['compile']}")
        at, seen, told = course.start, Recompiles(), list[str]()
        for step in range(course.total_steps):
            engine.accumulate(course.input(at, step))
            engine.update()
            if step:
                told += seen.new()
            else:
                seen.new()
            at = course.after(at)
        engine.close()
    if told:
        raise Broken(f"compiled {len(told)} times after the first step: {told[0]}", tensor=told[0].partition(":")[0])
    return f"{course.total_steps} steps, and nothing was compiled after the first"
