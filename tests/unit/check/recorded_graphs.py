"""CUDA graphs on the CPU: what a capture would record is noted, and done again at each replay.

What matters of a graph is as on a GPU. A capture changes nothing. A replay runs the operators alone, no Python: what
the host decided, and the numbers it held, stay as they were. It reads and writes the memory that the capture saw, and
draws the random numbers of now. A capture that reads a number on the host fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.optim.updates import build_updates
from paceline.strategies import alone


@final
class RecordedGraph(TorchDispatchMode):
    """What ``torch.cuda.CUDAGraph`` is to the engine."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Sequence[Any], dict[str, Any], Any]] = []
        self._before: dict[int, tuple[Any, Any]] = {}
        """Address -> memory that was written to, and what was there before."""
        self._random = torch.get_rng_state()

    def capture_begin(self, pool: object, *, capture_error_mode: str) -> None:
        self._random = torch.get_rng_state()
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()
        torch.set_rng_state(self._random)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                self._keep(args[place] if place < len(args) else kwargs.get(argument.name))
        found = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, found))
        return found

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, place in self._calls:
                found = func(*args, **kwargs)
                for new, old in zip(_tensors(found), _tensors(place), strict=True):
                    if new.data_ptr() != old.data_ptr():
                        old.copy_(new)

    def _keep(self, written: Any) -> None:
        for tensor in _tensors(written):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = storage, storage.clone()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@final
class _Gpu:
    """What ``torch.cuda`` is to the engine, as far as captures ask for it."""

    CUDAGraph = RecordedGraph

    class MemPool:
        id = (0, 0)

        def snapshot(self) -> Sequence[Any]:
            return ()

        def use_count(self) -> int:
            return 1

    def Stream(self, *_: object) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    use_mem_pool = stream

    def synchronize(self, *_: object) -> None: ...

    empty_cache = set_sync_debug_mode = synchronize

    def get_sync_debug_mode(self) -> int:
        return 0

    def mem_get_info(self, *_: object) -> tuple[int, int]:
        return 2, 2

    def max_memory_reserved(self, *_: object) -> int:
        return 1

    @contextlib.contextmanager
    def graph(self, graph: RecordedGraph, pool: object, stream: object, *, capture_error_mode: str) -> Iterator[None]:
        graph.capture_begin(pool, capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()


def with_recorded_graphs(patch: pytest.MonkeyPatch) -> None:
    """From now on, captures on the CPU are recorded, and updates are those of a GPU, which can be captured."""
    modules, gpu = torch.get_device_module, _Gpu()
    patch.setattr(
        torch, "get_device_module", lambda device=None: gpu if str(device).startswith("cpu") else modules(device)
    )

    def as_on_a_gpu(groups: Any, part: Any, rates: Any, device: torch.device, *rest: Any, **named: Any) -> Any:
        return build_updates(groups, part, rates, torch.device("cuda"), *rest, **named)

    patch.setattr(alone, "build_updates", as_on_a_gpu)
