"""What the device reaches: one square matrix product, bf16 on a GPU and fp32 on a CPU, for about a second.

Run alone: ``python matmul.py``.
"""

from __future__ import annotations

import json
import math
import time

import torch


def main():
    on_gpu = torch.cuda.is_available()
    device, dtype, size = ("cuda", torch.bfloat16, 8192) if on_gpu else ("cpu", torch.float32, 1024)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)

    def seconds(rounds):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            torch.mm(a, b, out=out)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(2)
    rounds = math.ceil(1.0 / (seconds(3) / 3))
    rate = 2 * size**3 * rounds / seconds(rounds)
    told = {"flops_per_second": rate, "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
    print(json.dumps({"event": "result", "device": torch.cuda.get_device_name() if on_gpu else "cpu", **told}))


if __name__ == "__main__":
    main()
