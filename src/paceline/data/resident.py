"""Samples kept on the device for the whole run."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.data.dataset import Images, Tokens


def resident_bytes(inputs: Tokens | Images) -> int:
    """Bytes that all samples take on the device, labels aside."""
    match inputs:
        case Tokens():
            return (4 if inputs.types is None else 5) * (int(inputs.offsets[-1]) + longest(inputs))
        case Images():
            return int(inputs.pixels.nbytes)


def resident_tokens(tokens: Tokens, device: torch.device) -> Tensor:
    """int32 [total + longest]: all tokens, and as many pad tokens as the longest sample has.

    The pad tokens at the end let filler be gathered as if it were a sample.
    """
    total = int(tokens.offsets[-1])
    flat = np.full(total + longest(tokens), tokens.pad_id, dtype=np.int32)
    flat[:total] = tokens.flat[:total]
    return torch.from_numpy(flat).to(device)


def resident_types(tokens: Tokens, device: torch.device) -> Tensor | None:
    """uint8 [total + longest]: token types as ``resident_tokens``; None where they follow from positions."""
    if tokens.types is None:
        return None
    total = int(tokens.offsets[-1])
    types = np.full(total + longest(tokens), tokens.pad_type, dtype=np.uint8)
    types[:total] = tokens.types[:total]
    return torch.from_numpy(types).to(device)


def resident_images(images: Images, device: torch.device) -> Tensor:
    """uint8 [n, H, W, C]."""
    return torch.tensor(images.pixels, device=device)


def longest(tokens: Tokens) -> int:
    """Number of tokens of the longest sample; 0 when there is none."""
    return int(tokens.lengths.max(initial=0))
