"""Precision: in which number format the matrix products of a step run. Weights and optimizer states stay fp32.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; torch.autocast's documentation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.seams import Batch, Build, Forward

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def apply_precision(forward: Forward, mode: str, device: torch.device) -> Forward:
    """``forward`` under autocast for ``bf16`` and ``fp16``; as it is for ``fp32`` and ``tf32``."""
    if mode not in AUTOCAST:
        return forward

    def under_autocast(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(device.type, AUTOCAST[mode]):
            return forward(model, batch)

    return under_autocast


def _precision_holders() -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    return (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)


@contextlib.contextmanager
def matmul_precision(mode: str) -> Iterator[None]:
    """fp32 matrix products and convolutions in TF32 (``tf32``) or in full (``fp32``) while inside.

    The setting is the process's, so it covers the backward pass too; it is put back on the way out.
    """
    wanted = {"tf32": "tf32", "fp32": "ieee"}.get(mode)
    places: tuple[Any, ...] = _precision_holders() if wanted else ()
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = wanted
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


def apply(build: Build, mode: str) -> Build:
    """The build's forward pass in this precision; fp16 turns loss scaling on."""
    return replace(build, forward=apply_precision(build.forward, mode, build.device), loss_scaling=mode == "fp16")
