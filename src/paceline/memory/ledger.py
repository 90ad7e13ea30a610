"""What a program allocates on a device and when it lets go, in order: the only thing a memory plan is made of.

Tensors that hold nothing still have storages, and those live exactly as long as they would on a GPU: views share one,
autograd keeps what it saved, Python lets go of a local. So lifetimes are observed, not modelled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from paceline.memory.expandable import DEFAULT
from paceline.memory.workspaces import workspace_bytes


@dataclass(slots=True)
class Allocation:
    """One storage."""

    num_bytes: int
    """As asked for; what an allocator makes of it is its own affair."""
    operator: str
    """That made it, such as ``aten.mm.default``."""
    phase: str
    """What the run was doing."""
    pool: Hashable
    name: str = ""
    """What it is, where somebody said so: parameters, gradients, ..."""
    stream: Hashable = 0
    """That was the current one; 0: the one that computes."""
    beside: bool = False
    """Made by a thread of the backward pass's own, which has its own handles of libraries."""


Compute = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Operator, its arguments, those by keyword -> what it returns."""


_DEVICE_OF = torch.ops.prim.device.default


ADDED_IN_PLACE: Mapping[Any, Any] = {
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten._unsafe_index_put.default: torch.ops.aten.index_put_.default,
}
"""What torch's backward formulas do to zeros that they have just made: out of place for subclasses of tensors, which
fake ones are taken for, and in place for plain ones (FunctionsManual.cpp, ``isTensorSubclassLike``)."""

ZEROS = frozenset(f"aten.{name}.default" for name in ("zeros", "new_zeros", "zeros_like"))


def _is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _computed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


@final
class Ledger(TorchDispatchMode):
    """Inside, every storage that an operator makes on ``device_type`` is entered, and when it is freed.

    Args:
        device_type: others are left out.
        compute: runs an operator.
    """

    supports_higher_order_operators = True  # such as a compiler's way of keeping random states

    def __init__(self, device_type: str, compute: Compute = _computed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._compute = compute
        self.allocations: list[Allocation] = []
        self.events: list[int | None] = []
        """n: ``allocations[n]`` is made; ~n: it is freed; None: the allocator gives back what it has cached."""
        self._phase = ""
        self._pool: Hashable = DEFAULT
        self._stream: Hashable = 0
        self._live: dict[int, int] = {}
        self._is_blind = False
        self._is_compiled = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # for any other mode torch.compile gives up

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ADDED_IN_PLACE and self._adds_to_new_zeros(args[0]):
            func = ADDED_IN_PLACE[func]
        out = self._compute(func, args, kwargs or {})
        if func is _DEVICE_OF or self._is_blind:
            return out  # the former is asked of tensors all the time, and nothing is made
        if isinstance(out, Tensor):
            self._see(out, func)
        elif isinstance(out, (tuple, list)):
            for each in out:
                if isinstance(each, Tensor):
                    self._see(each, func)
        inside = workspace_bytes(str(func), args) if self._phase and not self._is_compiled else 0
        if inside:
            # beside the results, which are there by now
            self.events.append(~self._enter(inside, str(func), "workspaces"))
        return out

    def __enter__(self) -> Self:
        # shards are gathered into memory that is given back and taken again, past all operators
        storages: Any = torch.UntypedStorage
        resize = self._resize = storages.resize_

        def resized(storage: torch.UntypedStorage, num_bytes: int) -> object:
            before = storage.nbytes()
            out = resize(storage, num_bytes)
            if num_bytes != before:
                self._resized(storage)
            return out

        storages.resize_ = resized
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *raised: Any) -> None:
        storages: Any = torch.UntypedStorage
        storages.resize_ = self._resize
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def during(self, phase: str) -> AbstractContextManager[None]:
        """What is made inside belongs to this phase; a backward pass is one of its own, wherever it runs."""
        return self._with(_phase=phase)

    def into(self, pool: Hashable) -> AbstractContextManager[None]:
        """What is made inside comes from this pool of the allocator."""
        return self._with(_pool=pool)

    def on(self, stream: Hashable) -> AbstractContextManager[None]:
        """What is made inside is made on this stream, which alone gets its memory again."""
        return self._with(_stream=stream)

    def unseen(self) -> AbstractContextManager[None]:
        """What is made inside takes no memory: a kernel has it in registers."""
        return self._with(_is_blind=True)

    def compiled(self) -> AbstractContextManager[None]:
        """Inside, operators are those of a compiler, which need not what torch's own hold beside their results."""
        return self._with(_is_compiled=True)

    @contextmanager
    def _with(self, **state: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        try:
            yield
        finally:
            vars(self).update(before)

    def name(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Say what the storages of these tensors are; the first name stays."""
        for tensor in tensors:
            number = self._live.get(tensor.untyped_storage()._cdata)
            if number is not None and not self.allocations[number].name:
                self.allocations[number].name = name

    def add(self, num_bytes: int, name: str) -> None:
        """Enter what lives from now on to the end, and is no tensor of torch's."""
        self._enter(num_bytes, "", name)

    def empty_cache(self) -> None:
        """Memory that nothing lives in is given back."""
        self.events.append(None)

    def _adds_to_new_zeros(self, tensor: Tensor) -> bool:
        last = len(self.allocations) - 1
        new = self._live.get(tensor.untyped_storage()._cdata) == last >= 0
        return new and self.allocations[last].operator in ZEROS and _is_backward()

    def _see(self, tensor: Tensor, func: Any) -> None:
        # a fake tensor's device is asked of all that it is made by
        device = getattr(tensor, "fake_device", None) or tensor.device
        if device.type != self._device_type or is_traceable_wrapper_subclass(tensor):
            return  # a tensor of shards has memory in its parts alone
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            if num_bytes != self.allocations[known].num_bytes:
                self._resized(storage)  # as Tensor.resize_ does, and what is told where to write
        elif num_bytes:
            number = self._live[key] = self._enter(num_bytes, str(func))
            weakref.finalize(storage, self._freed, key, number).atexit = False

    def _enter(self, num_bytes: int, operator: str, name: str = "") -> int:
        backward = _is_backward()
        phase = "backward" if backward and self._phase == "forward" else self._phase
        # what is captured, and all that shares its pool, is differentiated in the thread that launches it
        beside = backward and self._pool == DEFAULT
        self.allocations.append(Allocation(num_bytes, operator, phase, self._pool, name, self._stream, beside))
        self.events.append(len(self.allocations) - 1)
        return len(self.allocations) - 1

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        number = self._live.pop(key, None)
        if number is None:
            return  # of a device that is not looked at
        made = self.allocations[number]
        self.events.append(~number)
        again = self._live[key] = self._enter(storage.nbytes(), made.operator, made.name)
        weakref.finalize(storage, self._freed, key, again).atexit = False

    def _freed(self, key: int, number: int) -> None:
        if self._live.get(key) == number:  # else it has been resized since
            del self._live[key]
            self.events.append(~number)
