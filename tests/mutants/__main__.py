"""Plants each fault of the table in a copy of the source, and sees whether the tests named there fail.

    python -m tests.mutants [--only NAME ...] [--jobs N]

The tests have to pass on a copy without a fault first. Exits with 1 if one of them passes with its fault in place, or
cannot be run. Faults whose tests need a GPU are named, and left out, where there is none.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.fault import ROOT, Fault, NotPlanted, copied, plant
from tests.mutants.table import FAULTS

PASSED, FAILED = 0, 1
"""Exit codes of pytest; any other means that tests could not be run as they should."""

SECONDS = 600
"""That the tests of one fault may take: they are fast, but a fault may be an endless loop."""


class NotTried(Exception):
    """The tests could not be run."""


def failures(fault: Fault | None, node_ids: Sequence[str]) -> set[str]:
    """Node ids of the tests that fail on a copy of the source with this fault; None: with no fault.

    Raises:
        NotTried: pytest did not come to its end, or tested another source.
        NotPlanted: the fault's line is not in its file exactly once.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-mutant-") as name:
        folder = Path(name)
        copy = copied(folder / "src")
        if fault is not None:
            plant(copy, fault)
        noted = folder / "failed"
        paths = {"PYTHONPATH": str(copy.parent), "PACELINE_MUTANT": str(copy), "PACELINE_FAILED": str(noted)}
        options = ("-p", "tests.mutants.witness", "--basetemp", str(folder / "tests"), "--tb=short")
        command = [sys.executable, "-m", "pytest", *options, *node_ids]
        # one thread each: the jobs share the cores
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **paths}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=variables, text=True, capture_output=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise NotTried(f"no end within {SECONDS} seconds") from error
        if done.returncode not in (PASSED, FAILED) or not noted.exists():
            told = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise NotTried(f"pytest ended with {done.returncode}:\n{told}")
        return set(noted.read_text(encoding="utf-8").split("\n")) - {""}


def tried(fault: Fault) -> str:
    """What became of a fault, in words; empty where all its tests fail."""
    try:
        surviving = fault.survives(failures(fault, fault.node_ids))
    except (NotTried, NotPlanted) as error:
        return f"was not tried: {error}"
    return "\n    ".join(["survives", *surviving]) if surviving else ""


def chosen(names: Sequence[str]) -> list[Fault]:
    """The faults of these names; all of them where no name is given."""
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"unknown: {', '.join(unknown)}\nknown: {', '.join(known)}")
    return [known[name] for name in names] or list(FAULTS)


def has_gpu() -> bool:
    """Whether tests of a GPU are run here."""
    import torch  # seconds, which most tables' tests do without

    return torch.cuda.is_available()


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a fault survives, or a test fails without one."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Do the tests find planted faults?")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="try this fault; may be repeated")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="faults tried side by side (default: 1)")
    asked = parser.parse_args(arguments)
    faults, started = chosen(asked.only), time.monotonic()
    waiting = [fault.name for fault in faults if fault.needs_gpu and not has_gpu()]
    for name in waiting:
        print(f"{name} needs a GPU, and this machine has none: not tried")
    faults = [fault for fault in faults if fault.name not in waiting]
    if not faults:
        return 0
    try:
        broken = failures(None, list(dict.fromkeys(test for fault in faults for test in fault.node_ids)))
    except NotTried as error:
        print(f"without a fault the tests cannot be run: {error}")
        return 1
    if broken:
        print("without a fault these tests fail:", *sorted(broken), sep="\n    ")
        return 1
    print(f"without a fault all tests pass; now {len(faults)} faults", flush=True)
    missed = list[str]()
    with ThreadPoolExecutor(max(1, asked.jobs)) as pool:
        for fault, reason in zip(faults, pool.map(tried, faults), strict=True):
            print(f"{fault.name} {reason or 'is found'}", flush=True)
            missed += [fault.name] if reason else []
    more = f"; {len(waiting)} need a GPU" if waiting else ""
    print(f"{len(faults) - len(missed)} of {len(faults)} found in {time.monotonic() - started:.0f} s{more}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
