"""Host arrays on their way to the device: pinned, sent without waiting, and gathered ahead by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.contract.spans import span
from paceline.machine.device import PLANNED
from paceline.seams import Ids

Arrays = Mapping[str, NDArray[Any]]
Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name -> shape and dtype of an array."""

IN_FLIGHT = 2
"""Micro-batches gathered ahead at once: one that is ready and one that is being filled."""


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of ``array`` on ``device``; through pinned memory, without waiting, where the device has its own."""
    if device.type == PLANNED:
        return torch.empty(array.shape, dtype=torch_dtype(array), device=device)
    buffer = _buffer(array.shape, torch_dtype(array), device)
    buffer.numpy()[...] = array
    return buffer.to(device, non_blocking=True)


def torch_dtype(array: NDArray[Any]) -> torch.dtype:
    """The torch dtype of a numpy array's numbers."""
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype


@dataclass(frozen=True)
class _Ahead:
    ids: Ids
    buffers: dict[str, Tensor]
    filled: Future[None]


@final
class ReadAhead:
    """Gathers micro-batches from host arrays, those that are expected in one worker thread.

    Memory is allocated and sent by the thread that calls; the worker runs numpy alone. So nothing of it can break
    into a CUDA graph that is being captured meanwhile.

    Args:
        shapes: ids -> the arrays of their micro-batch; quick.
        fill: gathers the micro-batch into arrays of these shapes; numpy only, called from either thread.
        device: where the arrays are sent.
        threaded: whether ``expect`` has an effect. On a CPU the thread would take cores from the model.
    """

    def __init__(
        self,
        shapes: Callable[[Ids], Shapes],
        fill: Callable[[Ids, Arrays], None],
        device: torch.device,
        *,
        threaded: bool,
    ) -> None:
        self._shapes, self._fill, self._device = shapes, fill, device
        self._worker = ThreadPoolExecutor(1, "paceline-read-ahead") if threaded else None
        self._coming: deque[Ids] = deque()
        self._ahead: deque[_Ahead] = deque()

    def expect(self, ids: Sequence[Ids]) -> None:
        """Begin to gather these micro-batches, in this order; replaces what was expected before."""
        if self._worker is None:
            return
        self._ahead = deque(one for one in self._ahead if any(_same(one.ids, each) for each in ids))
        self._coming = deque(each for each in ids if not any(_same(one.ids, each) for one in self._ahead))
        self._start()

    def take(self, ids: Ids) -> dict[str, Tensor]:
        """The micro-batch on the device. Whatever went wrong in the worker is raised here."""
        if self._device.type == PLANNED:
            shapes = self._shapes(ids).items()
            return {name: torch.empty(shape, dtype=dtype, device=self._device) for name, (shape, dtype) in shapes}
        place = next((place for place, one in enumerate(self._ahead) if _same(one.ids, ids)), None)
        if place is None:
            buffers = self._allocate(ids)
            self._fill(ids, _arrays(buffers))
        else:
            for _ in range(place):  # passed over: no longer expected
                self._ahead.popleft()
            found = self._ahead.popleft()
            self._start()
            found.filled.result()
            buffers = found.buffers
        with span("copy"):
            return {name: buffer.to(self._device, non_blocking=True) for name, buffer in buffers.items()}

    def close(self) -> None:
        """End the thread; afterwards nothing is read ahead. May be called twice."""
        self._coming.clear()
        self._ahead.clear()
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
            self._worker = None

    def _start(self) -> None:
        while self._worker is not None and self._coming and len(self._ahead) < IN_FLIGHT:
            ids = self._coming.popleft()
            buffers = self._allocate(ids)
            self._ahead.append(_Ahead(ids, buffers, self._worker.submit(self._fill, ids, _arrays(buffers))))

    def _allocate(self, ids: Ids) -> dict[str, Tensor]:
        return {name: _buffer(shape, dtype, self._device) for name, (shape, dtype) in self._shapes(ids).items()}


def _same(one: Ids, other: Ids) -> bool:
    return one is other or np.array_equal(one, other)


def _buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # pinned where the device has memory of its own, so that a copy to it need not wait; torch keeps such memory for
    # the next batch, and from being used again until the copy is done
    return torch.empty(shape, dtype=dtype, pin_memory=device.type != "cpu")


def _arrays(buffers: Mapping[str, Tensor]) -> Arrays:
    return {name: buffer.numpy() for name, buffer in buffers.items()}
