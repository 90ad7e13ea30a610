"""One ladder of parts that were climbed side by side, such as halves of its rungs on two GPUs of one machine.

    CUDA_VISIBLE_DEVICES=0 paceline bench RECIPE --steps 150 --rungs 'plain,lightning*' --out parts/a &
    CUDA_VISIBLE_DEVICES=1 paceline bench RECIPE --steps 150 --rungs 'paceline*' --out parts/b &
    wait; python benchmarks/ladder_parts.py parts/a parts/b --out ladder [--figures FOLDER]

The parts have to be of the same recipe, steps, rows and GPU, which is checked. The first rung's band holds for all.
Writes cells.jsonl, table.txt and report.html as ``paceline bench`` does.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.bench.folder import CELLS, NEEDS, read_plan
from paceline.bench.ladder import Ladder
from paceline.bench.records import Record, Records, append
from paceline.bench.rungs import LADDERS
from paceline.bench.standings import standings
from paceline.bench.table import shown
from paceline.contract.errors import RunFolderError
from paceline.verbs.bench import write


def joined(parts: list[Path], out: Path) -> Ladder:
    """The ladder of all parts' cells, which are written to ``out``.

    Raises:
        SystemExit: a folder that holds no bench, or is ``out`` itself; parts that did not do the same work on the same
            kind of machine, or have a cell in common.
    """
    if out.exists() and any(out.samefile(part) for part in parts):
        raise SystemExit(f"{out}: a part, whose cells would be written over; choose another --out")
    plans = [_plan(part) for part in parts]
    for part, plan in zip(parts[1:], plans[1:], strict=True):
        for name in ("recipe", "extent", "gpus", "commit"):
            if _work(plan)[name] != _work(plans[0])[name]:
                raise SystemExit(f"{part}: not of the same {name} as {parts[0]}")
    found: dict[tuple[str, int], Record] = {}
    for number, part in enumerate(parts):
        for record in Records(part / CELLS, needs=NEEDS):
            cell = record["rung"], record["repeat"]
            if cell in found:
                raise SystemExit(f"{part}: {cell[0]}-{cell[1]} is a cell of another part, too")
            found[cell] = {**_anywhere(record), "part": number}
    out.mkdir(parents=True, exist_ok=True)
    (out / CELLS).unlink(missing_ok=True)
    for record in found.values():
        append(out / CELLS, record)
    names = {name for name, _ in found}
    ladder = next(rungs for rungs in LADDERS.values() if names <= {rung.name for rung in rungs})
    rungs = [rung for rung in ladder if rung.name in names]
    plan = plans[0]
    notices = [f"climbed in {len(parts)} parts, side by side"]
    if plan["fitted"] or plan["asked"]["steps"] is not None:
        notices.append(f"{plan['extent']['steps']:,} steps a cell, not the whole recipe")
    rows = standings(rungs, found.values(), {}, plan["extent"]["heldout_rows"])
    name = plan["asked"]["recipe"]["name"]
    return Ladder(name=name, folder=out, rows=rows, about=plan, notices=tuple(notices))


def _plan(part: Path) -> dict[str, Any]:
    try:
        plan = read_plan(part)
    except RunFolderError as error:
        raise SystemExit(str(error)) from None
    if plan is None:
        raise SystemExit(f"{part}: no folder of paceline bench, or no cell was measured in it")
    return plan


def _anywhere(record: dict[str, Any]) -> dict[str, Any]:
    """The record with commands as they are typed in the part's folder, and a traceback's last line alone."""
    found = dict(record)
    if command := found.get("command"):
        found["command"] = [_short(word) for word in command]
    if error := found.get("error"):
        found["error"] = str(error).rstrip().rpartition("\n")[2]
    return found


def _short(word: str) -> str:
    for folder in ("contenders", "cells", "work"):
        if word.startswith("/") and f"/{folder}/" in word:
            return f"{folder}/{word.rpartition(f'/{folder}/')[2]}"
    return Path(word).name if word.startswith("/") else word


def _work(plan: dict[str, Any]) -> dict[str, Any]:
    gpus = [gpu["name"] for gpu in plan["machine"].get("gpus") or ()]
    commit = (plan.get("commit") or {}).get("commit")
    return {"recipe": plan["asked"]["recipe"], "extent": plan["extent"], "gpus": gpus, "commit": commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", type=Path, nargs="+", help="folders of paceline bench")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", type=Path)
    options = parser.parse_args()
    ladder = joined(options.parts, options.out)
    write(ladder, options.figures, print)
    print(shown(ladder))


if __name__ == "__main__":
    main()
