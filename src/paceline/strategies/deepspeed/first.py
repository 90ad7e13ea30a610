"""The first pass through DeepSpeed's engine beside a plain one: what is sharded wrongly is refused, not trained.

Both take the same two samples, in evaluation mode and in the run's own number format. The plain pass comes first, as
long as the model is whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.compare import Results, beyond, exactly, tolerance_of
from paceline.compare.rounding import ROUGH
from paceline.seams import Batch, Build, Forward, World


def plain_results(build: Build, forward: Forward, world: World) -> tuple[Batch, Results] | None:
    """The samples, and what the whole model makes of them; None where a rank has no room for that. A collective.

    Args:
        forward: of the build, past DeepSpeed's engine.
    """
    found, was_training = None, build.model.training
    build.model.eval()
    try:
        with exactly(build.device):
            # any samples will do: what is wrong with shards is wrong of all
            batch = build.layout.collate(np.zeros(2, np.int64))
            logits = forward(build.model, batch)
            gradients = on_host(build.task.loss_sum(logits, batch), build.model) if logits.requires_grad else {}
            found = batch, Results(logits.detach().cpu(), gradients)
    except torch.OutOfMemoryError:
        pass  # what of it is left is let go of with the exception
    build.model.train(was_training)
    return None if world.any(found is None) else found


def on_host(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The gradient of each trained parameter, in main memory: on the device there is one at a time.

    A run that is offloaded has no room for all of them, and a peak of theirs would be taken for the run's.
    """
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    found = {name: torch.zeros_like(one, device="cpu") for name, one in trained.items()}

    def keep(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        found[name] += parameter.grad.cpu()
        parameter.grad = None

    with contextlib.ExitStack() as stack:
        for name, one in trained.items():
            stack.callback(one.register_post_accumulate_grad_hook(partial(keep, name)).remove)
        loss.backward()
    return found


def difference(
    theirs: Any,
    whole_gradient: Callable[[Tensor], Tensor | None],
    build: Build,
    samples: Batch,
    expected: Results,
    world: World,
) -> str | None:
    """Where DeepSpeed's engine computes something else than the whole model; None where it does not. A collective.

    The engine has made a step of rate 0 then: weights are as they were, states of the optimizer are not.

    Args:
        theirs: DeepSpeed's engine.
        whole_gradient: that it has of a weight; a collective.
        build: whose forward pass goes through the engine.
        samples, expected: of ``plain_results``.
    """
    groups = theirs.optimizer.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    was_training = theirs.module.training
    theirs.module.eval()
    with exactly(build.device):
        logits = build.forward(build.model, samples)
        gradients: dict[str, Tensor] = {}
        if logits.requires_grad:
            theirs.set_gradient_accumulation_boundary(True)
            theirs.optimizer.loss_scale = 1.0
            # every rank has the same samples, and the engine takes the mean over ranks
            theirs.backward(build.task.loss_sum(logits, samples))
            for name, parameter in build.model.named_parameters():
                if parameter.requires_grad:
                    found = whole_gradient(parameter)
                    like = expected.gradients[name]
                    gradients[name] = torch.zeros_like(like) if found is None else found.to(like).view(like.shape)
            theirs.step()
    theirs.module.train(was_training)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    # less than fp32 is rounded anew wherever gradients are added or divided
    is_exact = build.execution.get("precision", "fp32") == "fp32"
    tolerance = tolerance_of(build.device, torch.float32) if is_exact else ROUGH
    name = type(build.model).__name__
    found_results = Results(logits.detach().cpu().to(expected.logits.dtype), gradients)
    own = beyond(name, expected, found_results, tolerance, ("sharded", "whole"))
    return next((reason for reason in world.gather(own) if reason), None)
