"""The memory that ``benchmarks/memory_accuracy.py`` predicts for an H200, against bytes written down.

    python -m tests.golden.predictions [--check | --write] [--only PATTERN]
    python -m tests.golden.predictions --beside benchmarks/memory_h200_2026-11-23_ninth.predicted.jsonl

Makes the predictions of all cases anew, on a CPU alone and in minutes, and prints which differ from
``predictions.json``, and by how many bytes: allocated, reserved, total and every part. A change of the engine that
allocates otherwise is seen there, such as a copy that lives longer, or a recompute that is no longer done. ``--write``
writes them down, for a change that is meant to. ``--beside`` compares with predictions that were recorded in benchmarks
before a measurement instead; those were made by an engine, and mostly with a torch, of their day.

What a pass keeps is torch's decision, so there is a record for each version of torch and transformers.

Exit code 0: as recorded; 1: not; 3: there is no record for these versions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("predictions.json")
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_accuracy.py"

SAME, OTHER, NO_RECORD = 0, 1, 3
"""Exit codes, as those of tests/golden/hashes.py."""

BYTES = ("allocated", "reserved", "total")

Case = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare with predictions.json; so it is without options")
    what.add_argument("--write", action="store_true", help="write predictions.json")
    what.add_argument("--beside", type=Path, metavar="PREDICTED.jsonl", help="compare with predictions of a benchmark")
    parser.add_argument("--only", default="*", help="pattern of cases, such as 'fsdp*'")
    chosen = parser.parse_args()
    records = read_records()
    recorded = read_predicted(chosen.beside) if chosen.beside else records.get(versions())
    if recorded is None and not chosen.write:
        print(
            f"no record for {versions()}, only for {'; '.join(records)}; --write adds one, from a state to compare with"
        )
        return NO_RECORD
    found = predictions(chosen.only)
    if chosen.write:
        records[versions()] = {**(recorded or {}), **found} if chosen.only != "*" else found
        FILE.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        print(f"{len(found)} cases written down")
        return SAME
    lines = differences(found, recorded or {})
    print("\n".join([*lines, f"{len(found)} cases, {versions()}: {len(found) - len(lines)} as recorded"]))
    return OTHER if lines else SAME


def predictions(only: str) -> dict[str, Case]:
    """Name -> what is compared of each case; the benchmark's command makes and prints them."""
    with tempfile.TemporaryDirectory(prefix="golden-") as place:
        file = Path(place) / "predicted.jsonl"
        command = [sys.executable, str(BENCHMARK), "predict", "--gpu", "h200", "--only", only, "--out", str(file)]
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PACELINE_CACHE": str(Path(place) / "cache")}
        subprocess.run(command, env={**os.environ, **variables}, check=True)
        return read_predicted(file)


def read_predicted(file: Path) -> dict[str, Case]:
    """Of a file of the benchmark: bytes, and what they are of; not how long it took."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    if not lines:
        raise SystemExit(f"{file}: no predictions; --only takes a pattern of names in benchmarks/memory_cases.yaml")
    return {
        line["name"]: {name: line[name] for name in (*BYTES, "parts", "moment", "problem") if name in line}
        for line in lines
    }


def differences(found: Mapping[str, Case], recorded: Mapping[str, Case]) -> list[str]:
    """A line for each case that is not as recorded."""
    lines = []
    for name, case in found.items():
        if name not in recorded:
            lines.append(f"{name}: not recorded")
            continue
        here, there = _flat(case), _flat(recorded[name])
        if changed := [key for key in {**there, **here} if here.get(key) != there.get(key)]:
            lines.append(f"{name}: " + ", ".join(_told(key, there.get(key), here.get(key)) for key in changed))
    return lines


def _flat(case: Case) -> dict[str, Any]:
    whole = {name: value for name, value in case.items() if name != "parts"}
    return whole | {f"of which {part}": value for part, value in case.get("parts", {}).items()}


def _told(key: str, there: Any, here: Any) -> str:
    by = f" ({here - there:+,})" if isinstance(here, int) and isinstance(there, int) else ""
    return f"{key} {there} -> {here}{by}"


def versions() -> str:
    """The key of a record."""
    return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "transformers"))


def read_records() -> dict[str, dict[str, Case]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
