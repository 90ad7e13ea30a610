"""Whether compiling pays: the seconds it saves over the run against the seconds it takes.

All figures are estimates to choose by, rounded as such; what a run really spends is in its summary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.data.dataset import Dataset, Tokens
from paceline.machine.gpus import PeakRates, peak_rates
from paceline.seams import Build
from paceline.seams.without_data import pass_images, without_data

UNCOMPILED_MFU = 0.30
"""Share of the data sheet's bf16 rate that packed and captured, uncompiled steps reach. Measured on one H200 with torch
2.11, 21 November 2026: DistilBERT, IMDB cut at 512 tokens: 3,390 reviews/s at batch 32 and 4,420 at 128, which are 0.26
and 0.33 of 989 TFLOP/s."""

SAVED_SHARE = 0.15
"""Share of those seconds that compiled steps save: 0.11 at batch 128 in that session, more at smaller ones."""

FUSED_MFU, FUSED_SAVED_SHARE = 0.34, 0.05
"""The same where our own kernels do what compiling would win most from (``techniques.fusion``): 0.33 of 989 TFLOP/s at
batch 64 and 0.36 at 128; 13.9 ms a step against 13.1 compiled, and 25.6 against 24.5 (same GPU and day)."""

COLD_SECONDS, COLD_SECONDS_WHOLE, WARM_SECONDS = 12.0, 20.0, 5.0
"""Seconds of importing the compiler and compiling in that session: equal blocks; a whole ResNet-18; either from kept
kernels."""

REFERENCE_GPU = "NVIDIA H200"
"""Stands for a GPU whose rate is not known: a fast one, so that its seconds are nearly a lower bound."""

TRAINING_PASSES = 3
"""A backward pass is two products for each of the forward pass: the input's gradient and the weight's."""


def compile_pays(
    flops_per_sample: float,
    samples: int,
    gpu_name: str | None,
    *,
    cached: bool,
    whole_model: bool = False,
    fused: bool = False,
) -> tuple[bool, str]:
    """Whether compiling wins back its own seconds, and the reckoning in a sentence.

    Args:
        flops_per_sample: of one training pass, see ``flops_per_text`` and ``flops_per_image``.
        samples: passed in training over the whole run, repeats counted.
        gpu_name: as nvidia-smi writes it; None: the device is a CPU.
        cached: the kernels have been compiled and kept before.
        whole_model: compiled as one graph, not block by block.
        fused: our own kernels are in the steps, compiled or not.
    """
    if gpu_name is None:
        return False, "the device is a CPU, where compiling takes long and saves little"
    known = _rate(peak_rates(gpu_name))
    rate = known or _rate(peak_rates(REFERENCE_GPU))
    assert rate is not None, f"{REFERENCE_GPU} is not in the table"
    share, reached = (FUSED_SAVED_SHARE, FUSED_MFU) if fused else (SAVED_SHARE, UNCOMPILED_MFU)
    steps = flops_per_sample * samples / (rate * reached)
    saved = share * steps
    taken = WARM_SECONDS if cached else COLD_SECONDS_WHOLE if whole_model else COLD_SECONDS
    reckoned = f"saves about {saved:,.0f} s of {steps:,.0f} s of steps, compiling takes about {taken:.0f} s"
    kept = " from kept kernels" if cached else ""
    guess = "" if known else f" (no rate is known of {gpu_name}: reckoned as fast as an {REFERENCE_GPU})"
    return saved > taken, f"{reckoned}{kept}{guess}"


def flops_per_text(blocks: Sequence[nn.Module], lengths: NDArray[Any]) -> float:
    """Mean floating-point operations of one text's training pass through transformer ``blocks``.

    Six for each matrix weight and token (two forward, four backward), and twelve times the width for each pair of
    tokens that attend to each other (scores and weighted sums). Embeddings and head are left out, as usual; windows of
    local attention are not looked at, so that long texts count a little too much.

    Args:
        lengths: tokens of each text, padding not counted.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    if not len(tokens):
        return 0.0
    weights = sum(p.numel() for block in blocks for p in block.parameters() if p.ndim == 2)
    width = sum(_width(block) for block in blocks)
    return float(2 * TRAINING_PASSES * weights * tokens.mean() + 4 * TRAINING_PASSES * width * (tokens**2).mean())


def flops_per_image(model: nn.Module, shape: tuple[int, int, int]) -> float:
    """Floating-point operations of one image's training pass, counted on a pass without data.

    Args:
        shape: (C, H, W).
    """
    trial = without_data(model)
    with FlopCounterMode(display=False) as counter:
        pass_images(trial, shape)
    return float(TRAINING_PASSES * counter.get_total_flops() / 2)


def flops_counter(build: Build, dataset: Dataset) -> Callable[[NDArray[Any]], float | None]:
    """Ids of samples -> floating-point operations of their training passes, as the two functions above count them.

    Blocks without a trained weight count their forward pass alone. None where nothing is known to count by: a model of
    texts without blocks, or one of images that cannot be passed through without data.
    """
    inputs = dataset.inputs
    if not isinstance(inputs, Tokens):
        each = functools.cache(lambda: flops_of_image(build.model, inputs.shape))
        return lambda ids: (each() or 0.0) * len(ids) or None
    trained = [block for block in build.blocks if any(p.requires_grad for p in block.parameters())]
    frozen = [block for block in build.blocks if block not in trained]

    def of_texts(ids: NDArray[Any]) -> float | None:
        lengths = inputs.window_lengths(ids)
        mean = flops_per_text(trained, lengths) + flops_per_text(frozen, lengths) / TRAINING_PASSES
        return mean * len(lengths) or None

    return of_texts


def flops_of_image(model: nn.Module, shape: tuple[int, int, int]) -> float | None:
    """As ``flops_per_image``, of (H, W, C); None of a model that cannot be copied, or not be passed without data."""
    height, width, channels = shape
    try:
        with torch.compiler.set_stance("force_eager"):
            return flops_per_image(model, (channels, height, width))
    except Exception:  # somebody's model says so in ways of its own
        return None


def peak_flops(gpu_name: str | None, precision: str) -> float | None:
    """The data sheet's operations a second of a GPU in a number format; None where it does not say, and on a CPU."""
    rates = peak_rates(gpu_name) if gpu_name else None
    known = {"bf16": rates.bf16_flops, "fp16": rates.fp16_flops, "fp32": rates.fp32_flops} if rates else {}
    return known.get(precision.removeprefix("pure_"))


def _rate(rates: PeakRates | None) -> float | None:
    return (rates.bf16_flops or rates.fp16_flops) if rates else None


def _width(block: nn.Module) -> int:
    """Width of a transformer block: its narrowest matrix input."""
    return min((module.in_features for module in block.modules() if isinstance(module, nn.Linear)), default=0)
