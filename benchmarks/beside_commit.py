"""Whole runs of two versions of paceline in turns: does a change of the code cost speed or memory?

    git worktree add ../before COMMIT
    python benchmarks/beside_commit.py --before ../before/src --out beside.jsonl

Each run is a fresh process on random texts of 50 to 512 tokens, and each version has compile caches of its own. The
first round fills them and is left out. Told of each case: samples a second over the second half of the steps, seconds
to the first update, and the peak of the allocator, each as median with its range, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.cells import in_turns
from paceline.bench.records import Record, append
from paceline.bench.spread import Spread
from paceline.bench.start import environment, train

ROOT = Path(__file__).resolve().parents[1]

DISTILBERT = {"model_type": "distilbert"}
LARGE = {
    "model_type": "bert",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
TINY = {"model_type": "distilbert", "dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128}

CASES: Mapping[str, tuple[Mapping[str, Any], int, int]] = {
    "distilbert_12": (DISTILBERT, 12, 600),
    "distilbert_32": (DISTILBERT, 32, 400),
    "distilbert_128": (DISTILBERT, 128, 160),
    "bert_large_32": (LARGE, 32, 100),
    "cpu_tiny_8": (TINY, 8, 120),
}
"""Name -> configuration, batch size, steps."""

FIGURES = ("samples_per_second", "first_update_seconds", "peak_bytes")


def recipe_of(case: str, settings: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The recipe of a case, as YAML has it."""
    config, batch, steps = CASES[case]
    return {
        "model": {"config": dict(config)},
        "data": {
            "source": "builtin:random",
            "random": {"samples": 4096, "length": [50, 512], "vocabulary": 30522},
            "max_length": 512,
            "splits": {"validation": 0, "test": 0},
        },
        "loop": {
            "batch_size": batch,
            "epochs": 1000,
            "max_steps": steps,
            "save_best": False,
            "evaluate_every": "never",
            "checkpoint_every": "never",
        },
        "observe": {"console": "off", "report": False, "memory_plan": False},
        "techniques": dict(settings),
        "device": device,
    }


def run(source: Path, cache: Path, recipe: Mapping[str, Any], seconds: float) -> Record | None:
    """Figures of one fresh process; None where it was not over in time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(json.dumps(recipe))  # JSON is YAML
        variables = environment(cache, sources=(source,))
        out, log = Path(folder) / "run", Path(folder) / "log.txt"
        trained = train(path, out, (), environment=variables, log=log, limit_seconds=seconds, folder=Path(folder))
    outcome, summary = trained.outcome, trained.summary
    if outcome.status == "timeout":
        return None
    if outcome.status != "ok" or summary is None:
        return {"error": outcome.error}
    return {
        "samples_per_second": trained.samples_per_second(len(trained.steps) // 2),
        "first_update_seconds": summary["first_update_seconds"],
        "peak_bytes": summary["peak_bytes"] or 0,
        "whole_seconds": outcome.seconds,
        "loss": trained.steps[-1].fields["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="source folder of the version to compare with")
    parser.add_argument("--without", action="append", default=[], help="technique to compare with its absence")
    parser.add_argument("--case", action="append", choices=CASES, help="in place of all that are for a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no run begins")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    versions: dict[str, tuple[Path, dict[str, Any]]] = {"now": (ROOT / "src", {})}
    if chosen.before:
        versions["before"] = (chosen.before.resolve(), {})
    versions |= {f"without {name}": (ROOT / "src", {name: False}) for name in chosen.without}
    ends, records = time.monotonic() + chosen.limit, list[Record]()
    cases = chosen.case or [case for case in CASES if not case.startswith("cpu")]
    with tempfile.TemporaryDirectory() as caches:
        for number, case, version in in_order(cases, list(versions), chosen.rounds + 1):
            if (left := ends - time.monotonic()) < 10:
                break
            source, settings = versions[version]
            cache = Path(caches) / ("before" if version == "before" else "now")
            found = run(source, cache, recipe_of(case, settings, chosen.device), left)
            if found is None:
                break
            records.append({"case": case, "version": version, "round": number, **found})
            append(chosen.out, records[-1])
            print(records[-1], flush=True)
    print(table(records, cases, list(versions)))


def in_order(cases: Sequence[str], versions: Sequence[str], rounds: int) -> Iterator[tuple[int, str, str]]:
    """Round, case and version: versions of a case stand beside each other, and take turns in going first."""
    turns = list(in_turns(versions, rounds))
    for number in range(rounds):
        yield from ((number, case, version) for case in cases for version, when in turns if when == number)


def table(records: Sequence[Record], cases: Sequence[str], versions: Sequence[str]) -> str:
    """Medians of all rounds but the first, and the ratio to those of the first version."""
    lines = ["| case | figure | " + " | ".join(versions) + " | ratio |", "|---" * (len(versions) + 3) + "|"]
    for case in cases:
        for figure in FIGURES:
            spreads = [
                Spread.of([r for r in records if (r["case"], r["version"]) == (case, version) and r["round"]], figure)
                for version in versions
            ]
            found = [spread for spread in spreads if spread is not None]
            if len(found) < len(versions):
                continue
            medians = [spread.median for spread in found]
            cells = [f"{each.median:,.4g} ({each.low:,.4g} to {each.high:,.4g}, n={each.n})" for each in found]
            ratios = ", ".join(f"{medians[0] / other:.4f}" for other in medians[1:] if other)
            lines.append(f"| {case} | {figure} | {' | '.join(cells)} | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
