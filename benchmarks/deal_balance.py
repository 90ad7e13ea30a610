"""How even is the split of a global batch over ranks, and how long does it take?

    python benchmarks/deal_balance.py [--data imdb.jsonl.gz --tokenizer TOKENIZER_FOLDER] [--out FILE.jsonl]

A step is over when the fullest rank is: its tokens over the mean of all ranks is what the step takes over what it
could take. Beside ours stands the split of a plain sampler (every N-th sample of the same shuffled batch). Lengths are
those of the texts, cut at 512 tokens; without ``--data`` they are drawn like IMDB's (mean about 270, a seventh at 512).
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.order import OrderState, ShuffledOrder, StepPlan, split_evenly

RANKS, BATCHES = (2, 4, 8), (8, 32, 128)
PIECES = 4
"""Micro-batches of a rank where accumulation is looked at."""
SQUARE = 5.4e-4
"""What a token's attention costs per token of its text, beside all else that it costs: DistilBERT, batch 64, H200, took
1.8 ms for attention and 10.15 ms for what grows with tokens (step_anatomy_h200_2026-11-21.md), and its texts' squared
lengths add up to 331 a token."""
COLUMNS = (
    ("ranks", "ranks"),
    ("batch", "batch a rank"),
    ("random_mean", "random, mean"),
    ("random_worst", "worst"),
    ("ours_mean", "ours, mean"),
    ("ours_worst", "worst"),
    ("pieces_mean", f"of {PIECES} micro-batches, mean"),
    ("pieces_worst", "worst"),
    ("cost_by_tokens", "cost, mean"),
    ("cost_by_cost", "cost, split by cost"),
    ("plan_ms", "plan, ms"),
)


def read_lengths(data: Path, tokenizer: Path) -> np.ndarray:
    """Tokens of each text of a JSON-lines file, special tokens included."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    encoder.no_padding()
    encoder.enable_truncation(512)
    with gzip.open(data, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    chunks = (texts[begin : begin + 1000] for begin in range(0, len(texts), 1000))
    return np.array([len(found) for chunk in chunks for found in encoder.encode_batch_fast(chunk)], dtype=np.int64)


def draw_lengths(samples: int) -> np.ndarray:
    """Token counts like those of IMDB reviews cut at 512."""
    generator = np.random.default_rng(0)
    return np.clip(np.exp(generator.normal(5.45, 0.62, samples)), 16, 512).astype(np.int64)


def fullest(totals: Sequence[float] | np.ndarray) -> float:
    """The fullest over the mean."""
    return float(np.max(totals) / np.mean(totals))


def plans(order: ShuffledOrder, batch_size: int, ranks: int, steps: int) -> Iterator[list[StepPlan]]:
    """Each step as every rank plans it."""
    at = OrderState(seed=0, epoch=0, step=0, batch_size=batch_size)
    for _ in range(steps):
        yield [order.plan(at, rank, ranks) for rank in range(ranks)]
        at = order.after(at)


def measure(lengths: np.ndarray, ranks: int, batch: int, steps: int) -> dict[str, Any]:
    """One line of the table: shares over ``steps`` steps of ``ranks`` x ``batch`` samples."""
    ids, costs = np.arange(len(lengths)), lengths + SQUARE * lengths**2
    found: dict[str, list[float]] = {"random": [], "ours": [], "pieces": [], "cost_by_tokens": [], "cost_by_cost": []}
    whole = ShuffledOrder(ids, micro_batch_size=batch, drop_last=True, lengths=lengths)
    for planned in plans(whole, ranks * batch, ranks, steps):
        samples, shares = planned[0].samples, [plan.microbatches[0] for plan in planned]
        found["random"].append(fullest([lengths[samples[rank::ranks]].sum() for rank in range(ranks)]))
        found["ours"].append(fullest([lengths[share].sum() for share in shares]))
        found["cost_by_tokens"].append(fullest([costs[share].sum() for share in shares]))
        split = split_evenly(np.rint(costs[samples]).astype(np.int64), ranks)
        found["cost_by_cost"].append(fullest(np.bincount(split, costs[samples], ranks)))
    cut = ShuffledOrder(ids, micro_batch_size=batch // PIECES, drop_last=True, lengths=lengths)
    for planned in plans(cut, ranks * batch, ranks, steps):
        found["pieces"].append(fullest([lengths[ids].sum() for plan in planned for ids in plan.microbatches]))
    worst = {f"{name}_worst": max(found[name]) for name in ("random", "ours", "pieces")}
    means = {name if name.startswith("cost") else f"{name}_mean": float(np.mean(v)) for name, v in found.items()}
    return {"ranks": ranks, "batch": batch, "steps": steps, **means, **worst, "plan_ms": plan_ms(whole, ranks, batch)}


def plan_ms(order: ShuffledOrder, ranks: int, batch: int) -> float:
    """Milliseconds that one rank takes to plan a step: the median of 100."""
    at, seconds = OrderState(seed=1, epoch=0, step=0, batch_size=ranks * batch), []
    order.plan(at)  # the permutation is drawn once an epoch
    for _ in range(min(100, order.steps_per_epoch(at.batch_size))):
        started = time.perf_counter()
        order.plan(at, ranks - 1, ranks)
        seconds.append(time.perf_counter() - started)
        at = order.after(at)
    return 1e3 * float(np.median(seconds))


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSON lines (.gz) with text; default: lengths drawn like IMDB's")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json; needed with --data")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="appends a JSON line a row of the table")
    chosen = parser.parse_args()
    if (chosen.data is None) != (chosen.tokenizer is None):
        parser.error("--data and --tokenizer go together")
    lengths = read_lengths(chosen.data, chosen.tokenizer) if chosen.data else draw_lengths(50_000)
    print(f"{len(lengths):,} texts of {lengths.mean():.1f} tokens on average, {chosen.steps} steps\n")
    print(line([title for _, title in COLUMNS]))
    print(line(["---"] * len(COLUMNS)))
    for ranks in RANKS:
        for batch in BATCHES:
            record = measure(lengths, ranks, batch, chosen.steps)
            cells = [record[name] for name, _ in COLUMNS]
            print(line([str(cell) if isinstance(cell, int) else f"{cell:.4f}" for cell in cells]), flush=True)
            if chosen.out:
                lengths_of = chosen.data.name if chosen.data else "drawn"
                with chosen.out.open("a") as file:
                    file.write(json.dumps({"lengths": lengths_of, "texts": len(lengths), **record}) + "\n")


if __name__ == "__main__":
    main()
