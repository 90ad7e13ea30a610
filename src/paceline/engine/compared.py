"""Which texts a model's ways are compared on, and whether it reads a text alike in a wider batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.data.dataset import Tokens
from paceline.device import PLANNED
from paceline.seams import Build, Ids, Layout
from paceline.techniques.packing import CHECKED_SAMPLES, exactly

_AMONG = 256
"""First samples of which one of a third and one of two thirds of their lengths is compared."""

_LOOKED_AT = 2**22
"""Tokens that are looked through at once for special ones."""

_SAME = 1e-4
"""Largest difference between equal results, relative to their norm: that of sums in another order, and more."""


def compared_samples(tokens: Tokens, first: Ids) -> Ids:
    """At most ``CHECKED_SAMPLES`` samples, and two at least: alone in its row, a text has no neighbour to mix with.

    The longest and the shortest of all, two between, and the shortest that hold a special token in their text:
    positions may be counted without pad tokens, and a model may weigh a text by its masks.

    Args:
        tokens: of all samples.
        first: samples to take those of middle length from.
    """
    lengths = tokens.lengths
    among = first[:_AMONG]
    ranked = among[np.argsort(lengths[among], kind="stable")]
    between = ranked[np.linspace(0, len(ranked) - 1, 4).round().astype(np.int64)[1:3]]
    found = [int(lengths.argmin()), *between.tolist(), int(lengths.argmax()), *_with_specials(tokens)]
    chosen = np.array(list(dict.fromkeys(found))[:CHECKED_SAMPLES], dtype=np.int64)
    return np.resize(chosen, max(2, len(chosen)))


def _with_specials(tokens: Tokens) -> list[int]:
    """For each special token that occurs in texts, the shortest sample that has more of it than the others."""
    kinds = dict.fromkeys([tokens.pad_id, *tokens.specials])  # the padding first: it is what positions depend on
    sought = np.array(list(kinds), dtype=np.int64)
    places: list[NDArray[np.int64]] = []
    for start in range(0, int(tokens.offsets[-1]), _LOOKED_AT):
        places.append(start + np.flatnonzero(np.isin(tokens.flat[start : start + _LOOKED_AT], sought)))
    at = np.concatenate(places) if places else np.empty(0, dtype=np.int64)
    samples, ids = np.searchsorted(tokens.offsets, at, side="right") - 1, tokens.flat[at]
    found = []
    for kind in kinds:
        holders, counts = np.unique(samples[ids == kind], return_counts=True)
        # what the tokenizer adds to every sample is in all of them
        usual = counts.min() if len(holders) == len(tokens) else 0
        inside = holders[counts > usual]
        if len(inside):
            found.append(int(inside[tokens.lengths[inside].argmin()]))
    return found


def width_notice(build: Build, layout: Layout, tokens: Tokens) -> str | None:
    """What to tell of a model whose result for a text depends on how wide its batch is; None where it does not.

    The shortest text and one of middle length are each compared alone and beside the longest, in evaluation
    mode and fp32. The model and torch's random numbers stay as they are.

    Args:
        build: with the plain forward pass.
        layout: gives padded batches no wider than their longest text.
        tokens: of all samples.
    """
    lengths = tokens.lengths
    if build.device.type == PLANNED or not len(lengths) or not 0 < lengths.min() < lengths.max():
        return None  # no text is ever padded
    # the shortest may be too short for what goes wrong in wider ones, such as a second chunk
    few = [int(lengths.argmin()), int(np.argsort(lengths, kind="stable")[len(lengths) // 2]), int(lengths.argmax())]
    results: list[torch.Tensor | None] = []
    with exactly(build.device), torch.no_grad():
        for ids in (few, few[:1], few[1:2]):
            torch.manual_seed(0)  # some hash by random numbers
            try:
                with as_it_is(build.model):
                    results.append(build.forward(build.model.eval(), layout.collate(np.array(ids))).double())
            except Exception:  # the first step says what is wrong, where there is a way to say it
                results.append(None)
    beside, *singles = results
    if beside is None:
        return None
    apart = [
        float((one[0] - beside[row]).norm() / one[0].norm().clamp_min(torch.finfo(torch.float32).tiny))
        for row, one in enumerate(singles)
        if one is not None
    ]
    away = max(apart, default=0.0)
    if not away > _SAME:  # what is not a number is none either: the loss will say so
        return None
    return (
        f"{type(build.model).__name__}: its result for a text depends on the width that its batch is padded to (logits "
        f"of one alone differ by {away:.1e} of their norm beside the longest); evaluate and predict give "
        "other numbers with other neighbours, and loop.evaluation_batch_size=1 gives each text's own"
    )


@contextlib.contextmanager
def as_it_is(model: nn.Module) -> Iterator[None]:
    """Whatever a forward pass sets on modules is undone: BigBird stays with full attention after one short text.

    No weight is copied, so that this costs no memory.
    """
    before = [
        (module, {k: (v, dict(v) if isinstance(v, dict) else None) for k, v in module.__dict__.items()})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]
            for name, (value, held) in attributes.items():
                if held is not None:
                    value.clear()
                    value.update(held)
                module.__dict__[name] = value
