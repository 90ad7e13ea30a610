"""paceline's step in somebody else's loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.engine.engine import Engine
from paceline.engine.scaling import Dynamic, Unscaled
from paceline.engine.torch_engine import TorchEngine
from paceline.engine.updates import HostGated
from paceline.errors import UserError


def adopt(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_sum: Callable[[nn.Module, Any], Tensor | tuple[Tensor, Any]],
    *,
    clip_norm: float | None = None,
    loss_scaling: bool = False,
) -> Engine:
    """An engine for a loop of your own: ``accumulate`` and ``update`` in place of forward, backward and step.

    Your learning-rate scheduler, your data and your generator state stay yours. Call ``zero_grad`` no more.

    Args:
        model: any module; it stays on its device.
        optimizer: over the model's parameters.
        loss_sum: (model, batch) -> the *sum* of the batch's losses, or (sum, anything to get back).
        clip_norm: largest gradient norm.
        loss_scaling: for fp16 autocast inside ``loss_sum``.

    Returns:
        An engine. ``accumulate(batches, denominator)`` takes the micro-batches of one update and the number of
        labels in all of them; ``update()`` applies it.

    Raises:
        UserError: the optimizer holds parameters that are not the model's.

    Example:
        >>> engine = paceline.adopt(model, optimizer, lambda model, b: model(**b).loss * len(b["labels"]))
        >>> for batch in loader:
        ...     engine.accumulate([batch], denominator=len(batch["labels"]))
        ...     engine.update()
    """
    owned = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in owned for parameter in held):
        raise UserError(
            "paceline.adopt(model, optimizer, ...)",
            "the optimizer holds parameters that are not the model's",
            "make the optimizer from model.parameters(), after moving the model to its device",
        )

    def objective(batch: Any) -> tuple[Tensor, Any]:
        result = loss_sum(model, batch)
        return result if isinstance(result, tuple) else (result, None)

    return TorchEngine(
        model,
        objective,
        lambda batch: getattr(output := model(**batch), "logits", output),
        HostGated(optimizer, None),
        Dynamic(held[0].device) if loss_scaling else Unscaled(),
        clip_norm=clip_norm,
        seed=None,
    )
