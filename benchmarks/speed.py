"""Speed beside others, by one command: fresh processes, in turns, cold and warm.

    python benchmarks/speed.py SUITE --out DIR [--data imdb.jsonl.gz] [--tokenizer FOLDER]
        [--rounds 3] [--only PATTERN] [--deadline SECONDS]

Writes one JSON line a cell to DIR/SUITE.jsonl and the table to DIR/SUITE.md, and prints the table last. The same
command again goes on where it stopped: what is in the file is not run again. README.md beside this file says what is
measured and how.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from measurements import ROOT, cache_folder, identity, measure, mfu
from suites import Book, Turn, read_book, turns
from tables import render

from paceline.bench.budget import expected_seconds
from paceline.bench.records import Record, Records
from paceline.bench.start import SOURCE, environment, set_options
from paceline.machine.facts import Facts, this_machine
from paceline.run_folder.origin import git_state

HERE = ROOT / "benchmarks"
KEY = ("work", "contender", "cold", "round")
"""The fields of a record that say which turn it is of."""


def main() -> None:
    book = read_book()
    arguments = _arguments(book)
    suite, folder = arguments.suite, arguments.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + arguments.deadline
    machine = this_machine()
    recipes = Recipes(book, folder, {"data": arguments.data, "tokenizer": arguments.tokenizer})
    records = Records(folder / f"{suite}.jsonl", key=KEY)
    try:
        for turn in turns(book, suite, arguments.rounds, arguments.only):
            if _is_done(turn, records, folder):
                continue
            cell = {"work": turn.cell.work, "contender": turn.cell.contender}
            if expected_seconds(cell, records, "total_seconds") > ends - time.monotonic():
                continue
            record = _take(turn, recipes, folder, ends, machine)
            records.add(record)
            print(_line(record), file=sys.stderr, flush=True)
    finally:  # also after Ctrl-C: what was measured is worth reading
        table = render(suite, list(records))
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
            settings["data.source"] = str(Path(str(self._given["data"])).resolve())
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
        subprocess.run(command, check=True, env=environment(cache, sources=(SOURCE,)), cwd=ROOT, stdout=sys.stderr)
        made_of.write_text(json.dumps(options))
        return folder


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


def _is_done(turn: Turn, records: Records, folder: Path) -> bool:
    """In the file already. A cold turn whose caches are gone is done again, because the warm ones live on them.

    What was cut off, or found too few GPUs, is tried again.
    """
    if turn.cold and not cache_folder(turn, folder).is_dir() and turn.cell.script != "matmul.py":
        return False
    record = records.get(turn.cell.work, turn.cell.contender, turn.cold, turn.round)
    return record is not None and record["status"] not in ("deadline", "skipped")


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


def _commit() -> str | None:
    """None where there is no git, or no repository."""
    state = git_state(ROOT)
    return state["commit"] + (", with changes" if state["dirty"] else "") if state else None


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
