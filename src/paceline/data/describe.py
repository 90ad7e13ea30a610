"""What the training samples look like: their labels, and what truncation takes of their texts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.contract.records import Cut, DataRecord, TextLengths
from paceline.data.dataset import Dataset, Tokens
from paceline.data.overflow import HEAD, Overflow
from paceline.data.task_rows import rows_of

MOST_LABELS = 100
"""Labels beyond the most frequent so many are left out."""

BINS = 16
"""Number of bins in the histogram of lengths."""


def described(
    dataset: Dataset,
    max_length: int,
    positions: int | None = None,
    *,
    overflow: Overflow = HEAD,
    vocabulary_size: int | None = None,
) -> DataRecord:
    """Counts and lengths over the training split.

    Args:
        max_length: tokens kept of a sample.
        positions: tokens that the model takes at most; None: any number.
        overflow: what is kept of longer ones.
        vocabulary_size: tokens that the tokenizer knows; None for images.
    """
    train, inputs = dataset.splits["train"], dataset.inputs
    num_labels = len(dataset.label_names) if rows_of(dataset.kind).has_classes else 0
    if not isinstance(inputs, Tokens):
        return DataRecord(labels=_label_counts(dataset, train), num_labels=num_labels, lengths=None)
    whole = inputs.lengths if inputs.whole is None else inputs.whole
    lengths = text_lengths(whole[train], max_length, positions)
    most = int(inputs.num_windows[train].max())
    return DataRecord(
        labels=_label_counts(dataset, train),
        num_labels=num_labels,
        lengths=replace(lengths, overflow=overflow.kind, windows=most, max_windows=overflow.max_windows),
        vocabulary_size=vocabulary_size,
        max_positions=positions,
    )


def text_lengths(whole: NDArray[np.int64], max_length: int, positions: int | None = None) -> TextLengths:
    """Describe lengths [n] before truncation, special tokens included; n is at least 1."""
    longest = int(whole.max())
    # a few very long texts would leave all others in the first bin: the last one takes them
    end = max(int(np.percentile(whole, 99)), 1)
    counts, _ = np.histogram(np.minimum(whole, end), bins=BINS, range=(0, end))
    return TextLengths(
        max_length=max_length,
        median=round(float(np.median(whole))),
        p95=round(float(np.percentile(whole, 95))),
        longest=longest,
        histogram=tuple(int(count) for count in counts),
        histogram_end=end,
        cut=_cut(whole, max_length),
        others=tuple(_cut(whole, other) for other in _others(max_length, longest, positions)),
    )


def _cut(whole: NDArray[np.int64], max_length: int) -> Cut:
    kept = np.minimum(whole, max_length).sum()
    return Cut(max_length=max_length, texts=float((whole > max_length).mean()), tokens=float(1 - kept / whole.sum()))


def _others(max_length: int, longest: int, positions: int | None) -> list[int]:
    """Lengths worth a look: where texts are cut, twice and four times as many tokens, and enough for all texts."""
    if longest <= max_length:
        return []
    wanted = [other for other in (2 * max_length, 4 * max_length) if other < longest] + [longest]
    return sorted({min(other, positions or other) for other in wanted} - {max_length})


def _label_counts(dataset: Dataset, train: NDArray[np.int64]) -> dict[str, int]:
    """Training samples by label, the most frequent first; none without classes."""
    names = dataset.label_names
    counts = rows_of(dataset.kind).label_counts(dataset.labels[train], len(names))
    if counts is None:
        return {}
    most = np.argsort(-counts, kind="stable")[:MOST_LABELS]
    return {names[label]: int(counts[label]) for label in most}
