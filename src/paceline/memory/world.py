"""The other ranks of a run that is only planned: they agree to everything and send nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch.distributed as dist
from torch import Tensor

from paceline.seams import Link, World


def planned_world(size: int) -> World:
    """The first of ``size`` ranks, in torch's own process group of ranks that are not there; once a process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    return PlannedWorld(size)


@final
class PlannedWorld(World):
    """Rank 0 of some that are not there; what is summed or shared stays as it is."""

    rank, local_rank = 0, 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        return lambda: None

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def share(self, value: Any) -> Any:
        return value

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self, what: str) -> None:
        pass

    def alone_first(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def links(self, number: int) -> list[Link]:
        return [_PlannedLink()] * number

    def _opened(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> World:
        return PlannedWorld(len(own))


@final
class _PlannedLink(Link):
    """Nothing is sent, and what is received stays as it is."""

    def start_send(self, tensor: Tensor, to: int) -> Callable[[], None]:
        return lambda: None

    def receive_(self, tensor: Tensor, source: int) -> Tensor:
        return tensor
