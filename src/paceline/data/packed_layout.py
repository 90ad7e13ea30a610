"""Token sequences one after the other in one row: nothing is padded, no mask is built.

Shapes: S samples, T positions of the row, P sequences in it: the samples, then filler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.contract.errors import DataError
from paceline.data.dataset import Tokens
from paceline.data.sample_layout import TokenLayout, spread_evenly
from paceline.data.transfer import Arrays, Shapes, to_device
from paceline.seams import Batch, Ids, Packed, Size

SMALLEST_BUCKET, LARGEST_BUCKET = 64, 2048

CAPTURE_SECONDS, TOKENS_PER_SECOND = 0.06, 1.3e6
"""What another graph, its first launch included, and a training token take: DistilBERT on an H200, 24 November 2026. On
one GPU, where nothing waits for it, a graph takes a third of that. Only the product counts, which differs less between
GPUs and models than either."""


def bucket_for(lengths: NDArray[np.int64], samples: int, microbatches: int) -> int:
    """The multiple that a row's positions are rounded up to: a power of two from 64 to 2,048.

    Totals of ``samples`` random samples lie within about six standard deviations. Cut into n buckets, a graph is
    captured for each (n times ``CAPTURE_SECONDS``) and half a bucket a row is filler (1/n of the run's seconds times
    half the spread over the mean total): the sum is least where both are equal, so that longer runs get finer buckets.

    Args:
        lengths: [n] tokens of each sample of the data set.
        samples: samples of a micro-batch.
        microbatches: of the whole run.
    """
    spread = 6 * float(lengths.std()) * math.sqrt(samples) if len(lengths) else 0.0
    seconds = microbatches * spread / 2 / TOKENS_PER_SECOND
    bucket = 1 << round(math.log2(max(spread / max(math.sqrt(seconds / CAPTURE_SECONDS), 1), 1)))
    return min(max(bucket, SMALLEST_BUCKET), LARGEST_BUCKET)


@dataclass(frozen=True)
class _Row:
    """What the host knows of a packed row; every array is small."""

    samples: Ids
    """[S]: the ids longest first, as they stand in the row."""
    sequence: NDArray[np.int64]
    """[S]: where in ``samples`` each of the given ids is."""
    bounds: NDArray[np.int64]
    """[P + 1]: sequence p is positions ``bounds[p]:bounds[p + 1]``."""

    @property
    def real(self) -> int:
        """Positions with a sample's token; filler begins here."""
        return int(self.bounds[len(self.samples)])

    @property
    def slots(self) -> int:
        """T: all positions."""
        return int(self.bounds[-1])


@final
class PackedLayout(TokenLayout):
    """All samples of a micro-batch in one row, with where each begins; for attention that takes ``cu_seqlens``.

    In the row the longest sample stands first, because attention kernels balance better so; labels and weights keep
    the order of the ids. The number of positions is rounded up to a multiple of ``bucket`` with sequences of pad
    tokens, so that attention writes all of its output; the number of sequences is always the same for S samples, the
    last ones being empty. So shapes depend on S and T alone. A micro-batch of no samples is a row of one, of weight 0.

    Args:
        tokens: the samples.
        labels: [n] or [n, C], as in ``Dataset``.
        device: where batches are put.
        token_types: whether the model takes token_type_ids; they are given where the tokenizer gives them.
        all_types: whether they are given also where all are 0, which some models do not take as they take none.
        first_position: position id of a sequence's first token (RoBERTa counts from its pad id + 1). Where it is not
            0, a pad token in a text has the position of the filling and is not counted, as transformers has it.
        bucket: what the number of positions is a multiple of; see ``bucket_for``.
        resident: keep all tokens on the device and gather there.

    Raises:
        DataError: a sample has no tokens at all.
    """

    def __init__(
        self,
        tokens: Tokens,
        labels: NDArray[Any],
        device: torch.device,
        *,
        token_types: bool,
        first_position: int,
        bucket: int,
        resident: bool,
        all_types: bool = False,
    ) -> None:
        _require_tokens(tokens.lengths)
        super().__init__(tokens, labels, device, token_types, all_types, resident)
        self._settings = {
            "token_types": token_types,
            "all_types": all_types,
            "first_position": first_position,
            "bucket": bucket,
        }
        self._first, self._bucket, self._stand_in = first_position, bucket, np.zeros(1, dtype=np.int64)
        self._fillers = -(-bucket // self._longest) if len(tokens) else 0
        # looked for once: counting takes another pass over each row
        self._skips = first_position > 0 and bool((tokens.flat == first_position - 1).any())
        # what is read ahead has its shape before the other ranks' is looked at
        self.widens_by = LARGEST_BUCKET if resident else 0

    def size(self, ids: Ids) -> Size:
        real = int(self._lengths[ids].sum())
        return Size(len(ids), real, self._rounded(real if len(ids) else int(self._lengths[self._stand_in].sum())))

    def sorted(self, ids: Ids) -> Ids:
        """Every order wastes the same; this one gives all micro-batches about the same total: few shapes arise."""
        return spread_evenly(ids, self._lengths)

    def _batch(self, values: dict[str, Tensor], labels: Tensor, weights: Tensor, draw: int | None) -> Batch:
        packed = Packed(values.pop("cu_seqlens"), values.pop("sequence"), self._longest)
        return Batch(values, labels, weights, packed)

    def _rounded(self, real: int) -> int:
        return -(-real // self._bucket) * self._bucket

    def _row(self, ids: Ids, slots: int | None = None) -> _Row:
        lengths = self._lengths[ids]
        # a row that is made wider needs more filler, and always the same number of it
        fillers = self._fillers if slots is None else self._fillers + -(-self.widens_by // self._longest)
        order = np.argsort(-lengths, kind="stable")
        sequence = np.empty(len(ids), dtype=np.int64)
        sequence[order] = np.arange(len(ids))
        bounds = np.zeros(len(ids) + fillers + 1, dtype=np.int64)
        np.cumsum(lengths[order], out=bounds[1 : len(ids) + 1])
        real = int(bounds[len(ids)])
        # filler as long as any sample until the row is full, then empty sequences
        full = real + self._longest * np.arange(1, fillers + 1)
        bounds[len(ids) + 1 :] = np.minimum(full, self._rounded(real) if slots is None else slots)
        return _Row(ids[order], sequence, bounds)

    def _gathered(self, ids: Ids, slots: int | None, flat: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Builds the row on the device from one small array: a few numbers a sequence."""
        row = self._row(ids, slots)
        begins = row.bounds[:-1]
        fillers = len(begins) - len(ids)
        # what to add to a position of the row to find its token in flat, where filler reads the pad tokens at the end
        shift = np.concatenate([self._tokens.offsets[row.samples], np.full(fillers, self._tokens.offsets[-1])])
        parts = [row.sequence, ids, row.bounds, shift - begins, begins - self._first]
        if self._second is not None:
            second = np.concatenate([self._second[row.samples], np.full(fillers, self._longest)])
            parts.append(begins + second)
        sent = to_device(np.concatenate(parts), self._device).split([len(part) for part in parts])
        sequence, chosen, bounds, shift_on, origin = sent[:5]

        positions = torch.arange(row.slots, device=self._device)
        which = torch.searchsorted(bounds[1:], positions, right=True)
        at = positions + shift_on.index_select(0, which)
        read = flat.index_select(0, at)
        # no views: a tracer looks at what they are views of, and takes the copies that a graph reads for something else
        across = positions[None]
        inputs = {
            "input_ids": read[None].to(torch.int64, copy=True),
            "position_ids": across - origin.index_select(0, which),
        }
        if self._skips:
            counts = read != self._first - 1
            before = torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)])
            since = before[1:] - before.index_select(0, bounds).index_select(0, which)
            inputs["position_ids"] = (since * counts + self._first - 1)[None]
        if self._second is not None:
            inputs["token_type_ids"] = (across >= sent[5].index_select(0, which)).long()
        if self._types_there is not None:
            inputs["token_type_ids"] = self._types_there.index_select(0, at)[None].long()
        return {
            **inputs,
            "cu_seqlens": bounds.int(),
            "sequence": sequence,
            "labels": labels.index_select(0, chosen),
        }

    def _shapes(self, ids: Ids) -> Shapes:
        names = ["input_ids", "position_ids"] + ["token_type_ids"] * self._gives_types
        shape = (1, self._rounded(int(self._lengths[ids].sum())))
        return {
            **dict.fromkeys(names, (shape, torch.int64)),
            "cu_seqlens": ((len(ids) + self._fillers + 1,), torch.int32),
            "sequence": ((len(ids),), torch.int64),
        }

    def _fill(self, ids: Ids, arrays: Arrays) -> None:
        row = self._row(ids)
        begins, widths = row.bounds[:-1], np.diff(row.bounds)
        positions = np.arange(row.slots)
        within = positions - np.repeat(begins, widths)
        shift = np.repeat(self._tokens.offsets[row.samples] - begins[: len(ids)], widths[: len(ids)])
        arrays["input_ids"][0, : row.real] = self._tokens.flat[positions[: row.real] + shift]
        arrays["input_ids"][0, row.real :] = self._tokens.pad_id
        np.add(within, self._first, out=arrays["position_ids"][0])
        if self._skips:
            counts = arrays["input_ids"][0] != self._first - 1
            before = np.concatenate([[0], np.cumsum(counts)])
            since = before[1:] - np.repeat(before[begins], widths)
            arrays["position_ids"][0] = since * counts + self._first - 1
        if self._second is not None:
            second = np.repeat(self._second[row.samples], widths[: len(ids)])
            arrays["token_type_ids"][0, : row.real] = within[: row.real] >= second
            arrays["token_type_ids"][0, row.real :] = 0
        if self._types is not None:
            arrays["token_type_ids"][0, : row.real] = self._types[positions[: row.real] + shift]
            arrays["token_type_ids"][0, row.real :] = self._tokens.pad_type
        arrays["cu_seqlens"][...] = row.bounds
        arrays["sequence"][...] = row.sequence


def _require_tokens(lengths: NDArray[np.int64]) -> None:
    empty = np.flatnonzero(lengths == 0)
    if len(empty):
        raise DataError(
            f"sample {empty[0]} has no tokens" + (f", nor have {len(empty) - 1:,} others" if len(empty) > 1 else ""),
            why="a packed row has no place for a sequence of length 0: it has no first token to classify",
            fix="--set techniques.packing=false, or drop these rows (--set data.on_bad_row=skip for empty texts)",
        )
