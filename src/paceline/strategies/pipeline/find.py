"""Where a model can be cut into stages: found by watching one of its own forward passes.

No class of models is known here. The blocks are those that ``models.structure`` finds by shape. A pass shows whether
they are one chain, of which each takes what the one before it returned; which modules come before and behind them; and
how a block is given its hidden states and returns them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree

from paceline.contract.errors import RecipeError

SETTING = "parallel.pipeline"

WITHOUT = f"--set {SETTING}=1, so that every process keeps the whole model"

Slot = int | str
"""Where among a block's arguments its hidden states are: a position, or a name."""


@dataclass(frozen=True)
class Output:
    """How a block returns its hidden states."""

    kind: type[tuple[Any, ...]] | type[list[Any]] | None
    """None: bare."""
    length: int = 0
    """The tuple's or list's, in which they come first."""

    @classmethod
    def of(cls, output: Any) -> Output:
        """How this output is made."""
        kind = next((kind for kind in (tuple, list) if isinstance(output, kind) and output), None)
        return cls(kind, len(output)) if kind else cls(None)

    def hidden(self, output: Any) -> Any:
        """The hidden states in an output."""
        return output if self.kind is None else output[0]

    def like(self, hidden: Tensor) -> Any:
        """An output with these hidden states and nothing else."""
        return hidden if self.kind is None else self.kind([hidden, *[None] * (self.length - 1)])


@dataclass(frozen=True)
class Chain:
    """A model's blocks as one pass goes through them."""

    slot: Slot
    outputs: tuple[Output, ...]
    """One a block."""
    places: Mapping[nn.Module, int]
    """Places of modules outside the blocks that the pass ran: -1 before all blocks, their number behind all of them."""


def chain_of(model: nn.Module, blocks: Sequence[nn.Module], run: Callable[[], object]) -> Chain:
    """The blocks of ``model`` as ``run``, a forward pass of it, goes through them.

    Raises:
        RecipeError: they are no chain.
    """
    watch = _Watch(model, blocks)
    with contextlib.ExitStack() as stack, torch.no_grad():
        for index, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(partial(watch.enter, index), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(partial(watch.leave, index)).remove)
        inside = {id(module) for block in blocks for module in block.modules()}
        for module in model.modules():
            if id(module) not in inside and _holds_any(module):
                stack.callback(module.register_forward_pre_hook(watch.outside).remove)
        run()
    return watch.chain()


def check_blocks(model: nn.Module, blocks: Sequence[nn.Module], stages: int, ranks: int, processes: int) -> None:
    """Refuse a model that has no ``stages`` to be cut into; nothing is computed.

    Args:
        ranks: of the pipeline.
        processes: of the run.

    Raises:
        RecipeError: no blocks, fewer than stages, or a batch norm.
    """
    what, name = f"{SETTING} = {ranks}", type(model).__name__
    if not blocks:
        raise RecipeError(what, f"{name}: no repeated blocks were found in it, between which it is cut", WITHOUT)
    if len(blocks) < stages:
        each = stages // ranks
        told = f"{name} has {len(blocks)} block{'s' * (len(blocks) > 1)}, and each of {stages} stages has one at least"
        if each > 1 and len(blocks) >= ranks:
            raise RecipeError(what, told, "--set parallel.schedule=1f1b, which has one stage a process")
        most = next((n for n in range(len(blocks) // each, 1, -1) if processes % n == 0), 1)
        raise RecipeError(what, told, f"--set {SETTING}={most}" if most > 1 else WITHOUT)
    found = next((path for path, module in model.named_modules() if isinstance(module, _BatchNorm)), None)
    if found is not None:
        why = f"{name} has batch norms ({found}), whose running statistics would be those of single micro-batches"
        raise RecipeError(what, why, WITHOUT)


def balanced(costs: Sequence[int], stages: int) -> list[int]:
    """The first block of each stage, so that the most expensive stage is as cheap as can be.

    Of several ways the one whose first stages are small: they keep the activations of most micro-batches.

    Args:
        costs: of each block.
        stages: at most as many as blocks.
    """
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[end]: the cost of the most expensive of so many stages over blocks up to ``end``, and their firsts
    best: dict[int, tuple[int, list[int]]] = {end: (total[end], [0]) for end in range(1, len(costs) + 1)}
    for stage in range(2, stages + 1):
        best = {
            end: min(
                (max(best[first][0], total[end] - total[first]), [*best[first][1], first])
                for first in range(stage - 1, end)
            )
            for end in range(stage, len(costs) + 1)
        }
    return best[len(costs)][1]


def cost_of(block: nn.Module) -> int:
    """Numbers that each position is multiplied by, which is what a block's time goes by."""
    return sum(parameter.numel() for parameter in block.parameters() if parameter.ndim >= 2)


def owners_of(model: nn.Module, blocks: Sequence[nn.Module], chain: Chain, firsts: Sequence[int]) -> dict[str, int]:
    """By name, the stage of each parameter and buffer: that of its block, the first or the last.

    What no pass ran is kept by the last stage.

    Args:
        firsts: the first block of each stage.

    Raises:
        RecipeError: a weight of two stages.
    """
    last = len(firsts) - 1
    of_block = {
        id(module): max(stage for stage, first in enumerate(firsts) if first <= index)
        for index, block in enumerate(blocks)
        for module in block.modules()
    }
    found: dict[str, int] = {}
    seen: dict[int, tuple[int, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        stage = of_block.get(id(module), 0 if chain.places.get(module) == -1 else last)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            name = f"{path}.{key}" if path else key
            before, other = seen.setdefault(id(tensor), (stage, name))
            if before != stage and isinstance(tensor, nn.Parameter):
                why = (
                    f"{type(model).__name__}: {other} and {name} are one weight, of stages {before + 1} and {stage + 1}"
                )
                raise RecipeError(f"{SETTING}: {len(firsts)} stages", why, WITHOUT)
            found[name] = before
    return found


@final
class _Watch:
    """Hooks of one forward pass."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._model, self._count = model, len(blocks)
        self._entered, self._left = -1, -1
        self._first: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._hidden: Tensor | None = None
        self._slots: set[Slot] = set()
        self._outputs: list[Output] = []
        self._further: set[int] = set()
        self._shapes: list[torch.Size] = []
        self._places: dict[nn.Module, int] = {}

    def enter(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index != self._entered + 1 or self._left != self._entered:
            raise self._refused(f"block {self._entered + 1} is not followed by the next, or is passed several times")
        self._entered = index
        if index == 0:
            self._first = args, kwargs
            return
        given: list[tuple[Slot, Any]] = [*enumerate(args), *kwargs.items()]
        slot = next((slot for slot, value in given if value is self._hidden), None)
        if slot is None:
            raise self._refused(f"block {index + 1} is not given what block {index} returned: something is between")
        self._slots.add(slot)
        if self._further & {id(leaf) for leaf in _pytree.tree_leaves((args, kwargs))}:
            raise self._refused(f"block {index} hands on more than its hidden states")

    def leave(self, index: int, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        made = Output.of(output)
        hidden = made.hidden(output)
        if not isinstance(hidden, Tensor):
            raise self._refused(f"block {index + 1} returns a {type(output).__name__}")
        self._left, self._hidden = index, hidden
        self._outputs.append(made)
        self._further = {id(leaf) for leaf in _pytree.tree_leaves(output) if isinstance(leaf, Tensor)} - {id(hidden)}
        self._shapes.append(hidden.shape)

    def outside(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._left != self._entered:
            return  # a module that a block borrows
        place = -1 if self._entered < 0 else self._count
        if place > 0 and self._left < self._count - 1:
            raise self._refused(f"a {type(module).__name__} is run between two blocks")
        if self._places.setdefault(module, place) != place:
            raise self._refused(f"a {type(module).__name__} is run before the blocks and behind them")

    def chain(self) -> Chain:
        if self._left != self._count - 1:
            raise self._refused("a forward pass does not go through all of them")
        if len(self._slots) > 1:
            raise self._refused("they are given their hidden states in different ways")
        slot = next(iter(self._slots), 0)
        args, kwargs = self._first
        first = kwargs.get(slot) if isinstance(slot, str) else args[slot] if slot < len(args) else None
        # what the last block returns, perhaps of pooled positions alone, is not sent
        if not isinstance(first, Tensor) or {*self._shapes[:-1]} != {first.shape}:
            raise self._refused("their hidden states have several shapes")
        return Chain(slot, tuple(self._outputs), self._places)

    def _refused(self, why: str) -> RecipeError:
        name = type(self._model).__name__
        return RecipeError(f"{SETTING}: {name} cannot be cut between its blocks", why, WITHOUT)


def _holds_any(module: nn.Module) -> bool:
    held = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None for tensor in held)
