"""The learning rate follows the updates that were applied, and its formula."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.check.claim import Broken, NotApplicable
from paceline.check.difference import copied, same_state
from paceline.check.loop import rates_of
from paceline.check.subject import Steps, Subject
from paceline.prepare.assemble import assemble
from paceline.seams import Batch, Task


def check(subject: Subject) -> str:
    """Rates beside their formula; and a run with a step that is skipped beside one that never had it."""
    told = _formula(subject)
    with subject.numbers(deterministic=subject.recipe.deterministic):
        plain, skipping = _run(subject, poisoned=False), _run(subject, poisoned=True)
    exact = subject.recipe.device == "cpu" or subject.recipe.deterministic  # else a GPU adds in any order
    same_state(plain, skipping, "after a skipped step and without one", noise=0.0 if exact else 1e-3)
    return f"{told}; a step with a gradient that is not finite moves neither weights, states, average nor rate"


def _formula(subject: Subject) -> str:
    steps = subject.steps(*subject.calm)
    total, groups = steps.course.total_steps, steps.assembled.groups
    name = steps.recipe.schedule.type
    steps.assembled.engine.close()
    try:
        factor = rates_of(steps.recipe, total)
    except NotApplicable:
        return f"the formula of {name} is not worked out here"
    expected = np.array([factor(step) for step in range(total)])
    for column, group in enumerate(groups):
        if group.schedule != steps.recipe.schedule:
            continue
        rates = steps.assembled.rates[:, column]
        highest = rates.max() / max(expected.max(), 1e-30)
        apart = np.abs(rates - expected * highest)
        if apart.max() > 1e-9 * max(highest, 1e-30):
            at = int(apart.argmax())
            told = f"the rate of step {at + 1} is {rates[at]:.3g}, and {expected[at] * highest:.3g} by {name}'s formula"
            raise Broken(told, tensor=f"rate of step {at + 1}", away=float(apart.max() / highest))
    return f"{total} rates of {name} by its formula"


def _run(subject: Subject, *, poisoned: bool) -> dict[str, Tensor]:
    """The state after three steps; ``poisoned``: with a fourth among them whose loss is not finite."""
    settings = [setting for setting in subject.calm if not setting.startswith(("optimizer.ema", "loop.save"))]
    steps = subject.steps(*settings, still=False)
    task = _Poisonable(steps.build.task)
    build = replace(steps.build, task=task.task)
    steps.assembled.engine.close()
    assembled = assemble(steps.recipe, build, steps.course.total_steps)
    made = Steps(recipe=steps.recipe, build=build, course=steps.course, assembled=assembled)
    at, engine = made.course.start, assembled.engine
    for step in range(min(3, made.course.total_steps)):
        if poisoned and step == 1:
            task.factor.fill_(torch.nan)
            engine.accumulate(made.course.input(at, step))
            if bool(engine.update().finite):
                raise Broken("an update with a gradient that is no number was applied", tensor="gradient")
            task.factor.fill_(1.0)
        engine.accumulate(made.course.input(at, step))
        engine.update()
        at = made.course.after(at)
    tensors, state = engine.state()
    # running statistics are of the passes, and a step that is skipped has made its own
    buffers = {name for name, _ in build.model.named_buffers()}
    learned = {kind: {name: t for name, t in some.items() if name not in buffers} for kind, some in tensors.items()}
    found = copied(learned)
    engine.close()
    return {**found, "updates applied": torch.tensor(state["applied"])}


class _Poisonable:
    """A task whose loss is multiplied by ``factor``, as a gradient that overflows in fp16 would have it."""

    def __init__(self, task: Task) -> None:
        self.factor: Tensor = torch.ones(())
        self.task: Any = copy.copy(task)
        plain = task.loss_sum

        def loss_sum(logits: Tensor, batch: Batch) -> Tensor:
            return plain(logits, batch) * self.factor.to(logits.device)

        setattr(self.task, "loss_sum", loss_sum)  # noqa: B010 - of this one object
