"""An engine's state as named tensors, out and in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor

from paceline.contract.errors import CheckpointError


class Splitting(ABC):
    """How tensors that ranks hold in pieces leave and enter whole."""

    def shape(self, name: str, tensor: Tensor) -> torch.Size:
        """The whole shape of a named tensor, as this rank holds it."""
        return tensor.shape

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the named tensors that this rank has all or a piece of."""
        return dict(tensors)

    @abstractmethod
    def collected(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Named tensors whole; those of split models on the first rank alone, in main memory. A collective."""

    @abstractmethod
    def put(self, current: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        """Copy whole tensors, which every rank has, into those of the same name and whole shape."""


@final
class _NotSplit(Splitting):
    def collected(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def put(self, current: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        for name, tensor in current.items():
            tensor.copy_(saved[name])


NOT_SPLIT: Splitting = _NotSplit()
"""Every rank has every tensor in one piece."""

COMPILED, PARALLEL = "_orig_mod.", "module."
"""What torch.compile puts anywhere into names, and DistributedDataParallel before all of them."""


def without_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names the model's author gave them; a submodule called ``module`` keeps its name."""
    plain = {name.replace(COMPILED, ""): tensor for name, tensor in state.items()}
    while plain and all(name.startswith(PARALLEL) for name in plain):
        plain = {name.removeprefix(PARALLEL): tensor for name, tensor in plain.items()}
    return plain


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its states, as its first step would; weights may move, so load them after.

    Doing the optimizer's own first step, rather than building its states here, works for every kind of them, and
    what is loaded afterwards is copied in place.
    """
    if not optimizer.state:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, Tensor]:
    """``parameter.key`` -> the optimizer's own state tensors (not copies)."""
    found = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                for suffix, inner in _plain_tensors(value):
                    found[f"{names[parameter]}.{key}{suffix}"] = inner
    return found


def optimizer_numbers(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, float]:
    """``parameter.key`` -> states that are plain numbers, as bitsandbytes' step counter is."""
    return {
        f"{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, int | float)
    }


def put_numbers(optimizer: torch.optim.Optimizer, names: Mapping[Any, str], numbers: Mapping[str, float]) -> None:
    """The inverse of ``optimizer_numbers``."""
    for parameter, state in optimizer.state.items():
        for key in state:
            if f"{names[parameter]}.{key}" in numbers:
                state[key] = numbers[f"{names[parameter]}.{key}"]


@torch.no_grad()
def copy_into(
    current: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str, splitting: Splitting = NOT_SPLIT
) -> None:
    """Copy saved tensors into the current ones of the same name.

    Raises:
        CheckpointError: a name is missing or not wanted, or a shape differs; nothing has been copied then.
    """
    current, saved = splitting.own(without_wrappers(current)), splitting.own(without_wrappers(saved))
    require_same(current, saved, what, splitting)
    splitting.put(current, saved)


def require_same(
    current: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str, splitting: Splitting = NOT_SPLIT
) -> None:
    """Refuse saved tensors of other names or shapes than the current ones.

    Args:
        splitting: knows the whole shape of what a rank holds a piece of.

    Raises:
        CheckpointError: a name is missing or not wanted, or a shape differs.
    """
    wrong = sorted(set(current) ^ set(saved)) or [
        name for name, tensor in current.items() if splitting.shape(name, tensor) != saved[name].shape
    ]
    if wrong:
        raise CheckpointError(
            f"the {what} in the checkpoint is not this run's",
            f"{len(wrong)} tensors differ in name or shape, for example {wrong[0]}",
            "resume with the recipe that the run was started with",
        )


def _plain_tensors(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or the ones a tensor subclass (torchao's 8-bit states) is made of."""
    if type(tensor) is Tensor or not hasattr(tensor, "__tensor_flatten__"):
        yield "", tensor
        return
    subclass: Any = tensor
    for attribute in subclass.__tensor_flatten__()[0]:
        for suffix, inner in _plain_tensors(getattr(subclass, attribute)):
            yield f".{attribute}{suffix}", inner
