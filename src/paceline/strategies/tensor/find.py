"""Where a block can be cut, found by the shapes of its linear layers in the order in which they are registered.

An attention layer is three matrices from the hidden size (or one, three times as wide) and one back to it; an MLP is
one or two from the hidden size (or one twice as wide, as gated MLPs have it) and one back. A block that has any other
linear layer is not cut. Whether what is found computes what the block did is not believed, but compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_key_value_heads")
"""What modules call how many heads they have."""

SIZES = ("all_head_size", "inner_dim")
"""What they call the size of all heads together, where it is another number than the hidden size."""


@dataclass(frozen=True)
class Found:
    """A pair of a block.

    Args:
        columns: names of the layers that it begins with.
        row: name of the one that it ends with.
        parts: outputs of each of ``columns`` are so many stretches, of which each is cut by itself.
        units: number of what cannot be cut: heads, or the columns of an MLP.
        what: they are called, for people.
        heads: number of all heads; None of an MLP.
    """

    columns: tuple[str, ...]
    row: str
    parts: int
    units: int
    what: str
    heads: int | None = None


def pairs_of(block: nn.Module, config: Any) -> list[Found] | None:
    """The attention and the MLP of a block; None where it is not made of these two.

    Args:
        config: the model's, asked for the number of heads where the attention does not know it.
    """
    linears = [(name, module) for name, module in block.named_modules() if type(module) is nn.Linear]
    plain = {linear.weight for _, linear in linears}
    if any(weight.ndim > 1 and weight not in plain for weight in block.parameters()):
        return None  # such as an embedding of relative positions, a number a head
    for begun in (3, 1):
        attention, mlp = linears[: begun + 1], linears[begun + 1 :]
        first = _attention(block, config, attention) if len(attention) == begun + 1 else None
        second = _mlp(mlp) if 2 <= len(mlp) <= 3 else None
        if first is not None and second is not None and attention[0][1].in_features == mlp[0][1].in_features:
            return [first, second]
    return None


def _attention(block: nn.Module, config: Any, linears: Sequence[tuple[str, nn.Linear]]) -> Found | None:
    *columns, (row, last) = linears
    hidden, sizes = last.out_features, [linear.out_features for _, linear in columns]
    parts = 3 if len(columns) == 1 else 1
    if any(linear.in_features != hidden for _, linear in columns) or max(sizes) != parts * last.in_features:
        return None
    holder = block.get_submodule(columns[0][0].rpartition(".")[0])
    counts = [heads_of(holder, name) or heads_of(config, name) for name in HEADS]
    queries = next((count for count in counts[:-1] if count), None)
    if queries is None or last.in_features % queries:
        return None
    size = last.in_features // queries
    fewest = min(sizes) // parts  # keys and values may have fewer heads
    if fewest % size or queries % (fewest // size):
        return None
    names = tuple(name for name, _ in columns)
    return Found(names, row, parts, fewest // size, "attention heads", queries)


def _mlp(linears: Sequence[tuple[str, nn.Linear]]) -> Found | None:
    *columns, (row, last) = linears
    sizes = {linear.out_features for _, linear in columns}
    if any(linear.in_features != last.out_features for _, linear in columns) or len(sizes) > 1:
        return None
    gated = len(columns) == 1 and sizes == {2 * last.in_features}
    if not gated and sizes != {last.in_features}:
        return None
    names = tuple(name for name, _ in columns)
    return Found(names, row, 2 if gated else 1, last.in_features, "columns of its MLP")


def heads_of(module: Any, name: str) -> int | None:
    """A number that a module or configuration has by this name; None: it has none."""
    found = getattr(module, name, None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None
