"""Process-wide numeric settings of a run, put back when it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from paceline.machine.device import matmul_precision

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def numerics(precision: str, *, deterministic: bool, device: str = "cpu") -> Iterator[None]:
    """Matrix product precision and determinism; the caller's random state is put back, and gradients are on inside.

    ``deterministic`` follows https://docs.pytorch.org/docs/stable/notes/randomness.html: deterministic algorithms
    only, no cuDNN autotuning, and a cuBLAS workspace that does not depend on the stream.
    """
    # asking for a GPU's random state starts CUDA, which a run on the CPU must not
    has_gpus = device == "cuda" or torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if has_gpus else ()
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        matmul_precision(precision),
        _cudnn_put_back(),
        _strict() if deterministic else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _cudnn_put_back() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before


@contextlib.contextmanager
def _strict() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(CUBLAS)
    # loads torch's compiler, which takes a second: not for every run; interrupted in that it leaves nothing to undo
    torch.use_deterministic_algorithms(True)
    try:
        os.environ.setdefault(CUBLAS, ":4096:8")
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        if workspace is None:
            os.environ.pop(CUBLAS, None)
