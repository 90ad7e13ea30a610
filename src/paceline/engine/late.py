"""Numbers that leave the device when they are ready, so that no step waits for the one before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Note = TypeVar("Note")


class Late(Generic[Note]):
    """A queue of device scalars, each with a note; they come out in order, at the latest on ``flush``.

    On CUDA the copy goes to pinned memory behind the work that makes the numbers, and an event tells when it is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._waiting: deque[tuple[Note, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, note: Note, scalars: Sequence[Tensor]) -> None:
        """Queue scalars of any number format."""
        # every launch counts in a short step, so that numbers are only widened where one of them is
        wide = torch.float64 if any(scalar.dtype == torch.float64 for scalar in scalars) else torch.float32
        stacked = torch.stack([scalar.detach().to(wide) for scalar in scalars])
        if not self._cuda:
            self._waiting.append((note, stacked, None))
            return
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((note, host, event))

    def ready(self, most: int | None = None) -> Iterator[tuple[Note, list[float]]]:
        """Those that have arrived. Waits only while more than ``most`` are under way; None: never."""
        while self._waiting:
            note, values, event = self._waiting[0]
            if event is not None and not event.query():
                if most is None or len(self._waiting) <= most:
                    return
                event.synchronize()
            self._waiting.popleft()
            yield note, values.tolist()

    def flush(self) -> Iterator[tuple[Note, list[float]]]:
        """All of them, waiting as needed."""
        while self._waiting:
            note, values, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield note, values.tolist()
