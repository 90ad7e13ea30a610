"""A model's blocks cut over ranks, in place, and what is needed to put them together again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from paceline.contract.errors import RecipeError
from paceline.seams import World
from paceline.strategies.tensor.find import HEADS, SIZES, Found, heads_of, pairs_of
from paceline.strategies.tensor.layers import ColumnLinear, Inside, RowLinear
from paceline.strategies.tensor.shard import Cut

SETTING = "parallel.tensor"


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """By name, how the parameters of a model are cut that are."""
    return {
        f"{name}.{kind}": cut
        for name, module in model.named_modules()
        if isinstance(module, ColumnLinear | RowLinear)
        for kind, cut in module.cuts.items()
    }


def apply_cut(model: Any, blocks: Sequence[nn.Module], world: World) -> None:
    """Cut the blocks of ``model`` over the ranks, in place; names of weights stay as they are.

    Args:
        model: equal on all ranks.
        blocks: those of the model's modules that are repeated.

    Raises:
        RecipeError: a block that cannot be cut, or not over so many ranks.
    """
    for block, pairs in found_in(model, blocks, world.size):
        for pair in pairs:
            _cut_pair(block, pair, world)


def found_in(
    model: Any, blocks: Sequence[nn.Module], size: int, processes: int | None = None
) -> Iterator[tuple[nn.Module, list[Found]]]:
    """Each block and where it can be cut over ``size`` ranks; nothing is changed.

    Args:
        processes: of the run, for whom other numbers than ``size`` are looked for; None: as many as it takes.

    Raises:
        RecipeError: as ``apply_cut``.
    """
    what, name = f"{SETTING} = {size}", type(model).__name__
    if not blocks:
        raise RecipeError(what, f"{name}: no repeated blocks were found in it, which are what is cut", _leave_out())
    for block in dict.fromkeys(blocks):
        pairs = pairs_of(block, getattr(model, "config", None))
        if pairs is None:
            kind = f"{name}: a block ({type(block).__name__}) is not an attention and an MLP of plain linear layers"
            raise RecipeError(what, f"{kind}, which are what is cut", _leave_out())
        most = math.gcd(*(pair.units for pair in pairs))
        fitting = [n for n in range(2, most + 1) if most % n == 0 and (processes or most) % n == 0]
        for pair in pairs:
            if pair.units % size:
                told = f"{name}: a block has {pair.units} {pair.what}, which are no multiple of {size}"
                fix = " or ".join(f"--set {SETTING}={n}" for n in fitting[:8])
                raise RecipeError(what, told, fix or _leave_out())
        yield block, pairs


def _leave_out() -> str:
    return f"--set {SETTING}=1, so that every process keeps whole blocks"


def _cut_pair(block: nn.Module, pair: Found, world: World) -> None:
    inside = Inside(world)
    # a pass that an exception broke off is not gone on with
    block.register_forward_pre_hook(lambda *_: inside.forget())
    outputs = Cut(0, pair.parts, world.rank, world.size)
    for name in pair.columns:
        _replace(block, name, ColumnLinear, inside, {"weight": outputs, "bias": outputs})
    _replace(block, pair.row, RowLinear, inside, {"weight": Cut(1, 1, world.rank, world.size)})
    if pair.heads is not None:
        holder = block.get_submodule(pair.columns[0].rpartition(".")[0])
        for attribute in (*HEADS, *SIZES):
            if (count := heads_of(holder, attribute)) is not None:
                setattr(holder, attribute, count // world.size)


def _replace(
    block: nn.Module, name: str, kind: type[ColumnLinear | RowLinear], inside: Inside, cuts: Mapping[str, Cut]
) -> None:
    whole: Any = block.get_submodule(name)
    kept = {
        key: nn.Parameter(cuts[key].shard(tensor.detach()), tensor.requires_grad) if key in cuts else tensor
        for key, tensor in (("weight", whole.weight), ("bias", whole.bias))
        if tensor is not None
    }
    layer = kind(kept["weight"], kept.get("bias"), inside, {key: cut for key, cut in cuts.items() if key in kept})
    layer.train(whole.training)
    parent, _, child = name.rpartition(".")
    setattr(block.get_submodule(parent), child, layer)
