"""The processes of a run, as one of them sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from torch import Tensor


class Link(ABC):
    """A way of messages between the ranks of a world: each receives in the order in which another has sent to it.

    One way carries messages of one kind and direction, so that no message waits for one that its receiver asks for
    later.
    """

    @abstractmethod
    def start_send(self, tensor: Tensor, to: int) -> Callable[[], None]:
        """Begin to send a tensor to a rank of the world; what is returned waits until it has gone.

        Until then nobody writes to it.
        """

    @abstractmethod
    def receive_(self, tensor: Tensor, source: int) -> Tensor:
        """Fill a tensor with what a rank sends, of its shape and type, on its own device; returns it.

        On a GPU the call makes the device wait, not the host.
        """


class World(ABC):
    """The processes of a run as one of them sees them. Where a method does not say otherwise, it is a collective: all
    ranks call it, in the same order, and it returns when all of them have.

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

    def at(self, what: str) -> AbstractContextManager[None]:
        """Inside, this rank does something of its own, which ranks that wait for it in vain are told; no collective.

        Args:
            what: it does, such as ``saving a checkpoint``.
        """
        return nullcontext()

    def announce(self, error: BaseException) -> bool:
        """Let every rank that waits for this one, which will not come, fail with its error; no collective.

        May be called beside the thread that the others wait for.

        Returns:
            Whether there is anybody to tell; one that is alone has nobody, and worlds of tests tell nothing.
        """
        return False

    def part(self, groups: Sequence[Sequence[int]]) -> World:
        """The ranks of this one's group, counted from 0 in the order given there. A collective.

        Tensors, values and ``share`` stay within the group. What is asked of ``any``, waited for or done first on a
        machine is asked, waited for and done by all ranks of the run, for that is what hangs when it is not.

        Args:
            groups: every rank of this world, each in one group.
        """
        own = next(ranks for ranks in groups if self.rank in ranks)
        if len(own) == 1:
            return Alone()
        if list(own) == list(range(self.size)):
            return self
        return self._opened(groups, own)

    def links(self, number: int) -> list[Link]:
        """So many ways of messages between these ranks. A collective, which all ranks of the run call, once a run."""
        # worlds of tests send nothing
        raise NotImplementedError(f"{type(self).__name__} has no links")

    def _opened(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> World:
        """``part``, where the group is neither one rank nor all."""
        # worlds of tests are never cut
        raise NotImplementedError(f"{type(self).__name__} has no groups")


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
    same samples. Neighbours in ``tensor``, which talk most, are neighbours in ``whole``; then come those in ``pipe``.
    """

    whole: World = field(default_factory=Alone)
    """All ranks of the run, the first of which writes."""
    data: World = field(default_factory=Alone)
    tensor: World = field(default_factory=Alone)
    pipe: World = field(default_factory=Alone)

    @classmethod
    def over(cls, whole: World, *, tensor: int = 1, pipe: int = 1) -> Mesh:
        """The mesh of some ranks. A collective, once a run.

        Args:
            whole: all of them; as many as ``tensor * pipe`` times a whole number.
        """
        ranks = np.arange(whole.size).reshape(-1, pipe, tensor)
        along = (np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis]).tolist() for axis in range(3))
        data, piped, sliced = (whole.part(groups) for groups in along)
        return cls(whole=whole, data=data, tensor=sliced, pipe=piped)
