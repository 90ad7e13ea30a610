"""What the device reaches: one square matrix product, bf16 on a GPU and fp32 on a CPU, random data.

Settings: ``size``. Reports operations a second over about ``SECONDS`` of products.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from workload import Settings, start, tell, versions

SECONDS = 1.0


def main(_: Path, settings: Settings) -> None:
    on_gpu, size = torch.cuda.is_available(), settings["size"]
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def seconds(rounds: int) -> float:
        _wait()
        started = time.perf_counter()
        for _ in range(rounds):
            torch.mm(a, b, out=out)
        _wait()
        return time.perf_counter() - started

    seconds(3)
    rounds = math.ceil(SECONDS / (seconds(3) / 3))
    rate = 2 * size**3 * rounds / seconds(rounds)
    tell(
        "result",
        flops_per_second=rate,
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        versions=versions(),
    )


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    start(main)
