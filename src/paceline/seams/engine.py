"""What a loop needs of an engine, and what an engine may offer beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from paceline.seams.batch import Batch, Ids

Tensors = dict[str, dict[str, Tensor]]
"""Checkpoint files' stems -> named tensors."""


@dataclass(frozen=True)
class Mix:
    """How the images of a step are mixed in pairs."""

    share: float
    """How much of a sample is its own, of its loss too."""
    box: tuple[int, int, int, int] | None = None
    """Rows from, to; columns from, to: what is the partner's. None: every pixel is the weighted mean of both."""


@dataclass(frozen=True)
class StepInput:
    """What one rank does of a step."""

    step: int
    """The run's updates before this one; seeds dropout and augmentation."""
    microbatches: tuple[Ids, ...]
    """Samples of each forward pass, equally many passes on all ranks; one without samples is run on filler."""
    denominator: float
    """Label count of the global batch; with class weights, the sum of its labels' weights."""
    widths: tuple[int | None, ...] = ()
    """Positions that each micro-batch is filled up to; None, or no entry: as wide as it is by itself."""
    same_shapes: bool = True
    """Whether the micro-batches of all ranks have the same shapes: where ranks meet within a pass, it can be captured
    only then. The same on all ranks."""

    mix: Mix | None = None
    """How its images are mixed; None: they are not."""
    partners: tuple[Ids, ...] = ()
    """With ``mix``: whom the samples of each micro-batch are mixed with."""

    def width(self, index: int) -> int | None:
        """What micro-batch number ``index`` is filled up to."""
        return self.widths[index] if self.widths else None


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
    loss_scale: Tensor | None = None
    """Scalar: what the loss was multiplied by; None without fp16's loss scaling."""
    zero_share: Tensor | None = None
    """Scalar: share of the gradients that are exactly 0, embeddings left out; None where nobody counts."""


class Engine(ABC):
    """Owns model, gradients and optimizer. Whoever splits work over ranks or devices hides it behind these verbs."""

    @abstractmethod
    def accumulate(self, given: StepInput) -> Accumulated:
        """Forward and backward of every micro-batch of a step; gradients add up.

        Raises:
            UserError: called twice before an update, where ranks have summed the gradients already.
        """

    @abstractmethod
    def update(self) -> Update:
        """Clip, change the weights, forget the gradients.

        Raises:
            UserError: nothing was accumulated since the last update, or someone took a gradient away.
        """

    @abstractmethod
    def infer(self, batch: Batch) -> Tensor:
        """Logits of a batch in evaluation mode, without gradients."""

    @abstractmethod
    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Everything that the rest of the run depends on: whole tensors, on the first rank alone where they are split
        over ranks, and plain data for JSON. A collective."""

    @abstractmethod
    def load(self, tensors: Tensors, state: Mapping[str, Any] | None = None) -> None:
        """Take up a saved state by copying in place.

        Args:
            tensors: whole, on every rank.
            state: None: only weights and buffers (``tensors["model"]``), such as those of the best step, and their
                average (``tensors["ema"]``) where one is kept.

        Raises:
            CheckpointError: names or shapes differ from this engine's.
        """

    @abstractmethod
    def whole(self) -> dict[str, Tensor]:
        """The model's weights and buffers by their plain names, on the first rank alone where they are split over
        ranks. A collective."""

    @abstractmethod
    def close(self) -> None:
        """Release what outlives a Python object: graphs, streams, process groups."""

    def warm_up(self, given: StepInput) -> None:  # noqa: B027 - an engine may have nothing to warm up
        """Forward and backward of a real micro-batch without any consequence: kernels are compiled and loaded."""

    def settle(self) -> None:  # noqa: B027 - most models have nothing that ranks disagree about
        """Give all ranks the mean of their running statistics; all call it, before evaluations and checkpoints."""

    def averaged(self) -> AbstractContextManager[None] | None:
        """Inside, the weights are their moving average; None where none is kept."""
        return None

    def take_average(self) -> None:  # noqa: B027 - most engines keep none
        """The weights become their average for good, where one is kept."""

    @property
    def execution(self) -> Mapping[str, str]:
        """How steps are carried out, with the reason where it is not the fastest way; adds to ``Build.execution``."""
        return {}


@runtime_checkable
class Capturing(Protocol):
    """An engine that captures its steps as CUDA graphs."""

    def eager(self) -> AbstractContextManager[None]:
        """Inside, steps are run kernel by kernel also where they are captured, for who watches the host."""

    @property
    def replays(self) -> bool:
        """Whether steps are replayed by now."""


@runtime_checkable
class Retrying(Protocol):
    """An engine whose step can be made again after it ran out of memory."""

    def mark(self) -> Callable[[], None]:
        """Remember what ``accumulate`` and ``warm_up`` change; what is returned goes back there, on all ranks.

        The step's gradients are then forgotten, and memory that is only kept for later is given back: graphs, and what
        torch caches.
        """

    def catch_up(self, error: BaseException) -> None:
        """Take part in the all-reduce that the other ranks wait in, after ``accumulate`` or ``warm_up`` failed on this
        one.

        What they add up to is worth nothing: all ranks go back to their ``mark`` then.

        Raises:
            BaseException: ``error`` itself, where some of the step's all-reduce had begun on this rank.
        """


@runtime_checkable
class Weighed(Protocol):
    """An engine that knows what it holds."""

    def held(self) -> Mapping[str, int]:
        """Bytes on the device that live from step to step, by kind: parameters, gradients, optimizer states, the
        weights' average."""
