"""The floor of a packed step of an encoder on this GPU, part by part, beside the step itself.

    python benchmarks/roofline.py --model distilbert --batch 32 64 128 --out FILE.jsonl [--steps-from ANATOMY.jsonl]

- matrix products: the twelve of each layer (four forward, their input's and weight's gradients), at their own shapes,
  in bf16, one behind the other in a CUDA graph, for seconds on end: what the GPU does when it is warm, at its power
  limit. Nothing else runs in between, so no step does them faster with these products.
- attention: the fastest kernel known here (kernels/short_attention.py), forward and backward, on lengths like IMDB's;
  and beside it the operations alone at the rate of the products, which nobody reaches.
- of the last block, keys and values of all positions and one query a text (early pooling), unless ``--whole``;
- pointwise: the fewest bytes that the lines between the products must move, at the rate of a large copy: each half's
  norm reads product and residual and writes its result wide and narrow, and back; GELU likewise.
- update: 28 bytes a weight (weight, gradient and two states read, three written), 4 more for the norm, 6 for the
  narrow copy of the matrices, at the rate of a copy.
- gaps: none. Embeddings, head and loss are left out, which makes the floor lower.

The step is taken from records of ``step_anatomy.py`` with the same batch, where they are given.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_anatomy import MODELS, lengths
from torch import Tensor

from paceline.kernels.short_attention import short_attention_joined

SECONDS = 2.0
"""Of each part, warm."""
ROUNDED = 256
"""Rows are rounded up to this, as the packed layout does."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="distilbert")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--whole", action="store_true", help="of steps without early pooling")
    parser.add_argument("--steps-from", type=Path, help="records of step_anatomy.py")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    copy = copy_rate()
    square = sustained(products(8192, [(8192, 8192)])) / 3
    shared = {"copy_tb": copy / 1e12, "square_tflops": 2 * 8192**3 / square / 1e12, "torch": torch.__version__}
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s, 8192^3 {shared['square_tflops']:.0f} TFLOP/s")
    print("| batch | tokens | products | attention (as products) | pointwise | update | floor | step | step / floor |")
    print("|---|---|---|---|---|---|---|---|---|")
    for batch in chosen.batch:
        record = floor(chosen.model, batch, copy, early=not chosen.whole) | shared
        record |= {"card": torch.cuda.get_device_name(), "early_pooling": not chosen.whole}
        record["step_ms"] = step(chosen.steps_from, chosen.model, batch, early=not chosen.whole)
        with chosen.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(row(record), flush=True)


def floor(model: str, batch: int, copy: float, *, early: bool) -> dict[str, Any]:
    """Milliseconds of each part.

    Args:
        early: the last block computes what its head reads; what it does once a text is left out of the floor.
    """
    found = MODELS[model]
    hidden = found.get("dim") or found.get("hidden_size") or 768
    inner = found.get("hidden_dim") or found.get("intermediate_size") or 4 * hidden
    layers = found.get("n_layers") or found.get("num_hidden_layers") or (6 if model == "distilbert" else 12)
    sizes = lengths(100 * batch, np.random.default_rng(0))
    tokens = int(-(-sizes.mean() * batch // ROUNDED) * ROUNDED)
    linears = [(hidden, 3 * hidden), (hidden, hidden), (hidden, inner), (inner, hidden)]
    whole = layers - early
    matmul = whole * sustained(products(tokens, linears))
    operations = whole * sum(6 * tokens * i * o for i, o in linears)
    attention = whole * sustained(attend(sizes[:batch], hidden))
    pairs = float((sizes.astype(np.float64) ** 2).mean()) * batch
    ideal_attention = 12 * whole * hidden * pairs / (operations / matmul)
    norms = 2 * (12 + 18) * hidden
    gelu = (4 + 6) * inner
    pointwise = whole * tokens * (norms + gelu) / copy
    if early:
        matmul += sustained(products(tokens, [(hidden, 2 * hidden)]))
        operations += 6 * tokens * 2 * hidden * hidden
        # keys and values are read twice, and their gradients written once
        attention += 3 * 2 * 2 * hidden * tokens / copy
    weights = layers * (4 * hidden * hidden + 2 * hidden * inner)
    all_weights = weights + found["vocab_size"] * hidden
    update = (all_weights * (28 + 4) + weights * 6) / copy
    parts = {"products": matmul, "attention": attention, "pointwise": pointwise, "update": update}
    return {
        "model": model,
        "batch": batch,
        "tokens": tokens,
        **{f"{name}_ms": 1e3 * seconds for name, seconds in parts.items()},
        "attention_at_products_rate_ms": 1e3 * ideal_attention,
        "products_tflops": operations / matmul / 1e12,
        "floor_ms": 1e3 * sum(parts.values()),
    }


def products(tokens: int, linears: Sequence[tuple[int, int]]) -> Callable[[], None]:
    """Of linear layers (in, out) in bf16: forward, their input's gradient, their weight's; laid out as they have it."""

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    calls = []
    for i, o in linears:
        x, weight, grad = made(tokens, i), made(o, i), made(tokens, o)
        calls += [(x, weight.t(), made(tokens, o)), (grad, weight, made(tokens, i)), (grad.t(), x, made(o, i))]

    def run() -> None:
        for a, b, out in calls:
            torch.mm(a, b, out=out)

    return run


def attend(sizes: np.ndarray, hidden: int) -> Callable[[], None]:
    """Attention of one layer, forward and backward, heads of 64."""
    total, heads = int(sizes.sum()), hidden // 64
    bounds = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32, device="cuda")
    qkv = torch.randn(total, 3, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(total, heads, 64, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        out: Tensor = short_attention_joined(qkv, bounds, 512, dropout=0.1)
        torch.autograd.grad(out, qkv, grad)

    return run


def sustained(function: Callable[[], None]) -> float:
    """Seconds of one call, captured as a CUDA graph and replayed for ``SECONDS`` after as long a warm-up."""
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = [_replay(graph, 5)]
    for _ in range(2):  # the first warms the GPU
        count = max(5, int(SECONDS / times[-1]))
        times.append(_replay(graph, count))
    return times[-1]


def _replay(graph: Any, count: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy on the GPU."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)

    def run() -> None:  # by a kernel: in a graph, a plain copy goes to the slower copy engine
        torch.neg(source, out=target)

    return 2 * 2**30 / sustained(run)


def step(file: Path | None, model: str, batch: int, *, early: bool) -> float | None:
    """The fastest step of these records."""
    records = [json.loads(line) for line in file.read_text().splitlines()] if file else []
    alike = [r for r in records if (r["model"], r["batch"]) == (model, batch)]
    same = [r for r in alike if (r["path"].get("early_pooling") == "the last block") == early]
    return min((r["step_ms"] for r in same), default=None)


def row(record: dict[str, Any]) -> str:
    parts = [f"{record[f'{name}_ms']:.2f}" for name in ("products", "attention", "pointwise", "update", "floor")]
    parts[1] += f" ({record['attention_at_products_rate_ms']:.2f})"
    parts[0] += f" ({record['products_tflops']:.0f} TFLOP/s)"
    measured = record["step_ms"]
    last = [f"{measured:.2f}", f"{measured / record['floor_ms']:.2f}"] if measured else ["", ""]
    return "| " + " | ".join([str(record["batch"]), f"{record['tokens']:,}", *parts, *last]) + " |"


if __name__ == "__main__":
    main()
