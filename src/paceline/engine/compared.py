"""Which texts a model's ways are compared on, and whether it reads a text alike in a wider batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.compare import CHECKED_SAMPLES, exactly, trial_of
from paceline.contract.errors import UserError, in_a_line
from paceline.data.dataset import Tokens
from paceline.machine.device import PLANNED
from paceline.seams import Build, Ids, Layout

_AMONG = 256
"""First samples of which one of a third and one of two thirds of their lengths is compared."""

_LOOKED_AT = 2**22
"""Tokens that are looked through at once for special ones."""

_NEIGHBOURS = 4
"""Lengths around the middle one of which a text is compared alone and in a wider batch."""

_SMALLEST = torch.finfo(torch.float32).tiny

_SAME = 1e-4
"""Largest difference between equal results, relative to their norm: that of sums in another order, and more."""

_ROUNDING = 2e-6
"""Up to here it is rounding; from here up to ``_SAME`` it is looked at again in fp64, which rounds far less."""

_SAME_IN_FP64 = 1e-6
"""As ``_SAME``; for some models compute parts of it in fp32 whatever their weights are."""

_COPIED = 2**28
"""Parameters of the largest model that is copied in fp64 for that: 2 GiB."""


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
    """What to tell of a model whose result for a text depends on how wide its batch is, or of which that is not known.

    The shortest text and a few around the middle length are each compared alone and beside the longest, in evaluation
    mode and fp32. The model and torch's random numbers stay as they are. None: it reads them alike.

    Args:
        build: with the plain forward pass.
        layout: gives padded batches no wider than their longest text.
        tokens: of all samples.
    """
    lengths = tokens.lengths
    if build.device.type == PLANNED or not len(lengths) or not 0 < lengths.min() < lengths.max():
        return None  # no text is ever padded
    singles, longest = _of_several_lengths(lengths), int(lengths.argmax())
    name, apart = type(build.model).__name__, []
    failed = f"{name}: whether its result for a text depends on the width that its batch is padded to is not known"
    with exactly(build.device), torch.no_grad():
        try:
            beside = _result(build, layout, [*singles, longest])
        except Exception as error:
            return f"{failed}: a pass of {len(singles) + 1} texts of up to {lengths.max():,} tokens {_why(error)}"
        for row, sample in enumerate(singles):
            try:
                alone = _result(build, layout, [sample])
            except Exception as error:
                return f"{failed}: a pass of one text of {lengths[sample]:,} tokens {_why(error)}"
            apart.append(_apart(alone[0], beside[row]))
        away = max(apart)
        if not away > _ROUNDING:  # what is not a number is none either: the loss will say so
            return None
        if away <= _SAME:
            away = _apart_in_fp64(build, layout, singles[apart.index(away)], longest)
            if not away > _SAME_IN_FP64:
                return None
    return (
        f"{name}: its result for a text depends on the width that its batch is padded to (logits "
        f"of one alone differ by {away:.1e} of their norm beside the longest); evaluate and predict give "
        "other numbers with other neighbours, and loop.evaluation_batch_size=1 gives each text's own"
    )


def _of_several_lengths(lengths: NDArray[np.integer]) -> list[int]:
    """The shortest sample, and one of each of the four lengths around the middle one.

    The shortest may be too short for what goes wrong in wider batches, such as a second chunk. A model that takes
    neighbouring tokens together (Funnel: two, and two of these) reads every fourth length alike.
    """
    known, first = np.unique(lengths, return_index=True)
    among = first[:-1]  # but for the longest
    start = max(0, min(len(known) // 2 - _NEIGHBOURS // 2, len(among) - _NEIGHBOURS))
    return list(dict.fromkeys([int(first[0]), *map(int, among[start : start + _NEIGHBOURS])]))


def _apart(alone: torch.Tensor, beside: torch.Tensor) -> float:
    return float((alone - beside).norm() / alone.norm().clamp_min(_SMALLEST))


def _apart_in_fp64(build: Build, layout: Layout, sample: int, longest: int) -> float:
    """How far a copy of the model in fp64 takes a text alone and beside the longest apart; 0 where none can be made."""
    if sum(parameter.numel() for parameter in build.model.parameters()) > _COPIED:
        return 0.0
    try:
        copy = replace(build, model=trial_of(build.model).double())
        alone, beside = (_result(copy, layout, samples)[0] for samples in ([sample], [sample, longest]))
    except Exception:  # some models do not compute in fp64, and what they compute in fp32 was near enough
        return 0.0
    return _apart(alone, beside)


def _result(build: Build, layout: Layout, samples: list[int]) -> torch.Tensor:
    torch.manual_seed(0)  # some hash by random numbers
    with as_it_is(build.model):
        return build.forward(build.model.eval(), layout.collate(np.array(samples))).double()


def _why(error: Exception) -> str:
    """Why a pass fails, in one line; the first step says it in full, where it fails there too."""
    if isinstance(error, UserError):
        return f"fails: {error.why or error.what}"
    return f"fails: {in_a_line(error)}"


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
