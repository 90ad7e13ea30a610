"""Which kernel attention takes on a GPU; truth: ATen/native/transformers/cuda/sdp_utils.cpp of torch."""

from __future__ import annotations

import pytest
import torch

from paceline.memory.attention import kernel_for

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("have", "dtype", "size", "masked", "kernel"),
    [
        ((9, 0), BF16, 64, False, "cudnn"),
        ((9, 0), FP16, 128, True, "cudnn"),
        ((10, 0), BF16, 64, True, "cudnn"),
        ((9, 0), BF16, 60, False, "flash"),
        ((9, 0), BF16, 192, False, "flash"),
        ((9, 0), BF16, 192, True, "efficient"),
        ((9, 0), BF16, 512, False, "efficient"),
        ((9, 0), FP32, 64, False, "efficient"),
        ((9, 0), FP64, 64, False, "math"),
        ((8, 0), BF16, 64, False, "flash"),
        ((8, 0), BF16, 64, True, "efficient"),
        ((8, 9), FP16, 64, False, "flash"),
        ((8, 0), FP32, 64, True, "efficient"),
        ((7, 5), FP16, 64, False, "efficient"),
        ((7, 0), FP32, 64, True, "efficient"),
        ((12, 0), BF16, 64, False, "flash"),  # cuDNN's for major 9 and 10 alone, not desktop Blackwell
        ((7, 5), BF16, 64, False, "math"),  # less_than_sm80_mem_efficient_dtypes: no bf16 below 8.0
        ((8, 0), BF16, 20, True, "math"),  # it takes multiples of 8 in half precision, of 4 in fp32
        ((0, 0), FP32, 64, False, "efficient"),  # known by its memory alone: every GPU has this kernel
    ],
)  # fmt: skip
def test_the_kernel_is_torchs_choice(
    have: tuple[int, int], dtype: torch.dtype, size: int, masked: bool, kernel: str
) -> None:
    query = torch.empty(2, 3, 16, size, dtype=dtype, device="meta")
    mask = torch.empty(2, 1, 16, 16, dtype=dtype, device="meta") if masked else None
    assert kernel_for(have, query, mask) == kernel


def test_a_bias_that_is_trained_keeps_cudnn_out() -> None:
    """T5 learns a bias for each distance of two positions, and cuDNN's kernel gives no gradient of it."""
    query, bias = torch.zeros(2, 4, 8, 64, dtype=torch.bfloat16), torch.zeros(1, 4, 8, 8)
    assert kernel_for((9, 0), query, bias) == "cudnn"
    assert kernel_for((9, 0), query, bias.requires_grad_()) == "efficient"
