"""``python -m tests.soak``: kills for ten minutes at most, and a record of it.

python -m tests.soak --kills 50 --seconds 600 --record benchmarks/soak_cpu_2026-11-25
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from paceline.run_folder import versions
from tests.soak.kills import STEPS, Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600.0, help="the longest that it may take")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="write RECORD.jsonl and RECORD.md")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as place:
        soak = Soak(Path(place).resolve(), ranks=asked.ranks, seed=asked.seed)
        soak.run(asked.kills, asked.seconds)
    seconds = time.monotonic() - began
    summary = soak.summary()
    print(json.dumps(summary))
    if asked.record:
        asked.record.with_name(asked.record.name + ".jsonl").write_text(
            "\n".join([*soak.lines(), _surroundings()]) + "\n"
        )
        asked.record.with_name(asked.record.name + ".md").write_text(_page(soak, asked.kills, seconds))
    if not soak.kills or not soak.rounds:
        print("no kill fell into a run: this soak saw nothing", file=sys.stderr)
        return 1
    return 0


def _surroundings() -> str:
    found = {"cpus": os.cpu_count(), "system": platform.platform(), "load": os.getloadavg(), "versions": versions()}
    return json.dumps(found)


def _page(soak: Soak, asked: int, seconds: float) -> str:
    summary = soak.summary()
    quiet = sorted(kill.quiet_seconds for kill in soak.kills)
    known = versions()
    gone = f"median {quiet[len(quiet) // 2]:.2f} s, longest {quiet[-1]:.2f} s" if quiet else "-"
    rows = [
        ("kills", f"{summary['kills']} of {asked} asked for, in {seconds:.0f} s"),
        ("runs that were compared", f"{summary['rounds']}, each of {STEPS} steps on {soak.ranks} ranks, gloo"),
        ("victims", ", ".join(f"{name} {count}" for name, count in sorted(summary["victim"].items()))),
        ("phases", ", ".join(f"{name} {count}" for name, count in sorted(summary["phase"].items()))),
        ("from a kill until nothing was left", gone),
        ("bits, metrics, files", "those of the undisturbed run, every time"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    packages = ", ".join(f"{name} {version}" for name, version in known.items() if version)
    return (
        f"# Kills at any time, {date.today():%Y-%m-%d}\n\n"
        f"`python -m tests.soak --kills {asked} --seed {soak.seed}`: SIGKILL to the launcher or a rank of a run, at any"
        " moment from its start to its end; each time it is started again with `--resume`.\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        f"CPU only, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end: other programs shared them."
        f" {packages}.\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
