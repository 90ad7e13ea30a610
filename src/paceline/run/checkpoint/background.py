"""Checkpoints written beside the training: the run waits for a copy in memory, not for the disk."""

from __future__ import annotations

import contextlib
import copy
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from paceline.contract.errors import UserError
from paceline.contract.records import CheckpointRecord
from paceline.contract.stopwatch import Stopwatch
from paceline.run.checkpoint.store import Checkpoint, CheckpointStore

Tensors = Mapping[str, Mapping[str, Tensor]]
"""File stem -> tensors by name."""


class Store(ABC):
    """Where a run's checkpoints go."""

    @abstractmethod
    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any], *, is_best: bool = False) -> None:
        """Have a checkpoint saved; its record comes out of ``committed``.

        Afterwards the tensors may change at once.

        Args:
            step: the update after which the state was taken.
            tensors: file stem (``model``, ``optimizer``) -> tensors by name.
            state: everything else, as JSON.
            is_best: ``best`` gives this one from then on.
        """

    @abstractmethod
    def committed(self) -> list[CheckpointRecord]:
        """The checkpoints committed since the last call, in order; never waits. To be called at every step bound."""

    @abstractmethod
    def wait(self) -> None:
        """Return once every checkpoint asked for is committed."""

    @abstractmethod
    def best(self) -> Checkpoint | None:
        """The best checkpoint, once all are committed."""

    @abstractmethod
    def move(self, folder: Path) -> None:
        """Save into ``folder`` from now on; a save under way that fails, for the folder before is gone, is let go."""

    @abstractmethod
    def close(self) -> None:
        """See a save through that is under way; for the way out, also after an error."""


@final
class ElsewhereStore(Store):
    """The store of a rank that does not write: another one does."""

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any], *, is_best: bool = False) -> None:
        pass

    def committed(self) -> list[CheckpointRecord]:
        return []

    def wait(self) -> None:
        pass

    def best(self) -> Checkpoint | None:
        return None

    def move(self, folder: Path) -> None:
        pass

    def close(self) -> None:
        pass


@final
class BackgroundStore(Store):
    """Saves into a store on a thread of its own, at most one checkpoint at a time, in order.

    What was asked for is on the disk once ``wait`` has returned or ``committed`` has told of it, and never by half:
    the store's own protocol holds, so that a kill at any moment leaves the checkpoint before it. Of the tensors a copy
    is kept in main memory (pinned where they are on a GPU), as large as a checkpoint, from the first save on.

    Every method is called from one thread. What goes wrong while writing is raised there, once, by the next call of
    any method but ``move`` and ``close``.

    Args:
        store: writes, and drops what is no longer needed.
        watch: told how long that takes, as overlapped seconds of the phase ``checkpoint``.

    Raises, from all methods but ``close``, for the checkpoint before:
        DiskFullError: too little room; older checkpoints are intact.
        RunFolderError: the folder cannot be written.
        CheckpointError: the disk failed.
    """

    def __init__(self, store: CheckpointStore, watch: Stopwatch | None = None) -> None:
        self._store, self._watch = store, watch or Stopwatch()
        self._worker = ThreadPoolExecutor(1, "paceline-checkpoint")
        self._snapshot = _Snapshot()
        self._in_flight: Future[CheckpointRecord] | None = None
        self._committed: deque[CheckpointRecord] = deque()

    @property
    def store(self) -> CheckpointStore:
        """The store that is written to; ``wait`` before reading from it."""
        return self._store

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any], *, is_best: bool = False) -> None:
        """As of the base. A save before it is waited for; on a CPU the tensors are copied at once, on a GPU the copy
        stands in the current stream before whatever changes them.
        """
        self.wait()
        kept, arrived = self._snapshot.take(tensors)
        content = copy.deepcopy(dict(state))
        self._in_flight = self._worker.submit(self._write, step, kept, arrived, content, is_best)

    def committed(self) -> list[CheckpointRecord]:
        if self._in_flight is not None and self._in_flight.done():
            self.wait()
        records = list(self._committed)
        self._committed.clear()
        return records

    def wait(self) -> None:
        if self._in_flight is not None:
            future, self._in_flight = self._in_flight, None
            try:
                self._committed.append(future.result())
            except BaseException:
                if not future.done():  # a signal, not the writer: there is still something to wait for
                    self._in_flight = future
                raise

    def best(self) -> Checkpoint | None:
        self.wait()
        return self._store.best()

    def move(self, folder: Path) -> None:
        with contextlib.suppress(UserError):
            self.wait()
        self._store.folder = folder

    def close(self) -> None:
        """As of the base; the thread ends, and a failure that nobody asked about any more becomes a warning."""
        self._worker.shutdown(wait=True)
        try:
            self.wait()
        except Exception as error:
            warnings.warn(f"{self._store.folder}: the last checkpoint was not saved: {error}", stacklevel=2)
        self._snapshot = _Snapshot()

    def _write(
        self, step: int, tensors: Tensors, arrived: torch.cuda.Event | None, state: Mapping[str, Any], is_best: bool
    ) -> CheckpointRecord:
        with self._watch.phase("checkpoint"):
            if arrived is not None:
                arrived.synchronize()
            return self._store.save(step, tensors, state, is_best=is_best)


@final
class _Snapshot:
    """Copies of tensors in main memory, which is taken once and used again by every later copy of the same shapes."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def take(self, tensors: Tensors) -> tuple[Tensors, torch.cuda.Event | None]:
        """The copies, and the event after which they are whole (None: they are)."""
        used: dict[tuple[str, str], Tensor] = {}
        device: torch.device | None = None
        for stem, named in tensors.items():
            for name, tensor in named.items():
                buffer = self._buffers.get((stem, name))
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                used[stem, name] = buffer.copy_(tensor.detach(), non_blocking=True)
                device = tensor.device if tensor.is_cuda else device
        self._buffers = used
        arrived = None
        if device is not None:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))
        return {stem: {name: used[stem, name] for name in named} for stem, named in tensors.items()}, arrived
