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
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def run(source: Path, cache: Path, recipe: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Figures of one fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(json.dumps(recipe))  # JSON is YAML
        others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != "src"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), *others]),
            "PACELINE_CACHE": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "CUDA_CACHE_PATH": str(cache / "cuda"),
        }
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "paceline", "train", str(path), "--out", str(out)]
        begun = time.perf_counter()
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False, cwd=folder
        )
        if done.returncode:
            return {"error": done.stderr[-2000:]}
        summary = json.loads((out / "summary.json").read_text())
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        timed = [step for step in steps if step["kind"] == "step"]
        timed = timed[len(timed) // 2 :]
        return {
            "samples_per_second": sum(s["samples"] for s in timed) / sum(s["seconds"] for s in timed),
            "first_update_seconds": summary["first_update_seconds"],
            "peak_bytes": summary["peak_bytes"] or 0,
            "whole_seconds": time.perf_counter() - begun,
            "loss": timed[-1]["loss"],
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
    ends, records = time.monotonic() + chosen.limit, list[dict[str, Any]]()
    cases = chosen.case or [case for case in CASES if not case.startswith("cpu")]
    with tempfile.TemporaryDirectory() as caches:
        for number in range(chosen.rounds + 1):
            for case in cases:
                for version in list(versions) if number % 2 else list(versions)[::-1]:
                    if (left := ends - time.monotonic()) < 10:
                        break
                    source, settings = versions[version]
                    cache = Path(caches) / ("before" if version == "before" else "now")
                    try:
                        found = run(source, cache, recipe_of(case, settings, chosen.device), left)
                    except subprocess.TimeoutExpired:
                        break
                    records.append({"case": case, "version": version, "round": number, **found})
                    with chosen.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(records[-1]) + "\n")
                    print(records[-1], flush=True)
    print(table(records, cases, list(versions)))


def table(records: list[dict[str, Any]], cases: list[str], versions: list[str]) -> str:
    """Medians of all rounds but the first, and the ratio to those of the first version."""
    lines = ["| case | figure | " + " | ".join(versions) + " | ratio |", "|---" * (len(versions) + 3) + "|"]
    for case in cases:
        for figure in FIGURES:
            found = {
                version: [r[figure] for r in records if (r["case"], r["version"]) == (case, version) and r["round"]
                          and figure in r]
                for version in versions
            }  # fmt: skip
            if not all(found.values()):
                continue
            medians = [statistics.median(values) for values in found.values()]
            cells = [
                f"{median:,.4g} ({min(v):,.4g} to {max(v):,.4g}, n={len(v)})"
                for median, v in zip(medians, found.values(), strict=True)
            ]
            ratios = ", ".join(f"{medians[0] / other:.4f}" for other in medians[1:] if other)
            lines.append(f"| {case} | {figure} | {' | '.join(cells)} | {ratios} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
