"""Speed beside others, by one command: fresh processes, in turns, cold and warm.

    python benchmarks/speed.py SUITE --out DIR [--data imdb.jsonl.gz] [--tokenizer FOLDER]
        [--rounds 3] [--only PATTERN] [--deadline SECONDS]

Writes one JSON line a cell to DIR/SUITE.jsonl and the table to DIR/SUITE.md, and prints the table last. The same
command again goes on where it stopped: what is in the file is not run again. README.md beside this file says what is
measured and how.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from measurements import Record, cache_folder, identity, measure, mfu
from processes import HERE, ROOT, environment
from suites import Book, Cell, Turn, Workload, read_book, set_options, turns
from tables import render

from paceline.machine.facts import Facts, ask, this_machine

UNKNOWN_SECONDS = 60.0
"""What a cell is taken to last before one like it has been seen."""


def main() -> None:
    book = read_book()
    arguments = _arguments(book)
    suite, folder = arguments.suite, arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + arguments.deadline
    machine = this_machine()
    recipes = Recipes(book, folder, {"data": arguments.data, "tokenizer": arguments.tokenizer})
    file = folder / f"{suite}.jsonl"
    records = _read(file) if file.exists() else []
    try:
        for turn in turns(book, suite, arguments.rounds, arguments.only):
            if _is_done(turn, records, folder):
                continue
            if _expected_seconds(turn.cell, records) > ends - time.monotonic():
                continue
            record = _take(turn, recipes, folder, ends, machine)
            records = _newest([*records, record])
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
            print(_line(record), file=sys.stderr, flush=True)
    finally:  # also after Ctrl-C: what was measured is worth reading
        table = render(suite, records)
        (folder / f"{suite}.md").write_text(table, encoding="utf-8")
        print(table, flush=True)


class Recipes:
    """The recipe and the workload folder of every piece of work; a folder is made when it is first asked for."""

    def __init__(self, book: Book, folder: Path, given: Mapping[str, str | None]) -> None:
        self._book, self._folder, self._given = book, folder, given

    def options(self, name: str) -> list[str]:
        """The recipe's file and its ``--set`` options."""
        workload = self._book.workloads[name]
        settings = dict(workload.settings)
        for need in workload.needs:
            if self._given[need] is None:
                raise SystemExit(f"{name}: give --{need}")
        if "data" in workload.needs:
            settings["data.source"] = str(self._data(workload))
        if "tokenizer" in workload.needs:
            settings["model.tokenizer"] = str(Path(str(self._given["tokenizer"])).resolve())
        return [str(HERE / "recipes" / workload.recipe), *set_options(settings)]

    def folder(self, name: str) -> Path:
        """The workload folder."""
        folder, options = self._folder / "workloads" / name, self.options(name)
        made_of = folder / "options.json"
        if made_of.exists():
            if json.loads(made_of.read_text()) != options:
                raise SystemExit(f"{folder}: made of other data or another recipe; choose another --out")
            return folder
        command = [sys.executable, str(HERE / "workloads.py"), options[0], str(folder), *options[1:]]
        cache = self._folder / "caches" / "workloads"
        subprocess.run(command, check=True, env=environment(cache, ours=True), cwd=ROOT, stdout=sys.stderr)
        made_of.write_text(json.dumps(options))
        return folder

    def _data(self, workload: Workload) -> Path:
        given = Path(str(self._given["data"])).resolve()
        if not workload.csv or given.suffix == ".csv":
            return given
        made = self._folder / "data" / f"{given.name.partition('.')[0]}.csv"
        if not made.exists():
            made.parent.mkdir(exist_ok=True)
            _write_csv(given, made)
        return made


def _take(turn: Turn, recipes: Recipes, folder: Path, ends: float, machine: Facts) -> Record:
    cell = turn.cell
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    gpus = () if machine.cuda_problem else machine.gpus
    gpu = gpus[0] if gpus else None
    if gpus and cell.processes > len(gpus):
        why = f"it takes {cell.processes} GPUs, and this machine has {len(gpus)}"
        record = {**identity(turn), "status": "skipped", "total_seconds": 0.0, "error": why}
    else:
        work = recipes.folder(cell.workload) if cell.workload else None
        recipe = recipes.options(cell.workload) if cell.workload else []
        limit = min(cell.limit_seconds, ends - time.monotonic())
        record = measure(turn, folder, recipe, work, on_gpus=bool(gpus), limit_seconds=limit)
        if record["status"] == "timeout":
            record["status"] = "timeout" if limit == cell.limit_seconds else "deadline"
    return {
        **record,
        "mfu": mfu(record, gpu.name if gpu else None),
        "mfu_of_whole_passes": mfu(record, gpu.name if gpu else None, "whole_model_flops_per_second"),
        "started": started,
        "commit": _commit(),
        "machine": {
            "card": gpu.name if gpu else None,
            "cards": len(gpus),
            "driver": gpu.driver if gpu else None,
            "cpu": machine.cpu_model,
            "cpus": machine.cpu_count,
            "memory_bytes": machine.memory_bytes,
            "python": machine.python,
        },
        "versions": {**{k: v for k, v in machine.versions.items() if v}, **record.get("versions", {})},
    }


def _is_done(turn: Turn, records: list[Record], folder: Path) -> bool:
    """In the file already. A cold turn whose caches are gone is done again, because the warm ones live on them.

    What was cut off, or found too few GPUs, is tried again.
    """
    if turn.cold and not cache_folder(turn, folder).is_dir() and turn.cell.script != "matmul.py":
        return False
    wanted = (turn.cell.work, turn.cell.contender, turn.cold, turn.round)
    return any(
        (r["work"], r["contender"], r["cold"], r["round"]) == wanted and r["status"] not in ("deadline", "skipped")
        for r in records
    )


def _expected_seconds(cell: Cell, records: list[Record]) -> float:
    alike = [r for r in records if r["contender"] == cell.contender and r["status"] != "skipped"]
    same = [r["total_seconds"] for r in alike if r["work"] == cell.work]
    return float(max(same or [r["total_seconds"] for r in alike] or [UNKNOWN_SECONDS]))


def _line(record: Record) -> str:
    rate = record.get("samples_per_second")
    parts = [
        f"{record['work']}/{record['contender']}",
        f"{'cold' if record['cold'] else 'warm'} {record['round']}",
        record["status"],
        f"{record['total_seconds']:.1f} s",
        f"first update {record['first_update_seconds']:.1f} s" if "first_update_seconds" in record else "",
        f"{rate:,.1f} samples/s" if rate else "",
    ]
    return "  ".join(part for part in parts if part)


def _read(path: Path) -> list[Record]:
    return _newest(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def _newest(records: Iterable[Record]) -> list[Record]:
    """One record a turn: what was run again counts in place of the first."""
    return list({(r["work"], r["contender"], r["cold"], r["round"]): r for r in records}.values())


def _commit() -> str | None:
    """None where there is no git, or no repository."""
    commit = ask(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    changed = ask(["git", "-C", str(ROOT), "status", "--porcelain"])
    return commit.strip() + (", with changes" if changed else "") if commit else None


def _write_csv(source: Path, path: Path) -> None:
    """Text and label of JSON lines as a CSV."""

    unfinished = path.with_suffix(".part")
    opener: Any = gzip.open if source.suffix == ".gz" else open
    with unfinished.open("w", encoding="utf-8", newline="") as file, opener(source, "rt", encoding="utf-8") as lines:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows((row["text"], row["label"]) for row in map(json.loads, lines))
    os.replace(unfinished, path)


def _arguments(book: Book) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=book.suites)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", help="the reviews: csv or jsonl, also .gz, with text and label")
    parser.add_argument("--tokenizer", help="a folder with bert-base-uncased's tokenizer.json")
    parser.add_argument("--rounds", type=int, default=3, help="warm rounds")
    parser.add_argument("--only", metavar="PATTERN", help="cells whose name holds it, for example 'batch32/*hf_'")
    parser.add_argument("--deadline", type=float, default=float("inf"), metavar="SECONDS", help="start no cell later")
    return parser.parse_args()


if __name__ == "__main__":
    main()
