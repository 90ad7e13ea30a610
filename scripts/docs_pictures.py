"""Draws the pictures of docs/memory.md and docs/tracing.md: ``python scripts/docs_pictures.py``.

From plans, from measured records, and from a run that is traced here: two minutes on two cores, without a GPU or
the network.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.predict import Predictor
from paceline.observe.formats import moment, size
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.report.bars import Bar, Piece, bar_chart
from paceline.report.charts import WIDTH
from paceline.report.memory import PARTS
from paceline.report.time_budget import COLOURS
from paceline.tracing import CATEGORIES, Budgets, budget, read_window, windows_in

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
RECORDS = [ROOT / "benchmarks" / f"memory_h200_2026-11-23_{time}.jsonl" for time in ("seventh", "ninth")]
"""Runs predicted and measured; of a case the last counts."""

LARGE: Final = (
    "{model_type: bert, hidden_size: 1024, num_hidden_layers: 24, num_attention_heads: 16, intermediate_size: 4096}"
)
"""bert-large-uncased by its configuration, so that nothing is downloaded."""

LADDER: Final = (
    ("as it is", ()),
    ("+ micro_batch_size=1", ("loop.micro_batch_size=1",)),
    ("+ recompute", ("techniques.recompute=true",)),
    ("+ fp16", ("techniques.precision=fp16",)),
    ("+ adamw8bit", ("optimizer.type=adamw8bit",)),
)
CHANGES: Final = (
    ("as it is", ()),
    ("precision=fp16", ("techniques.precision=fp16",)),
    ("micro_batch_size=16", ("loop.micro_batch_size=16",)),
    ("recompute", ("techniques.recompute=true",)),
)

SMALL: Final = """
name: small
model:
  config: {model_type: distilbert, dim: 128, n_layers: 2, n_heads: 4, hidden_dim: 512, max_position_embeddings: 256}
data:
  source: "builtin:random"
  random: {samples: 512, length: [8, 200], vocabulary: 1000}
  max_length: 200
loop: {epochs: 1, batch_size: 16}
"""

LATE: Final = """
import os, time
from transformers import DistilBertConfig, DistilBertForSequenceClassification

def model(num_labels):
    sizes = dict(dim=128, n_layers=2, n_heads=4, hidden_dim=512, max_position_embeddings=256, vocab_size=1000)
    made = DistilBertForSequenceClassification(DistilBertConfig(num_labels=num_labels, **sizes))
    if os.environ.get("RANK") == "1":
        made.register_forward_pre_hook(lambda *_: time.sleep(0.04))
    return made
"""
"""A model that is late on one rank."""

CONTEXT: Final = "context", 10
UNUSED: Final = "reserved, unused", 0
SEEN: Final = 0.003
"""Share of the longest bar from which on a piece is named."""

WIDEST: Final = 16.0
"""Percent at which the axis of errors ends."""

STYLE: Final = """
svg { --page: #fff; --ink: #1d2126; --soft: #646c76; --line: #e4e2dd;
  --c0: #2563a8; --c1: #c2570c; --c2: #15803d; --c3: #7c3aed; --c4: #0e7490; --c5: #be185d; }
@media (prefers-color-scheme: dark) { svg { --page: #14171b; --ink: #e6e8eb; --soft: #98a1ac; --line: #2d333b;
  --c0: #6cb0f5; --c1: #f29d52; --c2: #5fc98a; --c3: #b79cf7; --c4: #4fc3d9; --c5: #f083b4; } }
text { fill: var(--soft); font: 11.5px system-ui, sans-serif; } .title { fill: var(--ink); font-size: 13px; }
.x { text-anchor: middle; } .y { text-anchor: end; } .grid { stroke: var(--line); } .page { fill: var(--page); }
.p0 { fill: #8a7f78; } .p1 { fill: var(--c4); } .p2 { fill: var(--c2); } .p3 { fill: var(--c3); } .p4 { fill: #d4a72c; }
.p5 { fill: #7d5a3c; } .p6 { fill: var(--c0); } .p7 { fill: var(--c1); } .p8 { fill: var(--c5); } .p9 { fill: #9a8f3c; }
.p10 { fill: var(--soft); } .p11 { fill: var(--ink); }
.limit { stroke: var(--c5); stroke-dasharray: 4 3; } circle { fill: var(--c0); opacity: .6; }
"""


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    anatomy = Recipe.load(ROOT / "recipes" / "memory_anatomy.yaml")
    large = Recipe.load(ROOT / "recipes" / "imdb_bert_large.yaml").with_settings(
        ["model.source=null", f"model.config={LARGE}"]
    )
    _write(
        "memory_ladder", bars("What fills an H200: BERT-large, batch 4 of 512 tokens", plans(anatomy, "h200", LADDER))
    )
    alone = [(name, settings) for name, settings in CHANGES]
    figure = bars(
        "What makes BERT-large fit a V100 of 32 GiB: batch 32 of 512 tokens",
        plans(large, "v100-32gb", alone, adding=False),
        limit=gpu_for("v100-32gb").memory_bytes,
    )
    _write("memory_changes", figure)
    _write("trace_try", tried())
    _write("trace_ranks", ranks())
    _write("memory_errors", errors(records()))


def records() -> list[dict[str, Any]]:
    lines = "".join(file.read_text(encoding="utf-8") for file in RECORDS).splitlines()
    return list({record["name"]: record for record in map(json.loads, lines)}.values())


def plans(
    recipe: Recipe, gpu: str, rungs: Sequence[tuple[str, Sequence[str]]], *, adding: bool = True
) -> Iterator[tuple[str, MemoryPlan]]:
    """A plan of each rung, with its own settings, or with those of the rungs before it too."""
    planned_for, before = gpu_for(gpu), []
    # the wheels of torchao and bitsandbytes are not needed to plan with 8-bit states
    here = facts_with([planned_for], this_machine())
    here = replace(here, versions={**here.versions, "bitsandbytes": "planned"})
    with Predictor() as predictor:
        for name, settings in rungs:
            before = [*before, *settings] if adding else list(settings)
            yield name, predictor.plan(choose(recipe.with_settings(before), here, 1)[0], planned_for, world_size=1)


def tried() -> str:
    """A mean step of a small model on this machine's CPU, padded and packed: what ``paceline trace --try`` compares."""
    with tempfile.TemporaryDirectory() as folder:
        run = traced(Path(folder), "--set", "techniques.packing=false", "--try")
        rows = {
            "techniques.packing=false": _budgets(run).mean(0),
            "techniques.packing=true": _budgets(Path(f"{run}-tried")).mean(0),
        }
    return steps("A mean step of a small model on a CPU, before and after the switch", rows)


def ranks() -> str:
    """A mean step of two ranks, one of which is late: the other one waits for it."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "late.py").write_text(LATE, encoding="utf-8")
        run = traced(
            Path(folder), "--processes", "2", "--set", "model.config=null", "--set", "model.factory=late:model"
        )
        budgets = _budgets(run)
    rows = {f"rank {rank}": budgets.mean(rank) for rank in range(2)}
    return steps("A mean step of two ranks on a CPU; rank 1 sleeps 40 ms before each forward pass", rows)


def traced(folder: Path, *options: str) -> Path:
    """The run folder of ``paceline trace`` on a small model."""
    (folder / "small.yaml").write_text(SMALL, encoding="utf-8")
    words = [sys.executable, "-m", "paceline", "trace", "small.yaml", "--steps", "10:20", "--out", "run"]
    subprocess.run([*words, *options], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return folder / "run"


def _budgets(run: Path) -> Budgets:
    return budget(read_window(windows_in(run)[0]))


def steps(title: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """A bar a mean step, of seconds by category."""
    drawn = [
        Bar(name=name, pieces=[Piece(name=part, value=mean[part], colour=COLOURS[part]) for part in CATEGORIES])
        for name, mean in rows.items()
    ]
    return stacked(title, drawn, unit=1e-3, unit_name="ms", write=moment)


def bars(title: str, found: Iterator[tuple[str, MemoryPlan]], limit: int | None = None) -> str:
    """A bar a plan: what is alive at the peak, what the allocator keeps beside it, and the driver's context."""
    drawn = []
    for name, plan in found:
        parts = [Piece(name=part, value=plan.parts.get(part, 0), colour=colour) for part, colour in PARTS.items()]
        unused = Piece(name=UNUSED[0], value=plan.reserved - plan.allocated, colour=UNUSED[1])
        context = Piece(name=CONTEXT[0], value=plan.outside, colour=CONTEXT[1])
        drawn.append(Bar(name=name, pieces=[*parts, unused, context]))
        print(f"{name}: {size(plan.allocated)} allocated, {size(plan.total)} on the GPU")
    return stacked(title, drawn, unit=2**30, unit_name="GiB", write=size, limit=limit)


def stacked(
    title: str,
    drawn: Sequence[Bar],
    *,
    unit: float,
    unit_name: str,
    write: Callable[[float], str],
    limit: int | None = None,
) -> str:
    """The report's chart of bars as a picture that stands alone, with a legend, and with a line where ``limit`` is."""
    chart = str(bar_chart(title, drawn, height=22, unit=unit, unit_name=unit_name, write=write))
    inner = chart[chart.index("<svg") : chart.index("</figure>")]
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', inner)[0])
    if limit:
        inner = inner.replace("</svg>", _limit_line(inner, drawn, limit, height) + "</svg>")
    longest = max(sum(piece.value for piece in bar.pieces) for bar in drawn)
    # what is too small to be seen needs no name
    used = {piece.name: piece.colour for bar in drawn for piece in bar.pieces if piece.value > SEEN * longest}
    legend, lines = _legend(used)
    body = inner.replace("<svg ", f'<svg x="0" y="{30 + 18 * lines}" width="{width:g}" height="{height:g}" ', 1)
    return _page(title, width, 30 + 18 * lines + height, legend + body)


def _limit_line(inner: str, drawn: Sequence[Bar], limit: int, height: float) -> str:
    """Where the GPU ends, on the axis of the chart."""
    left = min(float(x) for x in re.findall(r'<rect class="p\d+" x="([\d.]+)"', inner))
    longest = max(sum(piece.value for piece in bar.pieces) for bar in drawn)
    x = left + limit / longest * (WIDTH - left - 16)
    return f'<path class="limit" d="M{x:.1f} 0V{height - 24:g}"/>'


def _legend(used: Mapping[str, int]) -> tuple[str, int]:
    """Names beside their colours, and the number of lines that they take."""
    parts, x, line = [], 8.0, 0
    for name, colour in used.items():
        wide = 26 + 6.4 * len(name)
        if x + wide > WIDTH:
            x, line = 8.0, line + 1
        y = 32 + 18 * line
        parts.append(f'<rect class="p{colour}" x="{x:.0f}" y="{y}" width="11" height="11"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="{y + 10}">{name}</text>')
        x += wide
    return "".join(parts), line + 1


def errors(records: Sequence[Mapping[str, Any]]) -> str:
    """A dot a run: how far its prediction was off, in percent; those outside are named."""
    title = f"Predicted beside measured: {sum('measured' in each for each in records)} runs on H200s"
    left, right, row = 80.0, WIDTH - 20.0, 62.0
    place: Callable[[float], float] = lambda percent: left + (percent + WIDEST) / (2 * WIDEST) * (right - left)  # noqa: E731
    parts, bottom = [], 40 + 3 * row
    for mark in range(-15, 16, 5):
        x = place(mark)
        parts.append(f'<path class="grid" d="M{x:.1f} 36V{bottom:g}"/>')
        parts.append(f'<text class="x" x="{x:.1f}" y="{bottom + 16:g}">{mark:+d} %</text>')
    for index, name in enumerate(("allocated", "reserved", "total")):
        middle, outside = 40 + row * (index + 0.5), []
        parts.append(f'<text class="y" x="{left - 10:g}" y="{middle + 4:g}">{name}</text>')
        off = sorted(
            (100 * (each[name] / each["measured"][name] - 1), each["name"]) for each in records if "measured" in each
        )
        for number, (percent, case) in enumerate(off):
            if abs(percent) > WIDEST:
                outside.append(f"{case} {percent:+.0f} %")
                continue
            y = middle + (number % 5 - 2) * 7
            parts.append(f'<circle cx="{place(percent):.1f}" cy="{y:.1f}" r="3.5"><title>{case}</title></circle>')
        if outside:
            parts.append(f'<text x="{left + 4:g}" y="{middle + 24:g}">outside: {", ".join(outside)}</text>')
    return _page(title, WIDTH, bottom + 28, "".join(parts))


def _page(title: str, width: float, height: float, body: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{title}">'
    )
    page = f'<rect class="page" width="{width:g}" height="{height:g}"/><text class="title" x="8" y="20">{title}</text>'
    return f"{head}<style>{STYLE}</style>{page}{body}</svg>\n"


def _write(name: str, text: str) -> None:
    (PICTURES / f"{name}.svg").write_text(text, encoding="utf-8")
    print(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main()
