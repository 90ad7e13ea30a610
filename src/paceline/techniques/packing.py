"""Packing: the texts of a micro-batch stand one after the other in one row, isolated from one another by attention.

The model is an unmodified encoder of transformers. Its attention goes to ``varlen_attention`` through transformers'
registry, and one forward hook hands the head what it looks for: each sample's first position, or its mean.

Whether that is right for a model is not read off a list: before a run, logits and gradients of a real mini-batch are
computed both ways and compared.

Shapes: S samples, L padded length, T positions of a packed row, P sequences in it, H heads, D head size, C channels.
Source: Krell et al., Efficient Sequence Packing without Cross-contamination, arXiv 2107.02027; Zeng et al., Boosting
Distributed Training Performance of the Unpadded BERT Model, arXiv 2208.08124.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.compare import Results, beyond_rounding, exactly, results, spread, trial_of
from paceline.contract.errors import ModelError, RecipeError, in_a_line
from paceline.contract.spans import activity
from paceline.kernels.one_query_attention import one_query_attention
from paceline.kernels.varlen_attention import operator_for, varlen_attention, varlen_attention_joined
from paceline.seams import Batch, Build, Forward, Ids, Layout, LayoutKind, Packed

NAME = "paceline_packed"
"""The attention's name in transformers' registry. Names with flash, sdpa or flex in them would be treated specially."""

POOLS_EARLY = "pools_early"
"""Attribute of a model whose last block hands on one position a sequence, see ``early_pooling.py``."""


def apply(
    build: Build,
    packed: Layout,
    ids: Ids,
    *,
    required: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Build:
    """The build with packed batches, if its model computes the same with them.

    Args:
        build: with a padded layout.
        packed: the packed layout of the same samples; its batches have ``packed`` set.
        ids: the first micro-batch; packed and padded are compared on some of it.
        required: the recipe insists on packing.
        dtype: number format that the steps compute in; it decides about the attention operator.

    Returns:
        A build whose decisions say why its batches are packed, or why they stay padded.

    Raises:
        RecipeError: ``required``, and the model cannot be packed.
    """
    reason = difference(build, packed, ids)
    if reason is not None:
        if required:
            raise RecipeError(
                "techniques.packing = true", reason, "--set techniques.packing=auto, which leaves it off here"
            )
        return build.decided("techniques.packing", False, reason).carried_out(layout="padded")

    forward, before = apply_packing(build.model), build.forward
    agreed = "packed and padded gradients of this model are equal up to rounding"
    operator = _operator(build.model, build.device, dtype, _bounds(packed.collate(ids[:1])).max_length)
    told = build.decided("techniques.packing", True, agreed).carried_out(layout="packed", attention=operator)
    return replace(
        told,
        layout=packed,
        layout_kind=LayoutKind.PACKED,
        forward=lambda model, batch: (before if batch.packed is None else forward)(model, batch),
    )


def apply_packing(model: Any) -> Forward:
    """Make a transformers encoder with a classification head take packed batches, besides padded ones.

    The model is the same as before for everyone who does not give it a packed row, and is saved as it was.

    Returns:
        Model and batch to logits [S, C], for batches with and without ``packed``.

    Raises:
        ModelError: its attention does not go through transformers' registry, or no encoder is found in it.
    """
    reason = unsupported(model)
    if reason is not None:
        raise ModelError("packing", reason, "train this model on padded batches")
    under_way: list[tuple[Packed, bool]] = []
    mean = getattr(model.config, "classifier_pooling", "cls") == "mean"

    def pool(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        """(1, T, C), or (1, P, C) pooled early, to (S, 1, C): whoever looks for a sample's first position finds it."""
        if not under_way:
            return output
        (packed, early), hidden = under_way[-1], hidden_of(output)[0]
        found = hidden.index_select(0, packed.sequence) if early else pooled(hidden, packed, mean)
        return _replaced(output, found[:, None])

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        if batch.packed is None:
            return model(**batch.inputs).logits  # type: ignore[no-any-return]
        under_way.append((batch.packed, getattr(model, POOLS_EARLY, False)))
        try:
            bounds = {"cu_seq_lens_q": batch.packed.cu_seqlens, "max_length_q": batch.packed.max_length}
            return model(**batch.inputs, **bounds).logits  # type: ignore[no-any-return]
        finally:
            under_way.pop()

    _register()
    model.set_attn_implementation(NAME)
    stack_of(model).register_forward_hook(pool)
    return forward


def pooled(hidden: Tensor, packed: Packed, mean: bool) -> Tensor:
    """What stands for each sample: [T, C] to [S, C], its first position or the mean over all of its positions."""
    if not mean:
        return hidden.index_select(0, packed.first)
    lengths = packed.cu_seqlens.diff()
    positions = torch.arange(hidden.shape[0], device=hidden.device, dtype=torch.int32)
    which = torch.searchsorted(packed.cu_seqlens[1:], positions, right=True)
    exact = torch.promote_types(hidden.dtype, torch.float32)
    sums = hidden.new_zeros((len(lengths), hidden.shape[1]), dtype=exact).index_add(0, which, hidden.to(exact))
    means = sums.index_select(0, packed.sequence) / lengths.index_select(0, packed.sequence)[:, None]
    return means.to(hidden.dtype)


def first_position(model: nn.Module) -> int:
    """Position id of a sequence's first token: RoBERTa and its kin count from the padding index + 1, others from 0."""
    table = _position_table(model)
    return 0 if table is None or table.padding_idx is None else table.padding_idx + 1


def _position_table(model: nn.Module) -> nn.Embedding | None:
    """The learned positions; None for rotary and relative ones."""
    found = (m for name, m in model.named_modules() if name.rpartition(".")[2] == "position_embeddings")
    return next((module for module in found if isinstance(module, nn.Embedding)), None)


def unsupported(model: nn.Module) -> str | None:
    """Why no packed row can be given to this model at all, or None."""
    name = type(model).__name__
    # transformers' own mark of models that call whatever attention is registered
    if not hasattr(model, "set_attn_implementation"):
        return f"{name}: not a model of transformers, so its attention cannot be told where texts end"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name}: its attention does not go through transformers' registry"
    if stack_of(model) is None:
        return f"{name}: no encoder was found in it"
    return None


def stack_of(model: Any) -> Any:
    """The module whose output is pooled: the stack of blocks with its last norm; a pooler comes after it."""
    base = model.base_model
    return next((getattr(base, name) for name in ("encoder", "transformer", "final_norm") if hasattr(base, name)), None)


def hidden_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _replaced(output: Any, hidden: Tensor) -> Any:
    """A stack's output with other hidden states: a tensor, a tuple, or one of transformers' named outputs."""
    if isinstance(output, Tensor):
        return hidden
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    output.last_hidden_state = hidden
    return output


# -- in transformers' registry -----------------------------------------------------------------------------------------


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What every layer calls: (1, H, T, D) each to (1, T, H, D) when a packed row is under way, else transformers' own.

    Args:
        sliding_window: distance at which positions stop to see each other.
        others: what only some models pass. A tensor among them changes the result in a way unknown here.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if attention_mask is None and sliding_window is not None:
            attention_mask = _band(query, sliding_window)
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return out, None
    foreign = [name for name, given in others.items() if isinstance(given, Tensor) and name != "position_ids"]
    causal = others.get("is_causal")
    if foreign or attention_mask is not None or (getattr(module, "is_causal", True) if causal is None else causal):
        what = ", ".join(foreign) or ("a mask" if attention_mask is not None else "the order of the tokens")
        raise ModelError(f"{module._get_name()} depends also on {what}, which packing does not know")
    window = None if sliding_window is None else sliding_window - 1
    # the last block's layer may ask for one position a sequence
    one_query = getattr(module, "one_query", None)
    if one_query is not None:
        if window is not None:
            raise ModelError(f"{module._get_name()} sees a window of its text, which early pooling does not know")
        q, kv = one_query(query, key, value)
        out = one_query_attention(q, kv, cu_seq_lens_q, max_length_q, dropout=dropout, scale=scaling)
        return out[None], None
    # layers whose three products are one offer it as it is
    offer = getattr(module, "joined", None)
    joined = None if offer is None else offer(query, key, value)
    if joined is not None:
        out = varlen_attention_joined(
            joined.squeeze(0), cu_seq_lens_q, max_length_q, dropout=dropout, scale=scaling, window=window
        )
        return out[None], None
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    out = varlen_attention(q, k, v, cu_seq_lens_q, max_length_q, dropout=dropout, scale=scaling, window=window)
    return out[None], None


def _mask(*, attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
    """The mask of a padded batch, as for sdpa; none for a packed row, which comes without an attention mask."""
    from transformers.masking_utils import sdpa_mask

    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **others)


def _band(query: Tensor, sliding_window: int) -> Tensor:
    """[L, L]: who sees whom in a text without padding."""
    at = torch.arange(query.shape[2], device=query.device)
    return (at[:, None] - at).abs() < sliding_window


# -- the self-check ----------------------------------------------------------------------------------------------------


@activity("comparing")
def difference(build: Build, packed: Layout, ids: Ids) -> str | None:
    """Where packed and padded differ: logits, then the gradient of each parameter; None where they are equal.

    Computed in fp32, without dropout, on a copy of the model and up to eight samples of very different length, so that
    the model, its gradients, its buffers and torch's random numbers stay as they are. What raises is a difference too.
    Small differences are looked at again in fp64, see ``beyond_rounding``.
    """
    model, task, name = build.model, build.task, type(build.model).__name__
    chosen = spread(packed, ids)
    reason = unsupported(model) or _beyond_positions(model, packed.collate(chosen))
    if reason is not None:
        return reason
    with exactly(build.device):
        trial = trial_of(model)
        rows, one_row = build.layout.collate(chosen), packed.collate(chosen)
        expected = results(trial, build.forward, task, rows)
        try:
            forward = apply_packing(trial)
            found = results(trial, forward, task, one_row)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, it is the answer to the question, and is reported
            return f"{name}: a packed row fails with {in_a_line(error)}"

        def in_fp64() -> tuple[Results, Results]:
            trial.double()
            # made for packing, the copy still computes padded batches as before
            return results(trial, build.forward, task, rows), results(trial, forward, task, one_row)

        return beyond_rounding(name, expected, found, in_fp64, ways=("packed", "padded"))


def _beyond_positions(model: nn.Module, batch: Batch) -> str | None:
    """Looked at before the forward pass: on a GPU an index beyond a table ends the process."""
    table, longest = _position_table(model), _bounds(batch).max_length
    if table is None or first_position(model) + longest <= table.num_embeddings:
        return None
    usable = table.num_embeddings - first_position(model)
    return f"{type(model).__name__}: a text has {longest} tokens, and the model has positions for {usable}"


def _bounds(batch: Batch) -> Packed:
    if batch.packed is None:
        raise TypeError("this layout's batches are not packed")
    return batch.packed


def _operator(model: Any, device: torch.device, dtype: torch.dtype, max_length: int) -> str:
    """Name of the attention operator that the model's full attention takes in ``dtype``."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q = torch.empty(0, config.num_attention_heads, size, dtype=dtype, device=device)
    return operator_for(q, max_length, 0.0, None)
