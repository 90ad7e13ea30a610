"""One ladder of parts that were climbed side by side, such as halves of its rungs on two GPUs of one machine.

    CUDA_VISIBLE_DEVICES=0 paceline bench RECIPE --steps 150 --rungs 'plain,lightning*' --out parts/a &
    CUDA_VISIBLE_DEVICES=1 paceline bench RECIPE --steps 150 --rungs 'paceline*' --out parts/b &
    wait; python benchmarks/ladder_parts.py parts/a parts/b --out ladder [--figures FOLDER]

The parts have to be of the same recipe, steps, rows and GPU, which is checked. The first rung's band holds for all.
Writes cells.jsonl, table.txt and report.html as ``paceline bench`` does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from paceline.bench.folder import CELLS, NEEDS, PLAN
from paceline.bench.ladder import Ladder
from paceline.bench.records import Records, append
from paceline.bench.rungs import LADDERS
from paceline.bench.standings import standings
from paceline.bench.table import shown
from paceline.verbs.bench.ladder import write


def joined(parts: list[Path], out: Path) -> Ladder:
    """The ladder of all parts' cells, which are written to ``out``.

    Raises:
        SystemExit: the parts did not do the same work on the same kind of machine, or have a cell in common.
    """
    plans = [json.loads((part / PLAN).read_text(encoding="utf-8")) for part in parts]
    for part, plan in zip(parts[1:], plans[1:], strict=True):
        for name in ("recipe", "extent", "gpus", "commit"):
            if _work(plan)[name] != _work(plans[0])[name]:
                raise SystemExit(f"{part}: not of the same {name} as {parts[0]}")
    out.mkdir(parents=True, exist_ok=True)
    (out / CELLS).unlink(missing_ok=True)
    seen = set()
    for number, part in enumerate(parts):
        for record in Records(part / CELLS, needs=NEEDS):
            cell = record["rung"], record["repeat"]
            if cell in seen:
                raise SystemExit(f"{part}: {cell[0]}-{cell[1]} is a cell of another part, too")
            seen.add(cell)
            append(out / CELLS, {**_anywhere(record), "part": number})
    records = Records(out / CELLS, needs=NEEDS)
    names = {name for name, _ in seen}
    ladder = next(rungs for rungs in LADDERS.values() if names <= {rung.name for rung in rungs})
    rungs = [rung for rung in ladder if rung.name in names]
    extent = plans[0]["extent"]
    notices = (
        f"climbed in {len(parts)} parts, side by side",
        f"{extent['steps']:,} steps a cell, not the whole recipe",
    )
    rows = standings(rungs, records, {}, extent["heldout_rows"])
    return Ladder(name=plans[0]["asked"]["recipe"]["name"], folder=out, rows=rows, about=plans[0], notices=notices)


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
