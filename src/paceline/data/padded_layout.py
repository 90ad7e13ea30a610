"""Token sequences side by side, padded to one length: for models that cannot be packed."""

from __future__ import annotations

import sys
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.dataset import Tokens
from paceline.data.sample_layout import TokenLayout
from paceline.data.transfer import Arrays, Shapes, to_device
from paceline.seams import Batch, Ids, Size


@final
class PaddedLayout(TokenLayout):
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
        super().__init__(tokens, labels, device, token_types, all_types, resident)
        self._settings = {"token_types": token_types, "all_types": all_types, "bucket": bucket, "masked": masked}
        self._bucket = bucket
        # some models look for the pad token themselves where they are given no mask
        ragged = bool((self._lengths < self._longest).any())
        self._masks = masked or ragged or bool((tokens.flat == tokens.pad_id).any())
        # the first with a token: attention to none at all is no number
        self._stand_in = np.full(1, (self._lengths > 0).argmax() if len(tokens) else 0)
        # what is read ahead has its shape before the other ranks' is looked at
        self.widens_by = sys.maxsize if resident else 0

    def size(self, ids: Ids) -> Size:
        rows = ids if len(ids) else self._stand_in
        return Size(len(ids), int(self._lengths[ids].sum()), self._width(rows) * len(rows))

    def sorted(self, ids: Ids) -> Ids:
        return ids[np.argsort(-self._lengths[ids], kind="stable")]

    def _width(self, ids: Ids) -> int:
        rounded = -(-int(self._lengths[ids].max()) // self._bucket) * self._bucket
        return min(rounded, self._longest)

    def _batch(self, values: dict[str, Tensor], labels: Tensor, weights: Tensor, draw: int | None) -> Batch:
        return Batch(values, labels, weights)

    def _gathered(self, ids: Ids, slots: int | None, flat: Tensor, labels: Tensor) -> dict[str, Tensor]:
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
        inputs["labels"] = labels.index_select(0, rows[0])
        return inputs

    def _shapes(self, ids: Ids) -> Shapes:
        names = ["input_ids", *["attention_mask"] * self._masks, *["token_type_ids"] * self._gives_types]
        return dict.fromkeys(names, ((len(ids), self._width(ids)), torch.int64))

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
