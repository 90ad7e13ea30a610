"""The common parts of layouts: samples on the device or read ahead from the host, weights, filler.

Filler is what a rank runs where a step's samples have run out. It is made of real samples, so that nothing in it is out
of the ordinary: a row of padding alone would give some attention kernels a sum over nothing, and not a number times
weight 0 is not 0. It is the same each time, so that it adds one shape.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.dataset import Tokens
from paceline.data.resident import longest, resident_tokens, resident_types
from paceline.data.transfer import Arrays, ReadAhead, Shapes, torch_dtype
from paceline.seams import Batch, Ids, Layout


@final
class Ones:
    """Weights of real samples.

    As many samples get the same tensor as before: nothing is launched for it, and a captured step need not copy it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[int, Tensor] = {}

    def __call__(self, samples: int) -> Tensor:
        """fp32 [samples], not to be changed."""
        if samples not in self._known:
            self._known[samples] = torch.ones(samples, device=self._device)
        return self._known[samples]


def as_filler(batch: Batch) -> Batch:
    """The batch with every sample's weight 0: its loss is 0, and so is every gradient."""
    # a label that is missing, as those of a test split may be, would stop the loss
    return replace(batch, labels=torch.zeros_like(batch.labels), weights=torch.zeros_like(batch.weights))


def spread_evenly(ids: Ids, sizes: NDArray[np.int64]) -> Ids:
    """Return the ids in an order in which any consecutive ones have about the same total of ``sizes``.

    Samples by size are visited in steps of the golden ratio, which spreads any number of consecutive ones evenly over
    the sizes (Weyl 1916: multiples of an irrational number are equidistributed).
    """
    by_size = ids[np.argsort(sizes[ids], kind="stable")]
    return by_size[np.argsort(np.arange(len(ids)) * ((math.sqrt(5) - 1) / 2) % 1, kind="stable")]


class SampleLayout(Layout):
    """The common part of layouts: where samples are kept, reading ahead, filler and labels.

    Args:
        labels: [n] or [n, C], as in ``Dataset``.
        device: where batches are put.
        resident: the inputs of all samples on the device; None: they are read from the host.
    """

    _stand_in: Ids
    """Samples that a micro-batch of none is made of, with weight 0."""
    _settings: Mapping[str, Any]
    """Arguments of the layout by their names, for another of the same kind."""

    def __init__(self, labels: NDArray[Any], device: torch.device, resident: Tensor | None) -> None:
        self._labels, self._device = labels, device
        self._resident = None if resident is None else (resident, torch.tensor(labels, device=device))
        self.reads_ahead = resident is None and device.type != "cpu"
        self._ones = Ones(device)
        self._ahead = ReadAhead(self._all_shapes, self._fill_all, device, threaded=self.reads_ahead)

    def collate(self, ids: Ids, draw: int | None = None, *, slots: int | None = None) -> Batch:
        if not len(ids):
            return as_filler(self.collate(self._stand_in))
        weights = self._ones(len(ids))
        held = self._resident
        values = self._ahead.take(ids) if held is None else self._gathered(ids, slots, *held)
        return self._batch(values, values.pop("labels"), weights, draw)

    def over(self, inputs: Any, labels: NDArray[Any]) -> Layout:
        settings = {**self._settings, "resident": False}
        return cast(Layout, cast(Any, type(self))(inputs, labels, self._device, **settings))

    def expect(self, ids: Sequence[Ids]) -> None:
        self._ahead.expect([each for each in ids if len(each)])

    def close(self) -> None:
        self._ahead.close()

    @abstractmethod
    def _batch(self, values: dict[str, Tensor], labels: Tensor, weights: Tensor, draw: int | None) -> Batch:
        """Make a batch of what was gathered or read; ``values`` may be changed."""

    @abstractmethod
    def _gathered(self, ids: Ids, slots: int | None, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Gather the values of samples on the device, ``labels`` among them."""

    @abstractmethod
    def _shapes(self, ids: Ids) -> Shapes:
        """Return the shape of each value that ``_fill`` fills."""

    @abstractmethod
    def _fill(self, ids: Ids, arrays: Arrays) -> None:
        """Read samples on the host."""

    def _all_shapes(self, ids: Ids) -> Shapes:
        return {**self._shapes(ids), "labels": ((len(ids), *self._labels.shape[1:]), torch_dtype(self._labels))}

    def _fill_all(self, ids: Ids, arrays: Arrays) -> None:
        arrays["labels"][...] = self._labels[ids]  # an id out of range stops here
        self._fill(ids, arrays)


class TokenLayout(SampleLayout):
    """The common part of layouts of token sequences; the arguments are theirs."""

    def __init__(
        self,
        tokens: Tokens,
        labels: NDArray[Any],
        device: torch.device,
        token_types: bool,
        all_types: bool,
        resident: bool,
    ) -> None:
        super().__init__(labels, device, resident_tokens(tokens, device) if resident else None)
        self._tokens, self._lengths, self._longest = tokens, tokens.lengths, longest(tokens)
        self._second = tokens.begins_of_second(all_types) if token_types else None
        self._types = tokens.types if token_types else None
        self._types_there = resident_types(tokens, device) if resident and token_types else None

    @property
    def _gives_types(self) -> bool:
        return self._second is not None or self._types is not None
