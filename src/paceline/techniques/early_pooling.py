"""Early pooling: the last block computes, of each text, only the position that the head reads.

A head that reads each text's first position lets everything else of the last block's result fall, and the gradient of
what falls is zero. So the block is given the first positions alone: queries, the layers after attention and the norms
are computed for one position a text. Keys and values are still those of all positions. Five sixths of the block's
matrix products are not computed at all, forward and backward: of six blocks, a seventh of all products.

The block runs as it is written, on a shorter row. Only its attention module is told of the whole row, by a stand-in
whose products of key and value nobody reads, and attention takes its keys and values from there. That nothing comes
between is seen in a pass; that logits and every gradient stay the same is computed before the first step.

Shapes: T positions of a packed row, P sequences in it, H heads, D head size, C channels.
Source: queries of pooled positions before keys and values of all are those of Dai et al., Funnel-Transformer, arXiv
2006.03236; here for a block of which nothing else is read, so that nothing is approximated.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.compare import Results, beyond_rounding, exactly, results, spread, trial_of
from paceline.contract.errors import ModelError, RecipeError, in_a_line
from paceline.contract.spans import activity
from paceline.seams import Batch, Build, Ids, LayoutKind
from paceline.techniques import packing
from paceline.techniques.fused_qkv import place, triple

SETTING = "techniques.early_pooling"

BOUNDS = "cu_seq_lens_q"
"""What a block is given of a packed row, and not of a padded batch."""

ROW = "paceline_row"
"""Keyword that hands the chosen positions and the whole row from the block down to its attention."""


def apply_early_pooling(model: nn.Module, block: nn.Module) -> None:
    """Have the last block of a packed model compute the first position of each text alone, in place.

    Padded batches pass it as before, and so do names of weights and whatever is saved.

    Args:
        model: after ``apply_packing``; its head reads first positions.
        block: the last one; nothing but norms may come after it.

    Raises:
        ModelError: the block has no attention module with three products of one size.
    """
    found = _attention(block)
    if found is None:
        raise ModelError(
            f"early pooling: {type(block).__name__} has no attention with products for query, key and value",
            "the last block is told apart by them",
            "leave it as it is",
        )
    module, names = found
    # on the instances, so that their classes and every other model of them are left alone
    module.forward = types.MethodType(_attention_forward(names), module)
    block.forward = types.MethodType(_block_forward, block)
    setattr(model, packing.POOLS_EARLY, True)


def apply(build: Build, setting: bool | Literal["auto"], ids: Ids) -> Build:
    """The build with a shorter last block, if its model computes the same with it.

    Args:
        build: before anything else has taken hold of its blocks.
        ids: the first micro-batch; both ways are compared on some of it.

    Raises:
        RecipeError: ``setting`` is true, and the model cannot have it.
    """
    if setting is False:
        return build.carried_out(early_pooling="off")
    reason = difference(build, ids)
    if reason is None:
        apply_early_pooling(build.model, build.blocks[-1])
        agreed = "the head reads one position a text, and gradients without the others are equal up to rounding"
        return build.decided(SETTING, True, agreed).carried_out(early_pooling="the last block")
    if setting is True:
        raise RecipeError(f"{SETTING} = true", reason, f"--set {SETTING}=auto, which goes without where it cannot be")
    return build.decided(SETTING, False, reason).carried_out(early_pooling=f"off: {reason}")


def unsupported(build: Build) -> str | None:
    """Why the last block of this build cannot be shortened at all, or None."""
    if build.layout_kind is not LayoutKind.PACKED:
        return "it is for texts in packed rows"
    if getattr(build.model.config, "classifier_pooling", "cls") == "mean":
        return "the head reads every position of a text"
    if not build.blocks or _attention(build.blocks[-1]) is None:
        return "the last block has no attention with three products of one size for query, key and value"
    return None


@activity("comparing")
def difference(build: Build, ids: Ids) -> str | None:
    """Where results with and without differ: logits, then the gradient of each parameter; None where they are equal.

    Computed in fp32 without dropout on a copy of the model, as packing is. What raises is a difference too.
    """
    reason = unsupported(build)
    if reason is not None:
        return reason
    name = next(name for name, module in build.model.named_modules() if module is build.blocks[-1])
    batch = build.layout.collate(spread(build.layout, ids))
    with exactly(build.device):
        trial = trial_of(build.model)
        block = trial.get_submodule(name)
        with _watched(trial, block) as calls:
            expected = results(trial, build.forward, build.task, batch)
        if calls != [True]:
            return "something comes after its last block, or the block is passed more than once"
        try:
            found = _shortened(build, trial, block, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, it is the answer to the question, and is reported
            return f"a shorter last block fails with {in_a_line(error)}"
        name = type(build.model).__name__

        def in_fp64() -> tuple[Results, Results]:
            trial.double()
            return results(trial, build.forward, build.task, batch), _shortened(build, trial, block, batch)

        return beyond_rounding(name, expected, found, in_fp64, ways=("early pooled", "late pooled"))


def _shortened(build: Build, trial: nn.Module, block: nn.Module, batch: Batch) -> Results:
    """Results of the model ``trial`` with a shorter last ``block``; the model is as it was afterwards."""
    try:
        apply_early_pooling(trial, block)
        found = results(trial, build.forward, build.task, batch)
        training = block.training
        block.train()  # what training alone puts between products and attention is seen too
        with torch.no_grad():
            build.forward(trial, batch)
        block.train(training)
        return found
    finally:
        # each is bound to its own module: a circle, which would hold the copy until the garbage collector comes
        for module in block.modules():
            vars(module).pop("forward", None)
        vars(trial).pop(packing.POOLS_EARLY, None)


@final
class OneQuery:
    """``self`` of the last attention module's forward for one pass: the module, but for its three products.

    Queries are those of the chosen positions. What stands for keys and values only has their shape; the real ones are
    computed of the whole row when attention asks for them.

    Args:
        module: with three linear layers called ``names``, for query, key and value.
        chosen: [1, P, C]: what the module must be given.
        row: [1, T, C]: what keys and values are computed of.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], chosen: Tensor, row: Tensor) -> None:
        self._stands_for, self._names, self._chosen, self._row = module, names, chosen, row
        query, key, value = (getattr(module, name) for name in names)
        self._query, self._others = query, (key, value)
        self._queries: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        # not kept as attributes: the circle would hold the row until the garbage collector comes, a row a batch
        return self._projected if name in self._names else getattr(self._stands_for, name)

    def _projected(self, hidden: Tensor) -> Tensor:
        """[1, P, C] -> [1, P, H D]: the queries, whoever asks."""
        if hidden is not self._chosen:
            raise ModelError(f"{type(self._stands_for).__name__} is not given what its block is given")
        if self._queries is None:
            self._queries = self._query(hidden)
        return self._queries

    def one_query(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [P, H, D], and keys and values [T, 2, H, D], for an attention function given this as its module.

        Args:
            query, key, value: [1, H, P, D], as they reach attention.

        Raises:
            ModelError: they are anything else than the products; a compiler does not look.
        """
        assert self._queries is not None
        _, heads, positions, size = query.shape
        if not torch.compiler.is_compiling():
            made = place(self._queries.view(1, positions, heads, size).transpose(1, 2))
            if not place(query) == place(key) == place(value) == made:
                raise ModelError(f"{type(self._stands_for).__name__} changes its products before attention")
        product = self._keys_and_values()
        # squeezed, not indexed: the gradient is then a view, too
        return query.squeeze(0).transpose(0, 1), product.squeeze(0).unflatten(-1, (2, heads, size))

    def _keys_and_values(self) -> Tensor:
        """[1, T, 2 H D], in one product; in two where adapters stand beside them."""
        if any(type(linear) is not nn.Linear for linear in self._others):
            return torch.cat([linear(self._row) for linear in self._others], dim=-1)
        weights = torch.cat([linear.weight for linear in self._others])
        biases = [linear.bias for linear in self._others if linear.bias is not None]
        return F.linear(self._row, weights, torch.cat(biases) if biases else None)


def _block_forward(block: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The block's own forward, of the first positions alone where the row is packed."""
    bounds = kwargs.get(BOUNDS)
    if bounds is None:
        return type(block).forward(block, hidden, *args, **kwargs)
    # an empty sequence at the row's end begins behind it; nobody reads what comes of it
    first = bounds[:-1].clamp(max=hidden.shape[1] - 1)
    chosen = hidden.index_select(1, first)
    return type(block).forward(block, chosen, *args, **kwargs, **{ROW: (chosen, hidden)})


@functools.cache
def _attention_forward(names: tuple[str, ...]) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        row = kwargs.pop(ROW, None)
        itself = module if row is None else OneQuery(module, names, *row)
        return type(module).forward(itself, *args, **kwargs)

    return forward


def _attention(block: nn.Module) -> tuple[nn.Module, tuple[str, ...]] | None:
    """The block's one attention module that can be shortened, and what its three products are called."""
    found = [(module, names) for module in block.modules() if (names := triple(module, adapted=True))]
    if len(found) != 1 or "forward" in vars(block):
        return None
    module, names = found[0]
    sizes = {getattr(module, name).out_features for name in names}
    return found[0] if len(sizes) == 1 else None


@contextlib.contextmanager
def _watched(model: nn.Module, block: nn.Module) -> Iterator[list[bool]]:
    """Fills a list, one entry a pass of the block: whether its result is what the stack hands on to be pooled."""
    calls: list[bool] = []
    made: list[Tensor] = []

    def of_block(_module: nn.Module, _arguments: Any, output: Any) -> None:
        made.append(packing.hidden_of(output))
        calls.append(False)

    def of_stack(_module: nn.Module, _arguments: Any, output: Any) -> None:
        calls[-1:] = [place(packing.hidden_of(output)) == place(made[-1])]

    hooks = [
        block.register_forward_hook(of_block),
        packing.stack_of(model).register_forward_hook(of_stack, prepend=True),  # before it is pooled
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
