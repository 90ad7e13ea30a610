"""A function captured as a CUDA graph: what it is kept by, where it reads its inputs, and where it writes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

GraphKey = tuple[str, tuple[Hashable, ...], str, tuple[Hashable, ...]]
"""A function's name, its options, and the structure and the shapes of its inputs."""


def key_of(
    function: Callable[..., Any], options: Sequence[Hashable], structure: Any, leaves: Sequence[Any]
) -> GraphKey:
    """What a function with these options and inputs is captured by: equal keys are one graph."""
    return function.__name__, tuple(options), str(structure), tuple(map(_signature, leaves))


@dataclass
class GraphInput:
    """Where a graph reads one of its inputs.

    Args:
        changes: the graph writes there too, so that what was read last is not there any more.
    """

    ours: Tensor
    changes: bool
    last: weakref.ref[Tensor] | None = None
    version: int = 0

    def take(self, given: Tensor) -> None:
        """Copy what is given there, unless it is there already: weights and counts are the same for most steps."""
        if self.last is not None and self.last() is given and self.version == given._version:
            return
        self.ours.copy_(given, non_blocking=True)
        # of tensors made in inference mode nobody knows whether they have been changed
        if not self.changes and not given.is_inference():
            self.last, self.version = weakref.ref(given), given._version


@dataclass(frozen=True)
class Graph:
    """A captured function."""

    graph: Any
    """A ``torch.cuda.CUDAGraph``."""
    inputs: list[GraphInput | None]
    """None for what is no tensor, which is part of the key."""
    outputs: Any
    """Where it writes; the next replay overwrites it."""

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Replay it with these inputs, in the order of the capture; returns copies of what it wrote."""
        for place, given in zip(self.inputs, leaves, strict=True):
            if place is not None:
                place.take(given)
        self.graph.replay()
        return copied(self.outputs)


def copied(outputs: Any) -> Any:
    """The same pytree with every tensor in memory of its own."""
    if type(outputs) is tuple and all(isinstance(each, Tensor) for each in outputs):  # quicker, each step
        return tuple(each.clone() for each in outputs)
    return _pytree.tree_map_only(Tensor, torch.clone, outputs)


def _signature(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
