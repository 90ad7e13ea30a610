"""Our attention over a packed row beside FlashAttention-2, at the lengths of movie reviews: speed and error.

    python benchmarks/attention_kernels.py --out attention.jsonl [--sweep]

Lengths are drawn from a lognormal distribution (mean 273, standard deviation 150), cut at 512 and sorted within a
row, longest first. Times are medians over replays of a captured CUDA graph of ``CALLS`` calls, so that no launch is
counted. Errors are ``|found - exact| / |exact|`` without dropout, against attention in fp32 a sequence at a time.
Writes one JSON line a measurement to ``--out`` and prints one table last. ``--sweep`` first measures other ways to cut
the kernels and prints the fastest; it compiles them beforehand, in processes of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.kernels import short_attention as room
from paceline.kernels.short_attention import Blocks

LONGEST = 512
CALLS, REPLAYS = 10, 9
DIM = 64
ROWS = (8_704, 17_408, 34_816)
HEADS = (12, 16)

# --sweep: M, N, warps, stages, registers
FORWARD = (
    Blocks(64, 64, 4, 3),
    Blocks(64, 64, 4, 2),
    Blocks(64, 64, 4, 2, 128),
    Blocks(64, 64, 4, 3, 128),
    Blocks(64, 32, 4, 3),
    Blocks(64, 32, 4, 4),
    Blocks(64, 128, 4, 2),
    Blocks(64, 128, 4, 2, 168),
    Blocks(128, 64, 8, 3),
    Blocks(128, 64, 8, 3, 128),
    Blocks(128, 64, 8, 2, 128),
    Blocks(128, 128, 8, 2),
)
QUERY_GRADIENT = (
    Blocks(64, 64, 4, 3, 168),
    Blocks(64, 64, 4, 2, 168),
    Blocks(64, 64, 4, 2),
    Blocks(64, 64, 4, 2, 128),
    Blocks(64, 32, 4, 3),
    Blocks(64, 32, 4, 4),
    Blocks(64, 32, 4, 3, 96),
    Blocks(64, 128, 4, 2),
    Blocks(128, 64, 8, 2, 128),
    Blocks(128, 64, 8, 3),
    Blocks(128, 32, 8, 3, 128),
)
KEY_GRADIENT = (
    Blocks(64, 64, 4, 2, 168),
    Blocks(64, 64, 4, 3, 168),
    Blocks(64, 64, 4, 1, 168),
    Blocks(64, 64, 4, 2),
    Blocks(64, 64, 4, 3),
    Blocks(64, 64, 8, 2),
    Blocks(64, 64, 8, 2, 128),
    Blocks(64, 128, 8, 2),
    Blocks(128, 64, 8, 2),
    Blocks(128, 64, 8, 3),
    Blocks(64, 32, 4, 2),
    Blocks(64, 32, 4, 2, 128),
)
TABLES = {"forward": FORWARD, "query_gradient": QUERY_GRADIENT, "key_gradient": KEY_GRADIENT}


@dataclass(frozen=True)
class Row:
    """A packed row on the device: q, k, v and the output's gradient [T, H, D], and where its sequences are."""

    parts: tuple[Tensor, Tensor, Tensor, Tensor]
    cu_seqlens: Tensor
    lengths: tuple[int, ...]

    def flops(self, backward: bool) -> float:
        """Of the matrix products that the definition needs: two forward, five backward."""
        _, heads, dim = self.parts[0].shape
        return (10.0 if backward else 4.0) * heads * dim * sum(length**2 for length in self.lengths)


def row(positions: int, heads: int, seed: int = 0) -> Row:
    """Sequences until the row is full, the last one cut; q, k and v are parts of one fused [T, 3 H D]."""
    generator = np.random.default_rng(seed)
    spread = math.log(1 + (150 / 273) ** 2)
    lengths: list[int] = []
    while (left := positions - sum(lengths)) > 0:
        drawn = generator.lognormal(math.log(273) - spread / 2, spread**0.5)
        lengths.append(min(max(int(drawn), 8), LONGEST, left))
    lengths = [*sorted(lengths, reverse=True), *[0] * (positions // LONGEST)]
    torch.manual_seed(seed)
    q, k, v = torch.randn(positions, 3 * heads * DIM, device="cuda").bfloat16().unflatten(1, (3, heads, DIM)).unbind(1)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    return Row((q, k, v, torch.randn_like(q).contiguous()), cu_seqlens, tuple(lengths))


# ---- the contenders: each makes (forward, backward), two functions that can be captured


def ours(data: Row, dropout: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    q, k, v, grad = data.parts
    tail = (LONGEST, dropout, DIM**-0.5)

    def forward() -> Any:
        return torch.ops.paceline.short_attention(q, k, v, data.cu_seqlens, *tail)

    out, log_sums, keys = forward()

    def backward() -> Any:
        return torch.ops.paceline.short_attention_backward(grad, q, k, v, out, log_sums, data.cu_seqlens, keys, *tail)

    return forward, backward


def flash(data: Row, dropout: float) -> tuple[Callable[[], Any], Callable[[], Any]]:
    q, k, v, grad = data.parts
    where = (data.cu_seqlens, data.cu_seqlens, LONGEST, LONGEST, dropout, False)

    def forward() -> Any:
        return torch.ops.aten._flash_attention_forward(q, k, v, *where, False)

    out, log_sums, state, offset, _ = forward()

    def backward() -> Any:
        return torch.ops.aten._flash_attention_backward(grad, q, k, v, out, log_sums, *where, state, offset)

    return forward, backward


CONTENDERS = {"flash": flash, "ours": ours}


def exact(data: Row) -> list[Tensor]:
    """Output and gradients in fp32, without dropout."""
    leaves = [part.float().requires_grad_() for part in data.parts[:3]]
    outs = []
    for begin, end in itertools.pairwise(data.cu_seqlens.tolist()):
        if end > begin:
            one = scaled_dot_product_attention(*(part[begin:end].transpose(0, 1)[None] for part in leaves))
            outs.append(one[0].transpose(0, 1))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, data.parts[3].float())]


# ---- measuring


def milliseconds(call: Callable[[], Any]) -> float:
    """Median time of one call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return statistics.median(times[2:])


def errors(name: str, data: Row, wanted: list[Tensor]) -> dict[str, float]:
    forward, backward = CONTENDERS[name](data, 0.0)
    found = (forward()[0], *backward())
    return {
        what: float((one.float() - right).norm() / right.norm())
        for what, one, right in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True)
    }


def compare(write: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Every contender at every size, with dropout and without."""
    results = []
    for heads, positions in itertools.product(HEADS, ROWS):
        data = row(positions, heads)
        wanted = exact(data)
        for name in CONTENDERS:
            off = max(errors(name, data, wanted).values())
            for dropout in (0.0, 0.1):
                forward, backward = CONTENDERS[name](data, dropout)
                there, back = milliseconds(forward), milliseconds(backward)
                result = {
                    "kind": "compare", "name": name, "heads": heads, "dim": DIM, "positions": positions,
                    "sequences": sum(length > 0 for length in data.lengths), "dropout": dropout,
                    "forward_ms": there, "backward_ms": back,
                    "forward_tflops": data.flops(False) / there / 1e9, "backward_tflops": data.flops(True) / back / 1e9,
                    "largest_error": off,
                }  # fmt: skip
                write(result)
                results.append(result)
    return results


def use(table: str, blocks: Blocks) -> None:
    """Cut this kernel so from now on."""
    getattr(room, table.upper())[DIM] = blocks


def compiled(table: str, blocks: Blocks) -> str | None:
    """Compile one cut into Triton's cache, in a process of its own; the reason where it cannot be."""
    use(table, blocks)
    try:
        for dropout in (0.0, 0.1):
            forward, backward = ours(row(512, 12), dropout)
            (forward if table == "forward" else backward)()
            torch.cuda.synchronize()
    except Exception as error:  # of Triton's many: too much shared memory, too few registers; it is written down
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def sweep(write: Callable[[dict[str, Any]], None], processes: int) -> None:
    """Measure every cut of every kernel at the middle size, print the five fastest, and leave the fastest in place."""
    cuts = [(table, blocks) for table, options in TABLES.items() for blocks in options]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = list(zip(cuts, pool.map(compiled, *zip(*cuts, strict=True)), strict=True))
    data = row(ROWS[1], HEADS[0])
    wanted = exact(data)
    for table in TABLES:
        timed: list[tuple[float, Blocks]] = []
        for blocks, reason in ((cut[1], reason) for cut, reason in outcomes if cut[0] == table):
            result: dict[str, Any] = {"kind": "sweep", "kernel": table, **asdict(blocks), "failed": reason}
            if reason is None:
                use(table, blocks)
                forward, backward = ours(data, 0.1)
                result["ms"] = milliseconds(forward if table == "forward" else backward)
                result["largest_error"] = max(errors("ours", data, wanted).values())
                if result["largest_error"] < 1e-2:
                    timed.append((result["ms"], blocks))
            write(result)
        timed.sort(key=lambda pair: pair[0])
        for time, blocks in timed[:5]:
            print(f"{table:15} {time:7.4f} ms{' (whole backward)' if table != 'forward' else ''}  {blocks}")
        if timed:
            use(table, timed[0][1])


def printed(results: list[dict[str, Any]]) -> None:
    """FlashAttention -> ours, a line a case."""
    print(f"{'heads':>5} {'T':>6} {'dropout':>7} {'forward ms':>18} {'backward ms':>18} {'TFLOP/s':>24} {'faster':>12}")
    ways, case = ("forward", "backward"), ("heads", "positions", "dropout")
    for new in (result for result in results if result["name"] == "ours"):
        old = next(r for r in results if r["name"] == "flash" and all(r[part] == new[part] for part in case))
        columns = [f"{new['heads']:>5} {new['positions']:>6} {new['dropout']:>7}"]
        columns += [f"{old[f'{way}_ms']:8.3f} -> {new[f'{way}_ms']:6.3f}" for way in ways]
        columns += [f"{old[f'{way}_tflops']:4.0f} -> {new[f'{way}_tflops']:3.0f}" for way in ways]
        columns += [f"{old[f'{way}_ms'] / new[f'{way}_ms']:5.2f}x" for way in ways]
        print(*columns, f"error {old['largest_error']:.1e} -> {new['largest_error']:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the file of JSON lines to write")
    parser.add_argument("--sweep", action="store_true", help="measure other ways to cut the kernels first")
    parser.add_argument("--processes", type=int, default=8, help="that compile for the sweep")
    arguments = parser.parse_args()
    reason = room.supports(torch.empty(1, 1, DIM, dtype=torch.bfloat16, device="cuda"), LONGEST)
    if reason:
        raise SystemExit(f"nothing to measure here: {reason}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8") as lines:

        def write(result: dict[str, Any]) -> None:
            lines.write(json.dumps(result) + "\n")
            lines.flush()

        write({"kind": "machine", "torch": torch.__version__, "card": torch.cuda.get_device_name()})
        if arguments.sweep:
            sweep(write, arguments.processes)
        printed(compare(write))


if __name__ == "__main__":
    main()
