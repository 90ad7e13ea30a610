"""cuDNN benchmark: for each convolution of a step, all of cuDNN's kernels tried, and the quickest kept.

Otherwise cuDNN goes by rules of thumb, which are off for small images. For large ones what is quickest by itself need
not be so in a step, so that nobody gets this unasked. Tried are the shapes of the largest micro-batch, in the passes
that warm a run up; captured steps find what was kept. Evaluations, and the smaller batch at the end of an epoch, go by
the rules: they are too few to try anything.

Source: torch.backends.cudnn.benchmark and benchmark_limit; NVIDIA, cuDNN Developer Guide, autotuning.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.seams import Batch, Build, Forward
from paceline.techniques.channels_last import has_convolutions

ALL = 0
"""Value of ``torch.backends.cudnn.benchmark_limit``: no limit, where torch's own is ten kernels."""


def apply_cudnn_benchmark(forward: Forward) -> Forward:
    """A forward pass before which cuDNN is told whether to try its kernels, in it and in the backward pass after it.

    It leaves ``torch.backends.cudnn.benchmark`` and ``benchmark_limit`` changed.
    """
    largest = 0

    def told(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal largest
        training = model.training and torch.is_grad_enabled()
        rows = len(batch.labels)
        if training:
            largest = max(largest, rows)
        torch.backends.cudnn.benchmark_limit = ALL
        torch.backends.cudnn.benchmark = training and rows == largest
        return forward(model, batch)

    return told


def apply(build: Build) -> Build:
    """Have cuDNN try its kernels in the build's training passes.

    Raises:
        RecipeError: the model has no convolution over images.
    """
    if not has_convolutions(build.model):
        why = "this model has no convolution over images"
        raise RecipeError("techniques.cudnn_benchmark = true", why, "--set techniques.cudnn_benchmark=false")
    return replace(build, forward=apply_cudnn_benchmark(build.forward)).carried_out(cudnn_benchmark="in training")
