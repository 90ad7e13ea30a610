"""A step never waits for the GPU."""

from __future__ import annotations

import traceback

import torch

from paceline.check.claim import Broken, NotApplicable
from paceline.check.subject import Subject

WARM = 3
"""Steps before, of the same samples: kernels are loaded, states are made, and these shapes are compiled and captured by
then, all of which may wait."""


def check(subject: Subject) -> str:
    """Steps with torch's sync debugging turned into an error."""
    if subject.recipe.device != "cuda":
        raise NotApplicable("on a CPU there is nobody to wait for")
    with subject.numbers(subject.recipe.techniques.precision):
        steps = subject.steps(*subject.as_run, still=False)
        course, engine = steps.course, steps.assembled.engine
        engine.warm_up(course.largest(course.start))
        step = min(WARM, course.total_steps - 1)
        for warm in range(step):
            engine.accumulate(course.input(course.start, warm))
            engine.update()
        given = course.input(course.start, step)
        torch.cuda.synchronize()
        # warns that it is a prototype, where warnings are not ignored
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine.accumulate(given)
            engine.update()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            told = f"a step waits at {place.filename}:{place.lineno}: {place.line}"
            raise Broken(told, tensor=place.name) from None
        finally:
            torch.cuda.set_sync_debug_mode("default")
            engine.close()
    return f"step {step + 1} came to its end without a wait"
