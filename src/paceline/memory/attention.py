"""Which kernel ``scaled_dot_product_attention`` takes on a GPU: they differ in what they keep for the backward pass.

On a GPU torch asks the GPU and its libraries. Here the same question is answered from a table, kernel by kernel in
the order of torch's preference, so that a plan can name the kernel that it assumes.
Source: ATen/native/transformers/cuda/sdp_utils.cpp (torch 2.11): check_prefer_cudnn_attention, use_flash_attention,
use_mem_efficient_attention, priority_order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.machine.device import capability

HALF = (torch.float16, torch.bfloat16)
FLASH_FROM, HALF_EFFICIENT_FROM, CUDNN_MAJORS = (8, 0), {torch.float16: (5, 0), torch.bfloat16: (8, 0)}, (9, 10)
"""Compute capabilities: of data-centre Hopper and Blackwell the major ones."""
UNKNOWN = (0, 0)
"""The capability of a GPU that is known by its memory alone: it is taken for one that has the kernels of every GPU
since 2014."""

chosen: dict[str, int] = {}
"""Kernel -> how many calls took it: what a plan says it assumed."""


def register_attention() -> torch.library.Library:
    """Let attention on a planned device take the operators that it would take on that GPU, as long as this lives."""
    library = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        aten, kernel = torch.ops.aten, kernel_for(capability(query.device), query, attn_mask)
        chosen[kernel] = chosen.get(kernel, 0) + 1
        if enable_gqa and key.shape[1] != query.shape[1]:
            times = query.shape[1] // key.shape[1]
            key, value = (states.repeat_interleave(times, 1) for states in (key, value))
        keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        bias = _as_bias(attn_mask, query, key)
        states, rest = (query, key, value), (dropout_p, is_causal)
        match kernel:
            case "flash":
                return aten._scaled_dot_product_flash_attention(*states, *rest, scale=scale)[0]
            case "cudnn":
                return aten._scaled_dot_product_cudnn_attention(*states, bias, keeps, *rest, scale=scale)[0]
            case "efficient":
                return aten._scaled_dot_product_efficient_attention(*states, bias, keeps, *rest, scale=scale)[0]
            case _:
                return aten._scaled_dot_product_attention_math(*states, bias, *rest, scale=scale)[0]

    library.impl("scaled_dot_product_attention", attend)
    return library


def kernel_for(have: tuple[int, int], query: Tensor, mask: Tensor | None) -> str:
    """``cudnn``, ``flash``, ``efficient`` or ``math``, for queries [S, H, L, D] on a GPU of a compute capability."""
    half, size = query.dtype in HALF, query.shape[-1]
    learns = mask is not None and mask.requires_grad  # such as T5's relative positions
    if half and have[0] in CUDNN_MAJORS and size <= 128 and size % 8 == 0 and not learns:
        return "cudnn"
    if half and mask is None and have >= FLASH_FROM and size <= 256:
        return "flash"
    oldest = HALF_EFFICIENT_FROM.get(query.dtype, (5, 0))
    served = query.dtype in (*HALF, torch.float32) and size % (8 if half else 4) == 0
    return "efficient" if served and (have >= oldest or have == UNKNOWN) else "math"


def _as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """What a mask of booleans becomes: numbers to add to the scores, for every head."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.to(query.dtype).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
