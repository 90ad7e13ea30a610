"""Equal seeds repeat, other seeds do not."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.check.claim import Broken
from paceline.check.difference import NOISE, copied, same_state
from paceline.check.subject import Subject


def check(subject: Subject) -> str:
    """Some steps as the recipe has them, dropout and augmentation included: twice, with an evaluation between, and
    with another seed."""
    recipe = subject.recipe
    exact = recipe.deterministic or recipe.device == "cpu"
    with subject.numbers(recipe.techniques.precision, deterministic=recipe.deterministic):
        first, order = _run(subject)
        second, _ = _run(subject, disturbed=True)
        _, other = _run(subject, f"seed={(recipe.seed + 1) % 2**32}", model_of_own_seed=True)
    same_state(first, second, "twice with one seed", noise=0.0 if exact else NOISE)
    if recipe.loop.shuffle and len(subject.train) > 4 and np.array_equal(order, other):
        raise Broken("another seed takes the samples in the same order", tensor="order", switch="")
    bits = "to the bit" if exact else "up to the order in which a GPU adds; deterministic=true gives the same bits"
    return f"two runs with seed {recipe.seed} are equal {bits}; another seed takes another order"


def _run(
    subject: Subject, *settings: str, disturbed: bool = False, model_of_own_seed: bool = False
) -> tuple[dict[str, Tensor], np.ndarray]:
    """The state after three steps, and the samples in the order of the epoch."""
    steps = subject.steps(*subject.as_run, *settings, still=False)
    course, engine = steps.course, steps.assembled.engine
    at, seen, losses = course.start, [], []
    for step in range(course.steps_per_epoch):
        seen.append(course.plan(at).samples)
        if step < 3 and not model_of_own_seed:
            if disturbed:  # what ran before must not matter
                torch.rand(step + 1)
                engine.infer(steps.build.layout.collate(subject.train[:2]))
            losses.append(engine.accumulate(course.input(at, step)).loss.clone())
            engine.update()
        at = course.after(at)
    tensors, _ = engine.state()
    found = copied(tensors) | {f"loss: step {number + 1}": loss.cpu() for number, loss in enumerate(losses)}
    engine.close()
    return found, np.concatenate(seen)
