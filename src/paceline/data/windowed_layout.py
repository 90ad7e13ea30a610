"""Texts of several windows: a sample is a few sequences of another layout.

Shapes: S samples, W windows of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.dataset import Tokens, ranges
from paceline.data.sample_layout import Ones, spread_evenly
from paceline.data.transfer import to_device
from paceline.seams import Batch, Ids, Layout, Size


@final
class WindowedLayout(Layout):
    """All windows of a micro-batch's texts, padded or packed as ``of_windows`` has it.

    A batch has as many labels and weights as it has texts; ``Batch.windows`` says which text each sequence is of. Where
    no text of it has more than one window it is a batch as any other.

    Args:
        of_windows: the layout in which every window is a sample, with its text's label.
        tokens: with ``windows``.
        device: where batches are put.
    """

    def __init__(self, of_windows: Layout, tokens: Tokens, device: torch.device) -> None:
        assert tokens.windows is not None
        self.of_windows, self._device = of_windows, device
        self._begins, self._counts = tokens.windows[:-1], tokens.num_windows
        self._ones = Ones(device)
        self.reads_ahead = of_windows.reads_ahead

    def collate(self, ids: Ids, draw: int | None = None, *, slots: int | None = None) -> Batch:
        batch = self.of_windows.collate(self._windows(ids), draw, slots=slots)
        counts = self._counts[ids]
        if (counts == 1).all():  # also of no samples
            return batch
        firsts = counts.cumsum() - counts
        sent = to_device(np.concatenate([firsts, np.arange(len(ids)).repeat(counts)]), self._device)
        return replace(
            batch,
            labels=batch.labels.index_select(0, sent[: len(ids)]),
            weights=self._ones(len(ids)),
            windows=sent[len(ids) :],
        )

    def over(self, inputs: Tokens, labels: NDArray[Any]) -> WindowedLayout:
        inner = self.of_windows.over(inputs.each_window(), labels.repeat(inputs.num_windows, axis=0))
        return WindowedLayout(inner, inputs, self._device)

    def expect(self, ids: Sequence[Ids]) -> None:
        self.of_windows.expect([self._windows(each) for each in ids])

    def close(self) -> None:
        self.of_windows.close()

    def size(self, ids: Ids) -> Size:
        return replace(self.of_windows.size(self._windows(ids)), samples=len(ids))

    def sorted(self, ids: Ids) -> Ids:
        """Spread the numbers of windows, so that no batch has all of the longest texts."""
        return spread_evenly(ids, self._counts)

    def batches(self, ids: Ids, batch_size: int) -> list[Ids]:
        """At most ``batch_size`` windows each, where no text alone has more: the memory of as many short texts."""
        found, windows = list[list[int]](), 0
        ordered = self.sorted(ids)
        for sample, count in zip(ordered.tolist(), self._counts[ordered].tolist(), strict=True):
            if not found or windows + count > batch_size:
                found.append([])
                windows = 0
            found[-1].append(sample)
            windows += count
        return [np.array(each, dtype=np.int64) for each in found]

    def _windows(self, ids: Ids) -> Ids:
        return ranges(self._begins[ids], self._counts[ids])
