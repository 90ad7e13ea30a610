"""Does the micro-batch that a plan calls the largest fit, and how far is the true one?

    python benchmarks/memory_largest.py predict --gpu h200 --out PREDICTED.jsonl [--only PATTERN]
    python benchmarks/memory_largest.py measure --predicted PREDICTED.jsonl --out MEASURED.jsonl [--deadline SECONDS]

``predict`` asks ``paceline plan`` on any machine; commit what it says. ``measure`` trains a few steps on such a GPU,
each time in a fresh process: the micro-batch of the plan, which has to fit; the one that it is 90 % of, which must not;
then that one again with ``loop.on_oom=split``, which has to get through; then what lies between, halved until it is
known to 2 %, or the time ends.
Recipes are in memory_cases.yaml, under ``largest``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml
from memory_accuracy import HERE, Record, append, read, run_forked, versions

STEPS = 3
"""Of a trial: shapes that come twice are captured at their second time."""
LIMIT_SECONDS = 120.0
SHARE = 0.9
"""Of the true maximum, what a plan has to find."""


def cases(only: str) -> dict[str, Record]:
    """Recipes by name."""
    told = yaml.safe_load((HERE / "memory_cases.yaml").read_text(encoding="utf-8"))
    found: dict[str, Record] = {}
    for name, case in told["largest"].items():
        if fnmatch(name, only):
            random = {**told["data"][case["data"]], "samples": 2 * case["batch"], "vocabulary": 30000}
            found[name] = {
                "name": name,
                "model": {"config": told["models"][case["model"]]},
                "data": {"source": "builtin:random", "random": random},
                "techniques": case.get("techniques", {}),
                "loop": {"batch_size": case["batch"], "max_steps": STEPS, "epochs": 1, "save_best": False},
                "observe": {"report": False, "memory_plan": False},
            }
    return found


def predict(gpu: str, out: Path, only: str) -> None:
    for name, recipe in cases(only).items():
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "recipe.yaml"
            file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
            command = [sys.executable, "-m", "paceline", "plan", str(file), "--gpu", gpu, "--json"]
            begun = time.perf_counter()
            plan = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        found = {key: plan["largest_micro_batch"][key] for key in ("samples", "total", "too_large")}
        record = {"name": name, "card": plan["memory"]["card"], "largest": found, "recipe": recipe}
        append(out, {**record, "seconds": time.perf_counter() - begun, "versions": versions()})
        print(name, found, flush=True)


def measure(predicted: Path, out: Path, only: str, deadline: float, trials: int) -> None:
    ends = time.monotonic() + deadline
    for record in read(predicted):
        if not fnmatch(record["name"], only):
            continue
        chosen = record["largest"]["samples"]
        fits, does_not = chosen, int(chosen / SHARE) + 1
        sizes: list[tuple[int, str]] = [(chosen, "fail"), (does_not, "fail"), (does_not, "split")]
        left = trials
        while sizes and left and time.monotonic() < ends:
            (size, on_oom), left = sizes.pop(0), left - 1
            trial = tried(record, size, on_oom, min(LIMIT_SECONDS, ends - time.monotonic()))
            append(
                out, {"name": record["name"], "card": record["card"], "chosen": chosen, **trial, "versions": versions()}
            )
            print(record["name"], f"{size} samples, {size / chosen - 1:+.1%}", on_oom, trial, flush=True)
            if trial["fits"] is None:
                break  # nothing was found out
            if on_oom == "fail":
                fits, does_not = (max(fits, size), does_not) if trial["fits"] else (fits, min(does_not, size))
            if not sizes and does_not - fits > 0.02 * chosen:
                sizes.append(((fits + does_not) // 2, "fail"))


def tried(record: Record, size: int, on_oom: str, limit: float) -> Record:
    """Train with micro-batches of ``size``."""
    trial: Record = {"micro_batch": size, "on_oom": on_oom}
    with tempfile.TemporaryDirectory() as place:
        recipe, folder, log = (Path(place) / part for part in ("recipe.yaml", "run", "log"))
        recipe.write_text(yaml.safe_dump(record["recipe"]), encoding="utf-8")
        settings = [f"loop.micro_batch_size={size}", f"loop.on_oom={on_oom}"]
        options = [part for setting in settings for part in ("--set", setting)]
        begun = time.perf_counter()
        try:
            code = run_forked(["train", str(recipe), "--out", str(folder), *options], log, limit)
        except TimeoutError:
            return {**trial, "fits": None, "why": f"no end in {limit:.0f} s"}
        said = log.read_text(encoding="utf-8")
        fits = None if code and "out of memory" not in said else code == 0
        trial |= {"fits": fits, "exit": code, "seconds": time.perf_counter() - begun}
        if code == 0:
            summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            trial |= {name: summary["memory"][name] for name in ("allocated", "reserved", "total")}
        lines = [line.strip() for line in said.splitlines() if "memory" in line or "micro" in line]
        return {**trial, "said": lines[:12]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("predict", "measure"))
    parser.add_argument("--only", default="*", help="pattern of names")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--predicted", type=Path)
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds")
    parser.add_argument("--trials", type=int, default=20, help="of a run, at most; 1: the plan's answer alone")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.command == "predict":
        predict(chosen.gpu, chosen.out, chosen.only)
    elif chosen.predicted is None:
        parser.error("measure needs --predicted")
    else:
        measure(chosen.predicted, chosen.out, chosen.only, chosen.deadline, chosen.trials)


if __name__ == "__main__":
    main()
