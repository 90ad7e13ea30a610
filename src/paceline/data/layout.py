"""Layouts: samples by their ids to batches on the device.

Shapes: S samples, L padded length, H height, W width, C channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.dataset import Images, Tokens
from paceline.seams import Batch, Ids, Layout, Size


class PaddedLayout(Layout):
    """Token sequences padded to the longest of their micro-batch, with an attention mask.

    Args:
        tokens: the samples.
        labels: [n] or [n, C], as in ``Dataset``.
        device: where batches are put.
        token_types: whether the model takes token_type_ids (pairs).
    """

    def __init__(self, tokens: Tokens, labels: NDArray[Any], device: torch.device, *, token_types: bool) -> None:
        self._tokens, self._labels, self._device = tokens, labels, device
        self._lengths = tokens.lengths
        self._second = tokens.second if token_types else None

    def collate(self, ids: Ids) -> Batch:
        lengths = self._lengths[ids]
        longest = int(lengths.max())
        # np.full and one copy a row beat any indexing trick at these sizes
        input_ids = np.full((len(ids), longest), self._tokens.pad_id, dtype=np.int64)
        for row, (start, length) in enumerate(zip(self._tokens.offsets[ids], lengths, strict=True)):
            input_ids[row, :length] = self._tokens.flat[start : start + length]
        positions = np.arange(longest)
        mask = positions < lengths[:, None]
        inputs = {"input_ids": input_ids, "attention_mask": mask.astype(np.int64)}
        if self._second is not None:
            inputs["token_type_ids"] = (mask & (positions >= self._second[ids][:, None])).astype(np.int64)
        return Batch(
            {name: to_device(array, self._device) for name, array in inputs.items()},
            to_device(self._labels[ids], self._device),
            torch.ones(len(ids), device=self._device),
        )

    def size(self, ids: Ids) -> Size:
        lengths = self._lengths[ids]
        return Size(len(ids), int(lengths.sum()), int(lengths.max()) * len(ids))

    def sorted(self, ids: Ids) -> Ids:
        return ids[np.argsort(-self._lengths[ids], kind="stable")]


class ImageLayout(Layout):
    """Images as normalised channels-first floats.

    Args:
        images: the samples, uint8.
        labels: as in ``Dataset``.
        device: where batches are put.
        mean: per channel, of values scaled to 0..1.
        deviation: standard deviation per channel.
    """

    def __init__(
        self,
        images: Images,
        labels: NDArray[Any],
        device: torch.device,
        *,
        mean: tuple[float, ...],
        deviation: tuple[float, ...],
    ) -> None:
        self._images, self._labels, self._device = images, labels, device
        channels = images.pixels.shape[-1]
        self._mean = torch.tensor(mean[:channels], device=device).view(-1, 1, 1)
        self._deviation = torch.tensor(deviation[:channels], device=device).view(-1, 1, 1)

    def collate(self, ids: Ids) -> Batch:
        pixels = to_device(self._images.pixels[ids], self._device).permute(0, 3, 1, 2).float().div_(255)
        normalised = pixels.sub_(self._mean).div_(self._deviation).contiguous()
        labels = to_device(self._labels[ids], self._device)
        return Batch({"pixel_values": normalised}, labels, torch.ones(len(ids), device=self._device))

    def size(self, ids: Ids) -> Size:
        return Size(len(ids), len(ids), len(ids))

    def sorted(self, ids: Ids) -> Ids:
        return ids


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of ``array`` on ``device``; through pinned memory, without waiting, where the device has its own."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
