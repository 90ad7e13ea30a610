"""Precision: in which number format the matrix products of a step run. Weights and optimizer states stay fp32, but for
``pure_bf16``, which keeps all of them in bf16.

Source: Micikevicius et al., Mixed Precision Training, ICLR 2018; torch.autocast's documentation. Batch statistics in
fp32 whatever the rest is in: NVIDIA, Apex's documentation of amp, ``keep_batchnorm_fp32``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.recipe.parts import OptimizerPart, ParallelPart
from paceline.seams import Batch, Build, Forward

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

PRODUCTS = {**AUTOCAST, "pure_bf16": torch.bfloat16}
"""Number format of the matrix products of those that do not compute in fp32."""

WEIGHTS = {"pure_bf16": torch.bfloat16}
"""Number format of the weights of those that do not keep them in fp32."""


def apply_precision(forward: Forward, mode: str, device: torch.device) -> Forward:
    """``forward`` under autocast for ``bf16`` and ``fp16``; on inputs in the weights' format for ``pure_bf16``; as it
    is for ``fp32`` and ``tf32``."""
    if mode in WEIGHTS:
        return partial(_with_inputs_in, WEIGHTS[mode], forward)
    if mode not in AUTOCAST:
        return forward

    def under_autocast(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(device.type, AUTOCAST[mode]):
            return forward(model, batch)

    return under_autocast


def _with_inputs_in(dtype: torch.dtype, forward: Forward, model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: given.to(dtype) if given.is_floating_point() else given for name, given in batch.inputs.items()}
    return forward(model, replace(batch, inputs=inputs))


@torch.no_grad()
def narrow_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights in ``dtype``, in place; buffers keep theirs, and batch normalisation its weights: it computes in fp32.

    A weight that a model has in several places, as tied embeddings, stays one.
    """
    counted = {id(p) for m in model.modules() if isinstance(m, _BatchNorm) for p in m.parameters(recurse=False)}
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in counted:
            parameter.data = parameter.data.to(dtype)


def summed_in(part: ParallelPart, model: nn.Module) -> torch.dtype | None:
    """Number format of the gradients' all-reduce; None: the gradients' own, which is that of the weights."""
    if part.reduce_dtype == "bf16":
        return torch.bfloat16
    return torch.float32 if any(p.dtype in WEIGHTS.values() for p in model.parameters()) else None


def rounded_away(part: OptimizerPart) -> str:
    """What a run with weights in bf16 loses, for its user: rounded to 8 bits, a weight takes no small step.

    Empty where another rounding keeps such steps.
    """
    if part.rounding != "nearest":
        return ""
    lost = "techniques.precision = pure_bf16: an update of less than 1/512 of a weight is rounded away"
    keeps = "optimizer.rounding=kahan keeps it"
    if part.type == "sgd":
        return f"{lost}; {keeps}"
    hardly = f"Adam's are about the learning rate, so that weights beyond {512 * part.lr:.2g} hardly move"
    return f"{lost}; {hardly}; {keeps}"


def apply(build: Build, mode: str) -> Build:
    """The build's forward pass in this precision; fp16 turns loss scaling on, pure_bf16 changes the weights."""
    if mode in WEIGHTS:
        narrow_weights(build.model, WEIGHTS[mode])
    return replace(build, forward=apply_precision(build.forward, mode, build.device), loss_scaling=mode == "fp16")
