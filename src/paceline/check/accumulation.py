"""Micro-batches have the gradient of one large batch, also of an epoch's last, smaller one."""

from __future__ import annotations

from torch import Tensor

from paceline.check.claim import Broken, NotApplicable
from paceline.check.difference import Computed, Measured, same_up_to_rounding
from paceline.check.subject import PLAIN_SGD, STEADY, Steps, Subject


def check(subject: Subject) -> str:
    """Gradients of a whole batch and of an epoch's last one, at once and in micro-batches that do not divide it."""
    batch = subject.recipe.loop.batch_size
    if batch < 2:
        raise NotApplicable("a batch of one sample cannot be cut")
    micro = max(1, batch * 3 // 8)

    def compute(double: bool) -> Computed:
        steps = subject.steps(*subject.calm, PLAIN_SGD, STEADY, double=double, resting=True)
        large = {**measured(steps, batch, 0), **_last(measured(steps, batch, steps.course.steps_per_epoch - 1))}
        small = {**measured(steps, micro, 0), **_last(measured(steps, micro, steps.course.steps_per_epoch - 1))}
        steps.assembled.engine.close()
        return large, small

    with subject.numbers():
        away = same_up_to_rounding(compute, f"in micro-batches of {micro} and at once")
    tail = len(subject.train) % batch or batch
    return (
        f"steps of {batch} and {tail} in micro-batches of {micro}; gradients differ by {away:.1e} of their norm at most"
    )


def measured(steps: Steps, micro_batch_size: int, number: int) -> Measured:
    """Loss and gradients of the first epoch's step ``number``, by an engine whose rates are 0."""
    course = steps.course.under(steps.recipe.with_settings([f"loop.micro_batch_size={micro_batch_size}"]))
    at = course.start
    for _ in range(number):
        at = course.after(at)
    engine = steps.assembled.engine
    loss = engine.accumulate(course.input(at, number)).loss
    found = {"loss": {"": loss.clone()}, "gradient": gradients(steps)}
    engine.update()
    return found


def gradients(steps: Steps) -> dict[str, Tensor]:
    """A copy of each trained parameter's gradient, by its name.

    Raises:
        Broken: there is none, and nothing would be compared.
    """
    named = steps.build.model.named_parameters()
    found = {name: p.grad.clone() for name, p in named if p.requires_grad and p.grad is not None}
    if not found:
        raise Broken("no trained weight has a gradient after its pass", tensor="gradient")
    return found


def _last(found: Measured) -> Measured:
    return {f"last step's {kind}": tensors for kind, tensors in found.items()}
