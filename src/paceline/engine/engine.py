"""What a loop needs of an engine: two verbs for training, one for inference, and its state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Tensors = dict[str, dict[str, Tensor]]
"""Checkpoint files' stems -> named tensors."""


@dataclass(frozen=True)
class Accumulated:
    """What the forward passes of a step gave, still on the device."""

    loss: Tensor
    """Scalar: this rank's share of the mean loss over the global batch."""
    extras: tuple[Any, ...]
    """What the objective handed back beside the loss, one a micro-batch."""


@dataclass(frozen=True)
class Update:
    """What became of a step, still on the device."""

    norm: Tensor
    """Scalar: global gradient norm before clipping."""
    finite: Tensor
    """Bool scalar: whether the update was made."""


class Engine(ABC):
    """Owns model, gradients and optimizer. Whoever splits work over ranks or devices hides it behind these verbs."""

    @abstractmethod
    def warm_up(self, batch: Any, denominator: float, *, alike: bool = True) -> None:
        """Forward and backward of a real micro-batch without any consequence: kernels are compiled and loaded.

        Args:
            alike: as in ``accumulate``.
        """

    @abstractmethod
    def accumulate(
        self,
        batches: Iterable[Any],
        denominator: float,
        *,
        step: int = 0,
        alike: bool = True,
    ) -> Accumulated:
        """Forward and backward of every micro-batch; gradients add up.

        Args:
            batches: micro-batches, built one at a time as they are needed.
            denominator: label count of the global batch.
            step: the run's updates so far; seeds dropout.
            alike: whether the micro-batches of all ranks have the same shapes; where ranks meet within a pass, it is
                recorded then only. The same on all ranks.
        """

    @abstractmethod
    def update(self) -> Update:
        """Clip, change the weights, forget the gradients.

        Raises:
            UserError: nothing was accumulated since the last update, or someone took a gradient away.
        """

    @abstractmethod
    def mark(self) -> Callable[[], None]:
        """Remember what ``accumulate`` and ``warm_up`` change; what is returned goes back there, on all ranks.

        The step's gradients are then forgotten, and memory that is only kept for later is given back: graphs, and what
        torch caches.
        """

    @abstractmethod
    def catch_up(self, error: BaseException) -> None:
        """Take part in the sums that the other ranks wait in, after ``accumulate`` or ``warm_up`` failed on this one.

        What they add up to is worth nothing: all ranks go back to their ``mark`` then.

        Raises:
            BaseException: ``error`` itself, where some of the step's sums had begun on this rank.
        """

    @abstractmethod
    def held(self) -> Mapping[str, int]:
        """Bytes on the device that live from step to step, by kind: parameters, gradients, optimizer states."""

    @abstractmethod
    def infer(self, batch: Any) -> Tensor:
        """Logits of a batch in evaluation mode, without gradients."""

    @abstractmethod
    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Everything that the rest of the run depends on: tensors, and plain data for JSON."""

    @abstractmethod
    def load(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Take up a saved state by copying in place.

        Raises:
            CheckpointError: names or shapes differ from this engine's.
        """

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take up weights and buffers alone, by copying in place: the best model at the end of a run.

        Raises:
            CheckpointError: names or shapes differ from this engine's.
        """

    @abstractmethod
    def export(self) -> dict[str, Tensor]:
        """The model's weights and buffers by their plain names."""

    @abstractmethod
    def settle(self) -> None:
        """Give all ranks the mean of their running statistics; all call it, before evaluations and checkpoints."""

    @abstractmethod
    def launching(self) -> AbstractContextManager[None]:
        """Inside, steps are launched kernel by kernel also where they are recorded, for who watches the host."""

    @property
    @abstractmethod
    def replays(self) -> bool:
        """Whether steps are replayed from recordings by now."""

    @property
    @abstractmethod
    def path(self) -> Mapping[str, str]:
        """How steps are carried out, with the reason where it is not the fastest way; adds to ``Build.path``."""

    @abstractmethod
    def close(self) -> None:
        """Release what outlives a Python object: graphs, streams, process groups."""
