"""A user's own loss, as ``task.loss`` names one, which can stop the run in the middle of a step."""

from __future__ import annotations

import itertools
import os
import signal

from torch import Tensor
from torch.nn import functional as F

STOP_AT_CALL = "GOLDEN_STOP_AT_CALL"
"""Environment variable: the call, counted from 1, in which this process is sent SIGTERM."""

_calls = itertools.count(1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """One loss a sample [S]."""
    if str(next(_calls)) == os.environ.get(STOP_AT_CALL):
        os.kill(os.getpid(), signal.SIGTERM)
    return F.cross_entropy(logits, labels, reduction="none")
