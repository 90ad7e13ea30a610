"""A run put together, before it has an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from paceline.contract.records import Decision
from paceline.seams.batch import Batch
from paceline.seams.layout import Layout
from paceline.seams.task import Task

Forward = Callable[[nn.Module, Batch], Tensor]
"""Model and batch to logits: [S, C]."""


class LayoutKind(Enum):
    """How the samples of a batch stand in its tensors."""

    PADDED = "padded"
    PACKED = "packed"
    IMAGES = "images"


@dataclass(frozen=True, kw_only=True)
class Build:
    """A run put together, ready for an engine; techniques turn one build into another."""

    model: nn.Module
    forward: Forward
    layout: Layout
    layout_kind: LayoutKind = LayoutKind.PADDED
    task: Task
    device: torch.device
    blocks: Sequence[nn.Module] = ()
    """The model's repeated blocks: where recompute, compile and sharding take hold."""
    loss_scaling: bool = False
    """fp16: multiply the loss by a scale that adapts, so that small gradients do not vanish."""
    decisions: tuple[Decision, ...] = ()
    """What was chosen while it was put together, with reasons."""
    notices: tuple[str, ...] = ()
    """What a person should know of this model and these data."""
    undecayed: frozenset[str] = frozenset()
    """Names of trained weights that the loss never reaches: no weight decay moves them either."""
    meets_in_forward: bool = False
    """Whether ranks meet within forward and backward passes, so that none can run one by itself."""
    execution: Mapping[str, str] = field(default_factory=dict)
    """How the steps are carried out, for people: a word or reason a stage (``layout``, ``attention``, ...)."""

    own_forwards: Mapping[str, Any] = field(default_factory=dict)
    """Module name -> the forward pass that the model itself came with on the instance, before any technique."""

    def close(self) -> None:
        """Close the layout, and take away the forward passes that techniques have put on the model's modules.

        Each holds its own module: a circle, which would keep weights and gradients until the garbage collector comes.
        """
        self.layout.close()
        for name, module in self.model.named_modules():
            vars(module).pop("forward", None)
            if name in self.own_forwards:
                vars(module)["forward"] = self.own_forwards[name]

    def carried_out(self, **stages: str) -> Build:
        """With words or reasons for these stages."""
        return replace(self, execution={**self.execution, **stages})

    def decided(self, setting: str, value: bool, reason: str) -> Build:
        """With a decision more."""
        decision = Decision(setting=setting, value=str(value).lower(), reason=reason)
        return replace(self, decisions=(*self.decisions, decision))
