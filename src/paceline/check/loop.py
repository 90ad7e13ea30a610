"""Steps are those of a plain PyTorch loop: loss, gradients, clipping, rates and updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.check.claim import NotApplicable
from paceline.check.difference import Computed, same_up_to_rounding
from paceline.check.plain import plain_logits, plain_loss
from paceline.check.subject import PLAIN_SGD, Steps, Subject
from paceline.recipe import Recipe

STEPS = 4


def check(subject: Subject) -> str:
    """Some steps of the engine, in micro-batches, beside a loop that passes each sample through the model alone."""
    subject.require_steps()
    changes, told = settings_of(subject.recipe)
    micro = max(1, subject.recipe.loop.batch_size * 3 // 8)

    def compute(double: bool) -> Computed:
        steps = subject.steps(*subject.calm, *changes, f"loop.micro_batch_size={micro}", double=double)
        count = min(STEPS, steps.course.total_steps)
        before = {name: p.detach().clone().cpu() for name, p in steps.build.model.named_parameters()}
        ours = _engine_steps(steps, count, before)
        steps.assembled.engine.close()
        return _plain_steps(subject, steps, count, double=double), ours

    with subject.numbers():
        away = same_up_to_rounding(compute, "the engine and a plain loop")
    return f"{STEPS} steps{told}; losses, norms and weights differ by {away:.1e} of their norm at most"


def settings_of(recipe: Recipe) -> tuple[tuple[str, ...], str]:
    """Changes with which an optimizer of torch's own does the same, and what is told of them."""
    part = recipe.optimizer
    schedule = () if recipe.schedule.type in RATES else ("schedule={type: linear, warmup: 1}",)
    if part.type not in ("adamw", "adam", "sgd") or part.groups or part.layer_decay is not None:
        return (PLAIN_SGD, *schedule), " with plain SGD"
    if part.type == "sgd":
        return schedule, " with SGD"
    # with an eps that large a gradient's rounding stays a weight's: Adam divides what is nearly nothing by itself
    lr = max(part.lr, 1e-3)  # what is far smaller is lost in the rounding of the weights
    return ("optimizer.eps=1e-3", f"optimizer.lr={lr}", *schedule), f" with {part.type}, eps 1e-3, lr {lr:g}"


def _engine_steps(steps: Steps, count: int, before: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    losses, norms, at, engine = [], [], steps.course.start, steps.assembled.engine
    for step in range(count):
        losses.append(engine.accumulate(steps.course.input(at, step)).loss.double().cpu())
        norms.append(engine.update().norm.double().cpu())
        at = steps.course.after(at)
    moved = _moved(steps.build.model, before)
    return {"loss": _numbered(losses), "gradient's norm": _numbered(norms), "change": moved}


def _plain_steps(subject: Subject, steps: Steps, count: int, *, double: bool) -> dict[str, dict[str, torch.Tensor]]:
    recipe = steps.recipe
    model = subject.model(still=True, double=double).to(subject.device)
    before = {name: p.detach().clone().cpu() for name, p in model.named_parameters()}
    optimizer = optimizer_of(recipe, model)
    factor = rates_of(recipe, steps.course.total_steps)
    base = [group["lr"] for group in optimizer.param_groups]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses, norms, at = [], [], steps.course.start
    for step in range(count):
        ids = steps.course.plan(at).samples
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * factor(step)
        optimizer.zero_grad()
        loss = plain_loss(subject, plain_logits(subject, model, ids), ids)
        loss.backward()
        clip = recipe.optimizer.clip_norm
        norms.append(torch.nn.utils.clip_grad_norm_(trained, math.inf if clip is None else clip).double().cpu())
        optimizer.step()
        losses.append(loss.detach().double().cpu())
        at = steps.course.after(at)
    return {"loss": _numbered(losses), "gradient's norm": _numbered(norms), "change": _moved(model, before)}


def _numbered(values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"step {number + 1}": value for number, value in enumerate(values)}


def _moved(model: nn.Module, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """How far each trained weight has moved."""
    return {
        name: parameter.detach().cpu().double() - before[name].double()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def optimizer_of(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """torch's own optimizer with the recipe's settings: biases and norms do not decay."""
    part = recipe.optimizer
    scaled = part.lr * _scaling(recipe)
    decayed = [p for p in model.parameters() if p.requires_grad and (part.decay_all or p.ndim >= 2)]
    others = [p for p in model.parameters() if p.requires_grad and not (part.decay_all or p.ndim >= 2)]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": part.decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if part.type == "sgd":
        return torch.optim.SGD(groups, lr=scaled, momentum=part.momentum, nesterov=part.nesterov)
    kind = torch.optim.AdamW if part.type == "adamw" else torch.optim.Adam
    return kind(groups, lr=scaled, betas=part.betas, eps=part.eps)


def _scaling(recipe: Recipe) -> float:
    part = recipe.optimizer
    if part.lr_scaling in ("linear", "sqrt"):
        ratio = recipe.loop.batch_size / (part.lr_scaling_base or 1)
        return math.sqrt(ratio) if part.lr_scaling == "sqrt" else ratio
    return 1.0 if part.lr_scaling == "none" else float(part.lr_scaling)


RATES: dict[str, Callable[[float, float], float]] = {
    "constant": lambda done, floor: 1.0,
    "linear": lambda done, floor: floor + (1 - floor) * (1 - done),
    "cosine": lambda done, floor: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)),
}
"""Schedules as transformers has them: by the share of the steps after the warm-up that are behind it, and the floor."""


def rates_of(recipe: Recipe, total: int) -> Callable[[int], float]:
    """Step -> what the rate is multiplied by.

    Raises:
        NotApplicable: the schedule is another than these.
    """
    part = recipe.schedule
    if part.type not in RATES:
        raise NotApplicable(f"schedule.type = {part.type} is not worked out here")
    warmup = round(part.warmup * total) if 0 < part.warmup < 1 else int(part.warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        return RATES[part.type]((step - warmup) / max(1, total - warmup), part.floor)

    return factor
