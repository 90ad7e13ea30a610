"""What matrix products take and give on this machine's first GPU; prints one line of JSON. A program of its own."""

from __future__ import annotations

import json
import sys
import time
from typing import Final

import torch

SIZE: Final = 8192
SECONDS: Final = 0.5
"""How long products are timed."""


def workspaces() -> list[int]:
    """Bytes that torch's allocator holds for products after a first forward pass, and after a first backward pass more.

    A backward pass runs in a thread of its own, and cuBLAS keeps a workspace for each.
    """
    weight = torch.zeros(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inputs = torch.zeros_like(weight)
    found, before = [], torch.cuda.memory_allocated()
    outputs = inputs @ weight
    found.append(torch.cuda.memory_allocated() - before - outputs.nbytes)
    before = torch.cuda.memory_allocated()
    (gradient,) = torch.autograd.grad(outputs, weight, torch.ones_like(outputs))
    found.append(torch.cuda.memory_allocated() - before - gradient.nbytes)
    return [size for size in found if size > 0]


def flops_per_second() -> float:
    """The rate of one large product in bf16, of random numbers: zeros are faster, and nobody multiplies them."""
    one, other = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(one)

    def seconds(rounds: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(rounds):
            torch.mm(one, other, out=out)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds(3)
    rounds = max(1, round(SECONDS / (seconds(3) / 3)))
    return 2 * SIZE**3 * rounds / seconds(rounds)


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"workspaces": workspaces(), "flops_per_second": flops_per_second()}) + "\n")
