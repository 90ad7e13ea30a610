"""What operators make of tensors that hold nothing, worked out once a shape.

A fake tensor's result is a matter of sizes alone, and a model of equal blocks asks for the same ones again and again:
torch takes a tenth of a millisecond for each answer, and a trace asks tens of thousands of times. Here the answer to
each call is kept, by operator and by sizes, strides and formats of what it is given. Results are made as torch's own
cache of fake tensors makes them: in new storages, as views of an argument's, or the argument itself, whichever torch
answered the first time. So lifetimes stay what they are.

Source: torch/_subclasses/fake_tensor.py, ``_cached_dispatch_impl``, which takes on more kinds of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PLAIN: Final = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of arguments that are compared by value."""

AS_STRIDED: Final = torch.ops.aten.as_strided.default
"""It counts from where a storage begins, and not from where a tensor does."""

MODES: Final = tuple(torch._C._TorchDispatchModeKey.__members__.values())


@dataclass(frozen=True, slots=True)
class _Made:
    """One result: its sizes, and where its memory is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """From where the tensor begins that it is a view of."""
    device: torch.device
    view_of: int | None
    """Which of the tensors that were given has the storage; None: it is new."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """All results of a call."""

    container: type | None
    """``tuple`` or ``list``; None: one result, by itself."""
    results: tuple[_Made | int | None, ...]
    """A number: that one of the tensors that were given."""


@final
class Recall:
    """Runs operators inside a fake mode; those that were run on such tensors before are not run again.

    Args:
        mode: in which all tensors are made.
        device_type: of tensors that are looked at; calls with any others are torch's.
    """

    def __init__(self, mode: FakeTensorMode, device_type: str) -> None:
        self._mode = mode
        self._device_type = device_type
        self._answers: dict[tuple[Any, ...], _Answer | None] = {}

    def __call__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What ``func(*args, **kwargs)`` returns."""
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            given = args[0]
            return torch.device("meta") if given.fake_mode.in_kernel_invocation else given.fake_device
        tensors: list[FakeTensor] = []
        if func is AS_STRIDED and len(args) == 4 and self._add(args, [], tensors) and self._is_alone(func):
            # each of a model's weights is elsewhere in a flat buffer: the call itself says all
            return self._again(_Answer(None, (_strided(*args),)), tensors)
        key = self._key(func, args, kwargs, tensors) if self._is_alone(func) else None
        if key is None:
            return func(*args, **kwargs)
        if key in self._answers:
            answer = self._answers[key]
            return func(*args, **kwargs) if answer is None else self._again(answer, tensors)
        out = func(*args, **kwargs)
        self._answers[key] = self._answer(out, tensors) if self._key(func, args, kwargs, []) == key else None
        return out

    def _is_alone(self, func: Any) -> bool:
        """Whether nothing but the fake mode would see the call: a compiler that traces has modes of its own."""
        modes = [torch._C._get_dispatch_mode(key) for key in MODES]
        return type(func) is OpOverload and all(mode is None or mode is self._mode for mode in modes)

    def _key(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[FakeTensor]
    ) -> tuple[Any, ...] | None:
        """By what a call is known again, and the tensors among its arguments; None: it is not kept."""
        parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._add(args, parts, tensors):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not self._add((value,), parts, tensors):
                return None
        # a factory of the host's has nothing to be known by
        return tuple(parts) if tensors else None

    def _add(self, values: Sequence[Any], parts: list[Any], tensors: list[FakeTensor]) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if (
                    value.fake_mode is not self._mode
                    or value.fake_device.type != self._device_type
                    or value.constant is not None
                    or value.dtype.is_complex
                ):
                    return False
                parts += (value.dtype, value.shape, value.stride())
                tensors.append(value)
            elif kind in PLAIN:
                parts += (kind, value)  # 1, 1.0 and True are equal
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._add(value, parts, tensors):
                    return False
            else:
                return False
        return True

    def _answer(self, out: Any, tensors: Sequence[FakeTensor]) -> _Answer | None:
        container = type(out) if type(out) in (tuple, list) else None
        given = [tensor.untyped_storage()._cdata for tensor in tensors]
        new = set[int]()
        results: list[_Made | int | None] = []
        for result in out if container else (out,):
            if result is None:
                results.append(None)
                continue
            if type(result) is not FakeTensor:
                return None
            same = next((index for index, tensor in enumerate(tensors) if tensor is result), None)
            if same is not None:
                results.append(same)
                continue
            storage = result.untyped_storage()
            owners = [index for index, key in enumerate(given) if key == storage._cdata]
            if len(owners) > 1 or storage._cdata in new or result.requires_grad or result.constant is not None:
                return None  # which is which would be a guess
            made = _Made(
                dtype=result.dtype,
                shape=tuple(result.shape),
                strides=result.stride(),
                offset=int(result.storage_offset()) - (int(tensors[owners[0]].storage_offset()) if owners else 0),
                device=result.fake_device,
                view_of=owners[0] if owners else None,
            )
            if not owners:
                new.add(storage._cdata)
                if made.offset or storage.nbytes() != _num_bytes(made):
                    return None
            results.append(made)
        return _Answer(container, tuple(results))

    def _again(self, answer: _Answer, tensors: Sequence[FakeTensor]) -> Any:
        made = [
            self._make(result, tensors) if isinstance(result, _Made) else None if result is None else tensors[result]
            for result in answer.results
        ]
        return made[0] if answer.container is None else answer.container(made)

    def _make(self, result: _Made, tensors: Sequence[FakeTensor]) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            elem = torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device="meta")
            if result.view_of is not None:
                whole = tensors[result.view_of]
                offset = whole.storage_offset() + result.offset
                elem.set_(whole.untyped_storage(), offset, result.shape, result.strides)
        return FakeTensor(self._mode, elem, result.device)


def _strided(tensor: FakeTensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> _Made:
    return _Made(
        dtype=tensor.dtype,
        shape=tuple(shape),
        strides=tuple(strides),
        offset=offset - int(tensor.storage_offset()),
        device=tensor.fake_device,
        view_of=0,
    )


def _num_bytes(made: _Made) -> int:
    """Bytes of a storage that holds this tensor and nothing else."""
    if 0 in made.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(made.shape, made.strides, strict=True))
    return (last + 1) * made.dtype.itemsize
