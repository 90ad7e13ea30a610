"""Loss scaling: keeps small fp16 gradients from vanishing. Lives on the device; nothing is read back in a step.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; the defaults are torch.amp.GradScaler's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.optim.gradients import Gradients
from paceline.recipe.parts import LossScalePart


class LossScale(ABC):
    """What the loss is multiplied by before backward, and the gradients divided by before the update."""

    @abstractmethod
    def up(self, loss: Tensor) -> Tensor:
        """The loss that backward starts from."""

    @abstractmethod
    def down(self, value: Tensor) -> Tensor:
        """A gradient quantity with the scale taken out."""

    @abstractmethod
    def adapt(self, finite: Tensor) -> None:
        """Shrink after a non-finite gradient, grow after many finite ones."""

    def told(self, gradients: Gradients) -> tuple[Tensor, ...]:
        """What a step tells of it, before ``adapt``: the scale, and ``Gradients.zero_share``; nothing without one."""
        return ()

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Take up a saved state, in place."""


@final
class Unscaled(LossScale):
    """fp32, tf32 and bf16: their range is wide enough."""

    def up(self, loss: Tensor) -> Tensor:
        return loss

    def down(self, value: Tensor) -> Tensor:
        return value

    def adapt(self, finite: Tensor) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


@final
class Dynamic(LossScale):
    """fp16: halves when gradients overflow, doubles after 2,000 good steps, unless ``part`` says otherwise.

    Args:
        device: of the gradients.
        part: the first scale, the factors and the interval.
        tables: embeddings, most of whose gradients are 0 at every step, since few of their rows are used.
    """

    def __init__(
        self,
        device: torch.device,
        part: LossScalePart = LossScalePart(),  # noqa: B008 (frozen)
        tables: Collection[nn.Parameter] = (),
    ) -> None:
        self._part, self._tables = part, tuple(tables)
        self._scale = torch.full((), part.init_scale, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def up(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    def down(self, value: Tensor) -> Tensor:
        return value / self._scale

    def adapt(self, finite: Tensor) -> None:
        found_inf = (~finite).float()
        part = self._part
        torch._amp_update_scale_(
            self._scale, self._good_steps, found_inf, part.growth_factor, part.backoff_factor, part.growth_interval
        )

    def told(self, gradients: Gradients) -> tuple[Tensor, ...]:
        share = gradients.zero_share(self._tables)
        return (self._scale.clone(),) if share is None else (self._scale.clone(), share)

    def state(self) -> dict[str, Any]:
        return {"scale": float(self._scale), "good_steps": int(self._good_steps)}

    def load(self, state: dict[str, Any]) -> None:
        self._scale.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])
