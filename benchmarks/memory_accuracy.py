"""How well is a run's memory predicted? Predictions first, to be committed; then the same recipes on a GPU.

    python benchmarks/memory_accuracy.py predict --gpu h200 --out PREDICTED.jsonl [--only PATTERN]
    python benchmarks/memory_accuracy.py measure --predicted PREDICTED.jsonl --out MEASURED.jsonl [--deadline SECONDS]
    python benchmarks/memory_accuracy.py table --measured MEASURED.jsonl... [--predicted PREDICTED.jsonl]

Predict with the versions that will run: which tensors a compiled pass keeps is torch's own decision, and changes.
``table --predicted`` puts later predictions beside measurements that are there; for looking back, it proves nothing.

Cases are in memory_cases.yaml. A measurement is ``paceline train`` in a fresh process, of one rank forked off one that
has imported what all need and never touched the GPU; summary.json says what torch's allocator counted and what was
taken from the GPU. The same command again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

import paceline.verbs.cli
from paceline.contract.errors import PacelineError
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.expandable import ask_for_it
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.recipe.choose import choose

HERE = Path(__file__).resolve().parent
STEPS = 6
"""Of a run: shapes that come twice are captured at their second time."""
LIMIT_SECONDS = 180.0
PRELOADED = ("torch", "transformers.modeling_utils", "paceline.prepare.assemble", "paceline.run.run")
MEASURES = ("allocated", "reserved", "total")
TAGS = ("auto", "packed", "compiled", "masked", "held_out", "two ranks")

Record = dict[str, Any]


def cases(only: str) -> Iterator[tuple[str, Record, Recipe]]:
    """Name, what the file says, and the recipe of each case."""
    told = yaml.safe_load((HERE / "memory_cases.yaml").read_text(encoding="utf-8"))
    for name, case in told["cases"].items():
        if not fnmatch(name, only):
            continue
        plain = {
            "name": name,
            "model": {"config": told["models"][case["model"]]},
            "data": {"source": "builtin:random", "random": told["data"][case["data"]]},
            "loop": {"batch_size": case["batch"], "max_steps": STEPS, "epochs": 1, "save_best": False},
            "observe": {"report": False},
        }
        vocabulary = told["models"][case["model"]].get("vocab_size")
        if vocabulary:
            plain["data"]["random"] = {**plain["data"]["random"], "vocabulary": min(vocabulary, 30000)}
        settings = [f"{key}={json.dumps(value)}" for key, value in case.get("set", {}).items()]
        yield name, case, Recipe.parse(plain).with_settings(settings)


def predict(gpu: str, out: Path, only: str) -> None:
    gpu, done = gpu_for(gpu), {record["name"] for record in read(out)}
    with Predictor() as predictor:
        for name, case, recipe in cases(only):
            if name in done:
                continue
            ranks, begun = case.get("ranks", 1), time.perf_counter()
            facts = facts_with([gpu] * ranks, this_machine())
            record: Record = {"name": name, "tags": tags(case), "ranks": ranks, "card": gpu.name}
            try:
                plan = predictor.plan(choose(recipe, facts, ranks)[0], gpu, world_size=ranks)
            except PacelineError as error:
                record["problem"] = str(error).splitlines()[0]
            else:
                record |= {"allocated": plan.allocated, "reserved": plan.reserved, "total": plan.total}
                record |= {"parts": dict(plan.parts), "moment": plan.moment, "path": dict(plan.execution)}
                record |= {"assumed": list(plan.assumed)}
            record |= {"seconds": time.perf_counter() - begun, "recipe": recipe.plain(), "versions": versions()}
            append(out, record)
            print(name, *(f"{record[m] / 2**20:,.0f}" for m in MEASURES if m in record), record.get("problem", ""))


def measure(predicted: Path, out: Path, only: str, deadline: float) -> None:
    begun, done, here = time.monotonic(), {record["name"] for record in read(out)}, versions()
    for record in read(predicted):
        if record["name"] in done or not fnmatch(record["name"], only) or "problem" in record:
            continue
        left = begun + deadline - time.monotonic()
        if left < LIMIT_SECONDS / 4:
            print("no time left: the same command goes on")
            return
        if record["versions"] != here:
            print(f"{record['name']}: predicted with {record['versions']}, measured with {here}")
        measured = measured_by_a_run(record, min(left, LIMIT_SECONDS))
        append(out, {**record, **measured})
        print(record["name"], *line_of({**record, **measured}), flush=True)


def measured_by_a_run(record: Record, limit: float) -> Record:
    with tempfile.TemporaryDirectory() as place:
        recipe, folder = Path(place) / "recipe.yaml", Path(place) / "run"
        recipe.write_text(yaml.safe_dump(record["recipe"]), encoding="utf-8")
        arguments = ["train", str(recipe), "--out", str(folder), "--set", "observe.memory_plan=false"]
        if record["ranks"] > 1:
            arguments += ["--gpus", str(record["ranks"])]
        log = Path(place) / "log"
        try:
            code = (run_forked if record["ranks"] == 1 else run_started)(arguments, log, limit)
        except TimeoutError:
            return {"failed": f"no end in {limit:.0f} s"}
        if code:
            return {"failed": "\n".join(log.read_text(encoding="utf-8").strip().splitlines()[-6:])}
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        memory = summary["memory"]
        found = {name: memory[name] for name in MEASURES}
        return {"measured": found, "measured_path": summary["execution"], "measured_versions": versions()}


def run_started(arguments: Sequence[str], log: Path, limit: float) -> int:
    """Exit code of ``paceline`` in a process of its own."""
    with log.open("w") as told:
        command = [sys.executable, "-m", "paceline", *arguments]
        try:
            ended = subprocess.run(command, stdout=told, stderr=told, timeout=limit, check=False)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error
    return ended.returncode


def run_forked(arguments: Sequence[str], log: Path, limit: float) -> int:
    """The same, without the seconds of the imports."""
    preload()
    child = multiprocessing.get_context("fork").Process(target=as_command, args=(arguments, log))
    child.start()
    child.join(limit)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise TimeoutError
    return child.exitcode


def preload() -> None:
    """Import what a run imports; nothing of it may start a thread or touch the GPU, or a fork would not be fresh."""
    ask_for_it(os.environ)
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("an import has touched the GPU, so that a forked run would not be a fresh one")


def as_command(arguments: Sequence[str], log: Path) -> None:
    with log.open("w") as told:
        os.dup2(told.fileno(), 1)
        os.dup2(told.fileno(), 2)
    sys.argv = ["paceline", *arguments]
    paceline.verbs.cli.main()


def line_of(record: Record) -> list[str]:
    """Predicted, measured and their difference, for each measure."""
    if "measured" not in record:
        return [record.get("failed", "")]
    shown = []
    for name in MEASURES:
        predicted, measured = record[name], record["measured"][name]
        shown += [f"{predicted / 2**20:,.0f}", f"{measured / 2**20:,.0f}", f"{predicted / measured - 1:+.1%}"]
    return shown


def table(measured: Sequence[Path], predicted: Path | None) -> str:
    """Markdown: a line a case, then the errors by kind of case, then the total that is too low by most.

    Of a case that is in several files the last one counts.
    """
    records = list({record["name"]: record for file in measured for record in read(file)}.values())
    if predicted:
        later = {record["name"]: record for record in read(predicted)}
        records = [{**record, **later[record["name"]]} for record in records if record["name"] in later]
    heads = [part for name in MEASURES for part in (f"{name}, predicted", "measured", "off")]
    lines = [f"| case | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    lines += [f"| {record['name']} | {' | '.join(line_of(record))} |" for record in records]
    good = [record for record in records if "measured" in record]
    summary = ["| cases | n | " + " | ".join(f"{name}: median, worst" for name in MEASURES) + " |", "|---" * 5 + "|"]
    for tag in ("all", *TAGS):
        chosen = [record for record in good if tag == "all" or tag in record["tags"]]
        if chosen:
            summary.append(f"| {tag} | {len(chosen)} | " + " | ".join(errors(chosen, name) for name in MEASURES) + " |")
    if good:
        lowest = min(good, key=lambda record: record["total"] / record["measured"]["total"])
        summary += ["", f"The lowest total: {lowest['name']}, {lowest['total'] / lowest['measured']['total'] - 1:+.1%}"]
    return "\n".join([*lines, "", *summary])


def errors(records: Sequence[Mapping[str, Any]], name: str) -> str:
    off = [abs(record[name] / record["measured"][name] - 1) for record in records]
    return f"{statistics.median(off):.1%}, {max(off):.1%}"


def tags(case: Mapping[str, Any]) -> list[str]:
    return [*case["tags"], *(["two ranks"] if case.get("ranks", 1) > 1 else [])]


def versions() -> Record:
    found = this_machine().versions
    return {name: found[name] for name in ("paceline", "torch", "transformers", "triton")}


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("predict", "measure", "table"):
        command = commands.add_parser(name)
        command.add_argument("--only", default="*", help="pattern of names")
        if name == "predict":
            command.add_argument("--gpu", default="h200")
        if name == "measure":
            command.add_argument("--predicted", type=Path, required=True)
            command.add_argument("--deadline", type=float, default=3600.0, help="seconds")
        if name == "table":
            command.add_argument("--measured", type=Path, nargs="+", required=True)
            command.add_argument("--predicted", type=Path, help="in place of the predictions that were measured")
        else:
            command.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    match chosen.command:
        case "predict":
            predict(chosen.gpu, chosen.out, chosen.only)
        case "measure":
            measure(chosen.predicted, chosen.out, chosen.only, chosen.deadline)
        case _:
            print(table(chosen.measured, chosen.predicted))


if __name__ == "__main__":
    main()
