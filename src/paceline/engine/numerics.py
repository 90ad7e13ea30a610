"""Process-wide numeric settings of a run, put back when it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from paceline.techniques.precision import matmul_precision

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def numerics(precision: str, *, deterministic: bool) -> Iterator[None]:
    """Matrix product precision, determinism, and the caller's random state saved and restored.

    ``deterministic`` follows https://docs.pytorch.org/docs/stable/notes/randomness.html: deterministic algorithms
    only, no cuDNN autotuning, and a cuBLAS workspace that does not depend on the stream.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get(CUBLAS),
    )
    with torch.random.fork_rng(), matmul_precision(precision):
        try:
            if deterministic:
                os.environ.setdefault(CUBLAS, ":4096:8")
                torch.use_deterministic_algorithms(True)
                torch.backends.cudnn.benchmark = False
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.backends.cudnn.benchmark = before[2]
            if before[3] is None:
                os.environ.pop(CUBLAS, None)
