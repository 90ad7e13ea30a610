"""A GPU that is not there: tensors with shapes and a device, and nothing in them.

torch's fake tensors would do, if they could be differentiated on a device that is missing: on a machine without CUDA
the backward pass of a fake ``cuda`` tensor asks the driver, and fails. torch's place for other people's devices
(PrivateUse1) can be filled from Python. Such a device has no kernels at all, which fake tensors do not need, and takes
torch's paths for accelerators, as CUDA does: one operator for dropout with a byte a decision, say. What that place
lacks is added: CUDA's autocast, its choice among attention kernels, and graphs.

What is registered with torch stays for the life of the process, so that ``plan`` computes in a process of its own.
Source: torch/utils/backend_registration.py; test/test_privateuseone_python_backend.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import backend_registration

from paceline.machine.device import PLANNED, plan_with
from paceline.machine.facts import Gpu
from paceline.memory import autocast
from paceline.memory.attention import register_attention
from paceline.memory.compiler import register_compiler
from paceline.memory.ledger import Ledger
from paceline.memory.recall import Recall

UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Operators whose result has a size, or a value on the host, that depends on numbers."""

_HostGenerator = torch.Generator


@contextlib.contextmanager
def stand_in(gpu: Gpu) -> Iterator[tuple[torch.device, Ledger]]:
    """Inside, tensors on the device that is given hold nothing, and the ledger enters all of their memory.

    Backward passes run in the calling thread: a device's own would not know that it is inside.

    Raises:
        RuntimeError: this process has had one; another belongs to a process of its own.
    """
    if _registered.cache_info().currsize:
        raise RuntimeError("a process has one stand-in for a GPU, and this one has had it: fork before the trace")
    backend, mode = _registered(), FakeTensorMode(allow_non_fake_inputs=True)
    # a model's copy would copy the mode of its tensors, and with it references to storages that must be let go of once
    mode.__deepcopy__ = lambda memo: mode  # type: ignore[attr-defined]
    ledger = Ledger(PLANNED, Recall(mode, PLANNED))
    backend.ledger = ledger
    plan_with(gpu)
    generators = patch.object(torch, "Generator", _Generator)
    with generators, mode, torch.autograd.set_multithreading_enabled(False), ledger:
        # what torch.tensor() makes is real on the host and fake elsewhere
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield torch.device(PLANNED, 0), ledger
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


@functools.cache
def _registered() -> _Backend:
    backend = _Backend()
    backend_registration._setup_privateuseone_for_python_backend(PLANNED, backend_module=backend)
    # what is registered by a library is gone with it
    backend.libraries = (*autocast.register(PLANNED), register_attention(), _meta_kernels())
    register_compiler()
    return backend


def _meta_kernels() -> torch.library.Library:
    """Meta kernels that torch lacks: those of fused updates, which change what they are given and return nothing, and
    those of a batch norm over ranks."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr"):
        library.impl(name, lambda *args, **kwargs: None)
    library.impl("batch_norm_stats", lambda given, eps: (_a_channel(given), _a_channel(given)))
    library.impl("batch_norm_elemt", lambda given, *args: torch.empty_like(given))
    library.impl(
        "batch_norm_backward_reduce",
        lambda gradient, given, mean, inverse, weight, of_given, of_weight, of_bias: tuple(
            _a_channel(given) if wanted else None for wanted in (of_given, of_given, of_weight, of_bias)
        ),
    )
    library.impl("batch_norm_backward_elemt", lambda gradient, given, *args: torch.empty_like(given))
    return library


def _a_channel(given: Tensor) -> Tensor:
    return given.new_empty(given.shape[1], dtype=torch.float32)


@final
class _Generator(torch.Generator):
    """A generator of random numbers that nobody draws on the device; on the host it is torch's own."""

    _planned: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        where = torch.device(device)
        if where.type != PLANNED:
            return _HostGenerator(where)
        made = super().__new__(cls)
        made._planned = torch.device(PLANNED, where.index or 0)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._planned


@final
class _Backend(backend_registration._DummyBackendModule):
    """What ``torch.cuda`` is to a GPU, as far as torch and the engine ask for it."""

    ledger: Ledger
    _captures = False
    libraries: tuple[torch.library.Library, ...] = ()

    def is_available(self) -> bool:
        return False  # or fake tensors would have kernels of the device write constants

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.empty(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        pass

    def device(self, device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: object = None) -> None:
        pass

    def get_sync_debug_mode(self) -> int:
        return 0

    def set_sync_debug_mode(self, mode: object) -> None:
        pass

    def empty_cache(self) -> None:
        self.ledger.empty_cache()

    def use_mem_pool(self, pool: MemPool) -> contextlib.AbstractContextManager[None]:
        return self.ledger.into(pool.id)

    @contextlib.contextmanager
    def graph(self, graph: object, pool: Hashable, stream: object, *, capture_error_mode: str) -> Iterator[None]:
        """A capture computes nothing, and allocates all the same; like CUDA's, it hands back what is cached first."""
        self.ledger.empty_cache()
        self._captures = True
        try:
            with self.ledger.into(pool), self.ledger.on(stream):
                yield
        finally:
            self._captures = False

    def is_current_stream_capturing(self) -> bool:
        return self._captures

    # one after the other: what one stream waits for another for is done by then
    def current_stream(self, device: object = None) -> _Stream:
        return _Stream()

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return self.ledger.on(stream)

    def Stream(self, *args: object, **kwargs: object) -> _Stream:
        return _Stream()

    def Event(self, *args: object, **kwargs: object) -> _Stream:
        return _Stream()

    class MemPool:
        """Memory of which nothing shows here; the ledger's entries are replayed later."""

        id: Hashable = "graphs"

        def snapshot(self) -> tuple[()]:
            return ()

        def use_count(self) -> int:
            return 1

    class CUDAGraph:
        """A graph; what replaying it allocates was allocated when it was made."""

        def replay(self) -> None:
            pass


@final
class _Stream:
    """A stream, or an event, of a device that computes nothing."""

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: object = None) -> _Stream:
        return self

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True
