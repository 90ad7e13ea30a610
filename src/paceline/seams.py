"""The interfaces that rooms are built to: batch, task, layout, build, world. Torch, and of ours only the contract.

Shapes: S samples of a micro-batch, L padded length, T positions of a packed row, P sequences in it, C classes or
channels, H height, W width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree

from paceline.records import Decision

Ids = NDArray[np.int64]
"""Sample ids: positions in the dataset."""


@dataclass(frozen=True)
class Packed:
    """Where the sequences of a packed row are. Only ``max_length`` is known on the host; the rest is data."""

    cu_seqlens: Tensor
    """int32 [P + 1]: sequence p is positions ``cu_seqlens[p]:cu_seqlens[p + 1]``. They cover the whole row, filler
    included; sequences of length 0 stand at the end."""
    sequence: Tensor
    """int64 [S]: which sequence each sample is."""
    max_length: int
    """No sequence is longer."""

    @property
    def first(self) -> Tensor:
        """int64 [S]: position of each sample's first token."""
        return self.cu_seqlens.index_select(0, self.sequence).long()


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device, and a pytree; the engine passes it on without looking inside."""

    inputs: Mapping[str, Tensor]
    """Keyword arguments of the model: input_ids [S, L], attention_mask [S, L], ...; packed, input_ids [1, T],
    position_ids [1, T], ...; or pixel_values [S, C, H, W]."""
    labels: Tensor
    """[S] int64 classes, [S] fp32 targets, or [S, C] fp32 of 0 and 1."""
    weights: Tensor
    """[S] fp32; 0 marks filler. A batch of nothing but filler is legal and contributes nothing."""
    packed: Packed | None = None
    """Set when the samples stand one after the other in one row."""


_pytree.register_pytree_node(
    Packed,
    lambda packed: ([packed.cu_seqlens, packed.sequence], packed.max_length),
    lambda leaves, longest: Packed(*leaves, max_length=longest),  # type: ignore[misc]
)
_pytree.register_pytree_node(
    Batch,
    # None would be a leaf of its own
    lambda b: ([dict(b.inputs), b.labels, b.weights, *([b.packed] if b.packed else [])], None),
    lambda children, _: Batch(*children),
)


@dataclass(frozen=True)
class Size:
    """How much work a micro-batch is: real tokens, and positions computed with padding."""

    samples: int
    tokens: int
    slots: int


class Meter(ABC):
    """Sums up predictions over a split; in bounded memory, but for metrics that need all scores."""

    @abstractmethod
    def update(self, logits: Tensor, batch: Batch) -> None:
        """Take in one batch; filler is left out."""

    @abstractmethod
    def merge(self, world: World, places: Sequence[int]) -> None:
        """Put together what the ranks took in; called by all of them, once, after the last batch.

        The first rank's meter is then, to the bit, that of one process which took in all batches in the order of the
        split; what the others' ``compute`` returns has no meaning.

        Args:
            places: of each batch taken in here, in the order of updates, its place among the split's batches.
        """

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Loss and metrics by name."""

    @abstractmethod
    def confusion(self) -> tuple[tuple[int, ...], ...] | None:
        """Counts [true][predicted], for single-label tasks of few classes."""


class Task(ABC):
    """What is learned. Losses are sums, so that any split of a batch adds up to the same gradient."""

    kind: str
    label_names: tuple[str, ...]

    @abstractmethod
    def count(self, labels: NDArray[Any]) -> int:
        """Number of labels that the loss of these samples is divided by; known on the host before the step."""

    @abstractmethod
    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """fp32 scalar: the weighted sum of the samples' losses; never a mean."""

    @abstractmethod
    def correct(self, logits: Tensor, batch: Batch) -> Tensor:
        """fp32 scalar: number of right predictions, from the logits of the training forward pass."""

    @abstractmethod
    def probabilities(self, logits: Tensor) -> Tensor:
        """fp32 [S, C]: what ``predict`` reports; the value itself for regression, [S, 1]."""

    @abstractmethod
    def meter(self, device: torch.device) -> Meter:
        """A fresh sum of this task's metrics."""

    @property
    @abstractmethod
    def metric_names(self) -> tuple[str, ...]:
        """What ``meter`` reports, ``loss`` included."""

    @property
    @abstractmethod
    def best_metric(self) -> str:
        """The metric that tells the best model; a leading '-' means lower is better."""

    @property
    def num_outputs(self) -> int:
        """Width of the logits."""
        return max(1, len(self.label_names))


class Layout(ABC):
    """How samples become batches on the device."""

    @abstractmethod
    def collate(self, ids: Ids, draw: int | None = None, *, slots: int | None = None) -> Batch:
        """The micro-batch of these samples, in the order of ``ids``.

        Args:
            draw: seed of random augmentation; None: none, as in every evaluation.
            slots: positions to make it as wide as, at most ``widens_by`` more than it has by itself.
        """

    @abstractmethod
    def over(self, inputs: Any, labels: NDArray[Any]) -> Layout:
        """The same layout of other samples of the same kind, read on the host."""

    widens_by: int = 0
    """Positions of filler that a micro-batch can be given to be shaped like another rank's; those of a width that is
    asked for have all their shapes by their samples' number and that width."""

    reads_ahead: bool = False
    """Whether ``expect`` has any use."""

    def expect(self, ids: Sequence[Ids]) -> None:  # noqa: B027 - a hint that most layouts have no use for
        """Told which micro-batches come next, so that a layout which reads from the host can read ahead."""

    def close(self) -> None:  # noqa: B027
        """Release threads and pinned memory."""

    @abstractmethod
    def size(self, ids: Ids) -> Size:
        """Its size, without building it."""

    @abstractmethod
    def sorted(self, ids: Ids) -> Ids:
        """The ids in an order that wastes little; for evaluation, where order changes nothing."""


Forward = Callable[[nn.Module, Batch], Tensor]
"""Model and batch to logits: [S, C]."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """A run put together, ready for an engine; techniques turn one build into another."""

    model: nn.Module
    forward: Forward
    layout: Layout
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
    path: Mapping[str, str] = field(default_factory=dict)
    """The path that the steps take, a word or reason a stage: ``layout``, ``attention``, ``compile``, ``data``, ..."""


class World(ABC):
    """The processes of a run as one of them sees them. Every method but ``alone_first`` is a collective: all ranks call
    it, in the same order, and it returns when all of them have.

    Values are small and plain (what JSON holds); tensors go through the engine's own collectives.
    """

    rank: int
    size: int
    local_rank: int
    """Rank among the processes of this machine."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that writes and draws."""
        return self.rank == 0

    @abstractmethod
    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up a tensor of one shape over all ranks, in place, on its own device; returns it."""

    @abstractmethod
    def start_sum_(self, tensor: Tensor) -> Callable[[], None]:
        """Begin ``sum_`` beside what the device does next; call what is returned before the sum is used.

        On a card the call makes the device wait, not the host.
        """

    @abstractmethod
    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the tensors of rank 0, in place."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, in rank order, on every rank."""

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank; the others' is not looked at."""

    @abstractmethod
    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""

    @abstractmethod
    def barrier(self, what: str) -> None:
        """Wait until all ranks are here.

        Args:
            what: that is waited for; named when a rank never arrives.
        """

    @abstractmethod
    def alone_first(self, what: str) -> AbstractContextManager[None]:
        """Inside, the first rank of each machine runs before its others: it downloads and fills caches, they read.

        Args:
            what: is being done; named when the first rank fails.
        """


@final
class Alone(World):
    """A run of one process."""

    rank, size, local_rank = 0, 1, 0

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor

    def start_sum_(self, tensor: Tensor) -> Callable[[], None]:
        return lambda: None

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def share(self, value: Any) -> Any:
        return value

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self, what: str) -> None:
        pass

    def alone_first(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()
