"""Ranks that are threads of this process, one running at a time: what they tell one another, without processes."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor

from paceline.seams import World

DEADLINE = 20.0
"""Seconds after which a rank that waits alone gives up."""


class _Table:
    """What the ranks lay down for one another."""

    def __init__(self, size: int) -> None:
        self.laid: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=DEADLINE)
        self.turn = threading.Lock()
        """Held by the rank that runs: filters of warnings, for one, belong to all threads of a process."""


@final
class ThreadWorld(World):
    """One of several ranks; notes the bytes of every tensor that it sends."""

    def __init__(self, table: _Table, rank: int) -> None:
        self._table, self.rank, self.size, self.local_rank = table, rank, len(table.laid), rank
        self.sent: list[int] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sent.append(tensor.nbytes)
        everybodys = self._exchange(tensor.clone())
        assert len({each.dtype for each in everybodys}) == 1, "ranks add up different dtypes"
        return tensor.copy_(torch.stack(everybodys).sum(0).to(tensor.dtype))

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        raise NotImplementedError

    def gather(self, value: Any) -> list[Any]:
        return self._exchange(json.loads(json.dumps(value)))  # plain values alone

    def share(self, value: Any) -> Any:
        return self.gather(value if self.is_first else None)[0]

    def any(self, flag: bool) -> bool:
        return any(self.gather(flag))

    def barrier(self, what: str) -> None:
        self._exchange(None)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        raise NotImplementedError

    def alone_first(self, what: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _exchange(self, value: Any) -> list[Any]:
        self._table.laid[self.rank] = value
        self._meet()
        everybodys = copy.copy(self._table.laid)
        self._meet()
        return everybodys

    def _meet(self) -> None:
        self._table.turn.release()
        try:
            self._table.barrier.wait()
        finally:
            self._table.turn.acquire()


def on_ranks(size: int, function: Callable[[ThreadWorld], Any]) -> list[Any]:
    """What ``function`` returns on each of ``size`` ranks; raises the first failure that is no vain wait for others."""
    table = _Table(size)

    def one(rank: int) -> Any:
        with table.turn:
            try:
                return function(ThreadWorld(table, rank))
            except BaseException:
                table.barrier.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]
