"""The processes of a run, as one of them sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor


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
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Add up a tensor of one shape over all ranks, in place, on its own device; returns it."""

    @abstractmethod
    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin ``all_reduce`` beside what the device does next; call what is returned before the sum is used.

        On a GPU the call makes the device wait, not the host.
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

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
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


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run along the axes that split its work; an axis that splits nothing has one rank.

    Samples, their seeds, sums of losses and evaluations are split over ``data``. Along the other axes ranks work on the
    same samples.
    """

    data: World = field(default_factory=Alone)
    tensor: World = field(default_factory=Alone)
    pipe: World = field(default_factory=Alone)
