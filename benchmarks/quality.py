"""What does each technique that changes the result do to the result? The same fine-tune with it and without, by seeds.

    python benchmarks/quality.py digits --out results/
    python benchmarks/quality.py imdb --out results/ --model MINILM_FOLDER --data imdb.jsonl.gz

``quality.yaml`` has the suites: a recipe, and rows of settings that are changed in it. Seeds are the outer loop, so
that a run that is cut off has every row equally often. One JSON line a run goes to ``results/SUITE.jsonl``; the same
command again goes on where it stopped. Several may run beside each other with seeds and folders of their own; their
lines in one file make one table. The table is printed last and written to ``results/SUITE.md``. All runs are in
one process: speed is not compared here.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

import paceline
from paceline.bench.records import Record, Records
from paceline.machine.facts import this_machine
from paceline.recipe import Recipe

SUITES = Path(__file__).with_suffix(".yaml")

PLAIN = "plain"
"""The row with nothing changed, beside which the others stand."""

# Student's t, two-sided 95 %, by degrees of freedom: NIST/SEMATECH e-Handbook, table 1.3.6.7.2
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def run_one(suite: Record, row: str, seed: int, settings: Sequence[str], folder: Path) -> Record:
    """Train one row with one seed, and what is known of it at the end."""
    chosen = Recipe.parse(suite["recipe"]).with_settings([*suite["rows"][row], *settings, f"seed={seed}"])
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    record: Record = {"row": row, "seed": seed, "settings": suite["rows"][row]}
    try:
        done = paceline.train(chosen, out=folder)
    except paceline.PacelineError as error:
        return {**record, "error": str(error)}
    found = {f"{split}.{name}": value for split, scores in done.final.items() for name, value in scores.items()}
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    shutil.rmtree(folder)
    return {**record, "seconds": round(time.monotonic() - began, 1), "steps": done.steps, "final": numbers}


def table(suite: Record, records: Sequence[Record]) -> str:
    """Mean and spread of each row over its seeds, and how far it is from the plain row with the same seeds."""
    shown = suite["metrics"]
    lines = [
        f"| row | n | {' | '.join(f'{name}, mean (std) | beside {PLAIN}, 95 %' for name in shown)} |",
        f"|---|---|{'---|---|' * len(shown)}",
    ]
    by_row = {row: {r["seed"]: r for r in records if r["row"] == row} for row in suite["rows"]}
    for row, runs in by_row.items():
        failed = [r["error"] for r in runs.values() if "error" in r]
        if failed or not runs:
            lines.append(f"| {row} | 0 | {failed[0].splitlines()[0] if failed else 'not run'} |")
            continue
        cells = [cell for name in shown for cell in _cells(name, runs, {} if row == PLAIN else by_row[PLAIN])]
        lines.append(f"| {row} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(name: str, runs: dict[int, Record], plain: dict[int, Record]) -> tuple[str, str]:
    values = [run["final"][name] for run in runs.values()]
    spread = f" ({statistics.stdev(values):.4f})" if len(values) > 1 else ""
    paired = [runs[seed]["final"][name] - plain[seed]["final"][name] for seed in runs.keys() & plain.keys()]
    beside = f"{statistics.fmean(paired):+.4f}" if paired else ""
    if len(paired) > 1:
        beside += f" ± {T_95.get(len(paired) - 1, 1.96) * statistics.stdev(paired) / math.sqrt(len(paired)):.4f}"
    return f"{statistics.fmean(values):.4f}{spread}", beside


def main() -> None:
    suites = yaml.safe_load(SUITES.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=suites)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of them")
    parser.add_argument("--only", default="*", metavar="PATTERN", help=f"rows to run beside {PLAIN}")
    parser.add_argument("--deadline", type=float, default=math.inf, metavar="SECONDS", help="start no run after them")
    parser.add_argument("--model", help="folder of the pretrained model, for suites that have one")
    parser.add_argument("--data", help="file of the data, for suites that need one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all rows, plain too")
    asked = parser.parse_args()
    suite, began = suites[asked.suite], time.monotonic()
    named = {"model.source": asked.model, "data.source": asked.data}
    settings = [*(f"{key}={Path(value).resolve()}" for key, value in named.items() if value), *asked.set]
    # in records, what was read has a name; where it lay is nobody's business
    told = [*(f"{key}={Path(value).name}" for key, value in named.items() if value), *asked.set]
    asked.out.mkdir(parents=True, exist_ok=True)
    records = Records(asked.out / f"{asked.suite}.jsonl", key=("row", "seed"))
    facts = this_machine()
    about = {"torch": facts.versions.get("torch"), "device": facts.gpus[0].name if facts.gpus else "cpu"}
    rows = [row for row in suite["rows"] if row == PLAIN or fnmatch.fnmatch(row, asked.only)]
    for seed in range(asked.first, asked.first + asked.seeds):
        for row in rows:
            if records.get(row, seed) or time.monotonic() - began > asked.deadline:
                continue
            records.add({**run_one(suite, row, seed, settings, asked.out / "run"), **about, "set": told})
    text = table(suite, list(records))
    (asked.out / f"{asked.suite}.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
