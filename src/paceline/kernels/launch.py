"""How our kernels are started: at once, or, before a run's first step, all of them compiled side by side.

Triton compiles a kernel where it is first launched, one after the other. Most of that is work outside of Python, so ten
kernels on ten threads take about as long as the slowest.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# Triton exists for some platforms only.

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

HAS_TRITON: Final = importlib.util.find_spec("triton") is not None

THREADS = 8
"""Most kernels that are compiled at the same time."""


def runs_kernels(tensor: Tensor) -> bool:
    """Whether our kernels serve this tensor; elsewhere operators are made of torch's own."""
    return HAS_TRITON and (tensor.device.type == "cuda" or _are_interpreted())


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """``kernel[grid](*arguments, **options)``; inside ``compiled_together`` it is noted, and compiled later.

    Args:
        kernel: a function of ``triton.jit``.
    """
    noted = _noted
    if noted is None:
        kernel[grid](*arguments, **options)
        return
    # blocks are alike, and two threads would both compile what neither has finished
    key = (id(kernel), *map(_kind, arguments), *options.items())
    without_memory = (_Pointer(given) if isinstance(given, Tensor) else given for given in arguments)
    noted[key] = partial(_made, kernel.warmup, *without_memory, grid=grid, **options)


def threshold(dropout: float) -> int:
    """A draw or a product of keys, read as int32, below this is dropped."""
    return min(round(dropout * 2**32), 2**32 - 1) - 2**31


def are_noted() -> bool:
    """Whether kernels are noted and not run just now, so that what they would have written is undefined."""
    return _noted is not None


@contextlib.contextmanager
def only_noted(device: torch.device) -> Iterator[Mapping[Any, Callable[[], Any]]]:
    """Inside, no kernel is run, for who looks at layers and shapes alone: what it would have written stays undefined.

    Gives what would compile the kernels; nothing does. Elsewhere than on GPUs with Triton nothing changes.
    """
    global _noted
    if not HAS_TRITON or device.type != "cuda":
        yield {}
        return
    noted = _noted = {}
    try:
        yield noted
    finally:
        _noted = None


@contextlib.contextmanager
def compiled_together(device: torch.device) -> Iterator[None]:
    """Inside, no kernel is run: what it would have written stays undefined. On the way out all of them are compiled.

    Kernels that other threads launch are meant too: backward passes on a GPU have threads of their own. Nothing is
    compiled before the end, for torch's compiler may be at work inside, and was made to be alone with Triton's.

    Raises:
        Exception: what Triton raised for one of the kernels.
    """
    with only_noted(device) as noted:
        yield
    if not noted:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    wake_compiler(index)
    # a thread begins on the first GPU, where a context of its own would cost memory
    some = min(THREADS, os.cpu_count() or 1)
    prepare = torch.cuda.set_device, (index,)
    # Triton changes the process's filters of warnings and puts them back, which threads do in any order
    with warnings.catch_warnings(), ThreadPoolExecutor(some, "paceline-compile", *prepare) as threads:
        for future in [threads.submit(compile) for compile in noted.values()]:
            future.result()


def wake_compiler(gpu: int) -> None:
    """Have Triton load its compiler, build its glue to the driver and hash itself: seconds, and little of it Python's.

    What goes wrong here goes wrong again where a kernel is needed, and is handled there.

    Args:
        gpu: its index.
    """
    if not HAS_TRITON:
        return
    with _waking, contextlib.suppress(Exception):
        if gpu not in _awake:
            from paceline.kernels.nothing import nothing

            with torch.cuda.device(gpu):
                nothing.warmup(grid=(1,))
            _awake.add(gpu)


def _made(warm_up: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Compile a kernel, load it and build what launches it, a program in C: as much work again for a small kernel."""
    compiled = warm_up(*arguments, **options)
    if compiled is not None:
        compiled.run  # noqa: B018 - made when it is first asked for


def _are_interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _kind(argument: Any) -> Any:
    """What a kernel is compiled for, or more finely: equal kinds are compiled once."""
    match argument:
        case Tensor():
            return argument.dtype, argument.data_ptr() % 16 == 0
        case int():
            return argument == 1, argument % 16 == 0, argument.bit_length() > 31
        case _:
            return type(argument)


class _Pointer:
    """All that the compiler asks of a tensor: its number format, and whether its address can be divided by 16."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._address = tensor.dtype, tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address


_noted: dict[Any, Callable[[], Any]] | None = None
_waking = threading.Lock()
_awake: set[int] = set()
