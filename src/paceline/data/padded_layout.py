"""Token sequences side by side, padded to one length: for models that cannot be packed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.dataset import Tokens
from paceline.data.filler import Ones, as_filler
from paceline.data.resident import longest, resident_tokens, resident_types
from paceline.data.transfer import Arrays, ReadAhead, Shapes, to_device, torch_dtype
from paceline.seams import Batch, Ids, Layout, Size


@final
class PaddedLayout(Layout):
    """Token sequences padded to the longest of their micro-batch, with an attention mask where it may mask anything.

    A micro-batch of no samples is a row of one, of weight 0.

    Args:
        tokens: the samples.
        labels: [n] or [n, C], as in ``Dataset``.
        device: where batches are put.
        token_types: whether the model takes token_type_ids; they are given where the tokenizer gives them.
        all_types: whether they are given also where all are 0, which some models do not take as they take none.
        bucket: the padded length is rounded up to a multiple of this, but never above the longest sample of all, so
            that there are few shapes.
        resident: keep all tokens on the device and gather there.
        masked: whether the model is given a mask also where all samples have one length.
    """

    def __init__(
        self,
        tokens: Tokens,
        labels: NDArray[Any],
        device: torch.device,
        *,
        token_types: bool,
        all_types: bool = False,
        bucket: int = 1,
        resident: bool = False,
        masked: bool = True,
    ) -> None:
        self._tokens, self._labels, self._device, self._bucket = tokens, labels, device, bucket
        self._token_types, self._all_types, self._masked = token_types, all_types, masked
        self._lengths = tokens.lengths
        self._longest = longest(tokens)
        # some models look for the pad token themselves where they are given no mask
        ragged = bool((self._lengths < self._longest).any())
        self._masks = masked or ragged or bool((tokens.flat == tokens.pad_id).any())
        # the first with a token: attention to none at all is no number
        self._stand_in = np.full(1, (self._lengths > 0).argmax() if len(tokens) else 0)
        self._second = tokens.begins_of_second(all_types) if token_types else None
        self._types = tokens.types if token_types else None
        self._types_there = resident_types(tokens, device) if resident and token_types else None
        self._resident = (resident_tokens(tokens, device), torch.tensor(labels, device=device)) if resident else None
        self.reads_ahead = not resident and device.type != "cpu"
        # what is read ahead has its shape before the other ranks' is looked at
        self.widens_by = sys.maxsize if resident else 0
        self._ones = Ones(device)
        self._ahead = ReadAhead(self._shapes, self._fill, device, threaded=self.reads_ahead)

    def collate(self, ids: Ids, draw: int | None = None, *, slots: int | None = None, epoch: int = 0) -> Batch:
        if not len(ids):
            return as_filler(self.collate(self._stand_in))
        weights = self._ones(len(ids))
        if self._resident is not None:
            return Batch(*self._gathered(ids, slots, *self._resident), weights)
        inputs = self._ahead.take(ids)
        labels = inputs.pop("labels")
        return Batch(inputs, labels, weights)

    def over(self, inputs: Tokens, labels: NDArray[Any]) -> PaddedLayout:
        return PaddedLayout(
            inputs,
            labels,
            self._device,
            token_types=self._token_types,
            all_types=self._all_types,
            bucket=self._bucket,
            masked=self._masked,
        )

    def expect(self, ids: Sequence[Ids]) -> None:
        self._ahead.expect([each for each in ids if len(each)])

    def close(self) -> None:
        self._ahead.close()

    def size(self, ids: Ids) -> Size:
        rows = ids if len(ids) else self._stand_in
        return Size(len(ids), int(self._lengths[ids].sum()), self._width(rows) * len(rows))

    def sorted(self, ids: Ids) -> Ids:
        return ids[np.argsort(-self._lengths[ids], kind="stable")]

    @property
    def _gives_types(self) -> bool:
        return self._second is not None or self._types is not None

    def _width(self, ids: Ids) -> int:
        rounded = -(-int(self._lengths[ids].max()) // self._bucket) * self._bucket
        return min(rounded, self._longest)

    def _gathered(self, ids: Ids, slots: int | None, flat: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        starts, lengths = self._tokens.offsets[ids], self._lengths[ids]
        second = lengths if self._second is None else self._second[ids]
        rows = to_device(np.stack([ids, starts, lengths, second]), self._device)
        width = self._width(ids) if slots is None else slots // len(ids)
        positions = torch.arange(width, device=self._device)
        if self._tokens.pad_left:
            positions = positions - (width - rows[2, :, None])
            mask = positions >= 0
            at = (rows[1, :, None] + positions).clamp_min(0)
        else:
            mask = positions < rows[2, :, None]
            # every index lies inside: behind the last sample there are as many pad tokens as any sample is long
            at = rows[1, :, None] + positions
        read = flat[at]
        inputs = {
            "input_ids": read.masked_fill_(~mask, self._tokens.pad_id).long(),
        }
        if self._masks:
            inputs["attention_mask"] = mask.long()
        if self._second is not None:
            inputs["token_type_ids"] = (mask & (positions >= rows[3, :, None])).long()
        if self._types_there is not None:
            inputs["token_type_ids"] = self._types_there[at].masked_fill_(~mask, self._tokens.pad_type).long()
        return inputs, labels.index_select(0, rows[0])

    def _shapes(self, ids: Ids) -> Shapes:
        names = ["input_ids", *["attention_mask"] * self._masks, *["token_type_ids"] * self._gives_types]
        shape = (len(ids), self._width(ids))
        labels = ((len(ids), *self._labels.shape[1:]), torch_dtype(self._labels))
        return {**dict.fromkeys(names, (shape, torch.int64)), "labels": labels}

    def _fill(self, ids: Ids, arrays: Arrays) -> None:
        input_ids, lengths = arrays["input_ids"], self._lengths[ids]
        tokens, width = self._tokens, input_ids.shape[1]
        begins = width - lengths if tokens.pad_left else np.zeros_like(lengths)
        pairs = [(input_ids, tokens.flat, tokens.pad_id)]
        if self._types is not None:
            pairs.append((arrays["token_type_ids"], self._types, tokens.pad_type))
        for into, flat, filling in pairs:
            into.fill(filling)
            # one copy a row beats any indexing trick at these sizes
            for row, (at, start, length) in enumerate(zip(begins, tokens.offsets[ids], lengths, strict=True)):
                into[row, at : at + length] = flat[start : start + length]
        positions = np.arange(width) - begins[:, None]
        mask = (positions >= 0) & (positions < lengths[:, None])
        if self._masks:
            arrays["attention_mask"][...] = mask
        if self._second is not None:
            arrays["token_type_ids"][...] = mask & (positions >= self._second[ids][:, None])
        arrays["labels"][...] = self._labels[ids]
