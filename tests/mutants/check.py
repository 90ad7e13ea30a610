"""Plants each fault of claims.toml in a copy of the source, and sees whether ``paceline check`` finds it there.

    python -m tests.mutants.check [--only NAME ...] [--jobs N]

The claims have to hold on a copy without a fault first. Exits with 1 if a claim holds with its fault in place, or
cannot be tried.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.fault import ROOT, Fault, NotPlanted, copied, plant
from tests.mutants.table import FAULTS

SECONDS = 900
"""That one check may take."""


IMPORTED = (
    "torch",
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_layers",
    "pydantic",
    "typer",
    "rich.console",
)
"""What the source needs and takes seconds to import."""


class NotTried(Exception):
    """The check could not be run."""


@dataclass(frozen=True)
class Sought:
    """A fault, and the claim that has to find it."""

    fault: Fault
    claim: str
    recipe: str
    """Of ``tiny_recipes``, on which it shows."""


def sought() -> tuple[Sought, ...]:
    """The rows of claims.toml: a fault of faults.toml by its name, or one with a file and lines of its own."""
    known = {fault.name: fault for fault in FAULTS}
    table = tomllib.loads((ROOT / "tests" / "mutants" / "claims.toml").read_text(encoding="utf-8"))
    found = []
    for name, row in table.items():
        own = "file" in row
        fault = Fault(name, row["file"], row["line"], row["planted"], ()) if own else known[name]
        found.append(Sought(fault, row["claim"], row.get("recipe", "bert")))
    return tuple(found)


def checked(fault: Fault | None, recipe: str, claims: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """What ``paceline check`` finds on a copy of the source with this fault, a finding a claim.

    In a process forked from this one, which has imported what the source needs, and nothing of it.

    Raises:
        NotTried: it did not come to its end.
        NotPlanted: the fault's line is not in its file exactly once.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-mutant-") as name:
        folder = Path(name)
        copy = copied(folder / "src")
        if fault is not None:
            plant(copy, fault)
        child = os.fork()
        if child == 0:
            _check(folder, copy, recipe, claims)
        deadline = time.monotonic() + SECONDS
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(ended[1])
        said = (folder / "out").read_text() if (folder / "out").exists() else ""
        if code not in (0, 1) or not said.startswith("{"):
            raise NotTried(f"it ended with {code}: {(folder / 'err').read_text()[-2000:]}")
        return {found["claim"]: found for found in json.loads(said)["findings"]}


def _check(folder: Path, copy: Path, recipe: str, claims: Sequence[str]) -> None:
    """Be ``paceline check``, of the copy; does not return."""
    code = 3
    try:
        os.setpgid(0, 0)
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), stream)
        os.chdir(folder)
        # ranks are processes of their own; and encoded data of one copy are nothing to another
        os.environ |= {"PYTHONPATH": str(copy.parent), "PACELINE_CACHE": str(folder / "cache")}
        sys.path.insert(0, str(copy.parent))
        from tests.mutants.tiny_recipes import write_recipe

        path = write_recipe(recipe, folder)
        import paceline
        from paceline.verbs.cli import main as typed

        assert Path(paceline.__file__).parent == copy, "another source would be checked"
        sys.argv = ["paceline", "check", str(path), "--only", ",".join(claims), "--json"]
        typed()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 3
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tried(row: Sought) -> str:
    """What became of a fault, in words; empty where its claim fails."""
    try:
        found = checked(row.fault, row.recipe, [row.claim])[row.claim]
    except (NotTried, NotPlanted) as error:
        return f"was not tried: {error}"
    if found["status"] == "failed":
        print(f"    {row.claim}: {found['told']}", flush=True)
        return ""
    return f"survives: {row.claim} {found['status']}: {found['told']}"


def healthy(rows: Sequence[Sought]) -> list[str]:
    """Claims that do not hold without a fault, or are not applicable."""
    wanted: dict[str, list[str]] = {}
    for row in rows:
        wanted.setdefault(row.recipe, []).append(row.claim)
    found = []
    for recipe, claims in wanted.items():
        for name, each in checked(None, recipe, sorted(set(claims))).items():
            if each["status"] != "passed":
                found.append(f"{recipe}: {name} {each['status']}: {each['told']}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a fault survives, or a claim fails without one."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.check", description="Does a check find faults?")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="try this fault; may be repeated")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="faults tried side by side (default: 1)")
    asked = parser.parse_args(arguments)
    known = {row.fault.name: row for row in sought()}
    if unknown := [name for name in asked.only if name not in known]:
        sys.exit(f"unknown: {', '.join(unknown)}\nknown: {', '.join(known)}")
    rows, started = [known[name] for name in asked.only] or list(known.values()), time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is there: the jobs share the cores
    for name in IMPORTED:
        importlib.import_module(name)
    try:
        broken = healthy(rows)
    except NotTried as error:
        broken = [str(error)]
    if broken:
        print("without a fault these claims do not hold:", *broken, sep="\n    ")
        return 1
    print(f"without a fault all claims hold; now {len(rows)} faults", flush=True)
    missed = list[str]()
    with ThreadPoolExecutor(max(1, asked.jobs)) as pool:
        for row, reason in zip(rows, pool.map(tried, rows), strict=True):
            print(f"{row.fault.name} {reason or f'is found by {row.claim}'}", flush=True)
            missed += [row.fault.name] if reason else []
    print(f"{len(rows) - len(missed)} of {len(rows)} found in {time.monotonic() - started:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
