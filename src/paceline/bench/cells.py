"""One cell, a rung's turn: the files it is given, the process that does the work, and the record that it leaves.

Rungs take turns, so that a machine that grows hot or busy treats all alike.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from paceline.bench.gauge import Gauge
from paceline.bench.process import Line, Outcome, run
from paceline.bench.records import CUT_OFF, Record
from paceline.bench.rungs import ALL_DEVICES, OURS, Rung
from paceline.bench.start import SOURCE, Trained, drop_large, environment, script_command, set_options, train
from paceline.bench.work import Extent
from paceline.contract.errors import DiskFullError, UserError
from paceline.contract.files import disk_errors, write_atomically

T = TypeVar("T")


def in_turns(items: Sequence[T], rounds: int) -> Iterator[tuple[T, int]]:
    """Each item once a round, with the round's number; each round begins with another, the first with the first."""
    for number in range(rounds):
        start = number % len(items) if items else 0
        yield from ((item, number) for item in (*items[start:], *items[:start]))


CONTENDERS = Path(__file__).with_name("contenders")
SHARED = "job"
"""The module that contenders' scripts share."""

RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)(: |$)")
"""The line of a traceback that names what was raised."""

NO_ROOM = re.compile("No space left on device|Disk quota exceeded|: no room for ")
"""In the log of a process that found a disk full; the last is paceline's."""

SHARED_MEMORY = re.compile("/dev/shm|</torch_|shared memory")
"""In the log of one that found the memory full that processes share, which no room on a disk would help."""

NEARLY_FULL = 2**20
"""Bytes free below which a process is taken to have failed for that: its last words may have had no room either."""

KEPT_OF_WHY = 300
"""Letters of a reason."""


@dataclass(frozen=True)
class Cell:
    """A rung and which of its repeats."""

    rung: Rung
    repeat: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.rung.name}-{self.repeat}"

    @property
    def cold(self) -> bool:
        """Whether it begins with empty caches; the repeats after it live on what it leaves."""
        return self.repeat == 0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all cells of a ladder have in common."""

    folder: Path
    extent: Extent
    job: Mapping[str, Any]
    """For contenders, but for settings, seed and place to save."""
    recipe: Path
    """For paceline."""
    batch_size: int
    gpus: int
    """That this machine has."""
    gpu_uuids: tuple[str, ...] = ()
    """Theirs, where the driver tells them, in CUDA's order."""
    seed: int
    """The first repeat's; each further one has the next."""


def turns(rungs: Sequence[Rung], repeats: int) -> list[Cell]:
    """Every cell in the order in which they are run; the first is of the first rung, which others are held against."""
    return [Cell(rung, repeat) for rung, repeat in in_turns(rungs, repeats)]


def script(contender: str) -> str:
    """A contender as one file that runs alone: what contenders share, and its own text.

    Raises:
        UserError: its script is missing from this installation.
    """
    try:
        own = (CONTENDERS / f"{contender}.py").read_text(encoding="utf-8")
        shared = (CONTENDERS / f"{SHARED}.py").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename}: is not there", "paceline is not installed whole", "install it again"
        ) from None
    docstring, body = _body(own)
    if f"from {SHARED} import" not in own:
        return own
    return f'"""{docstring}"""\n\nfrom __future__ import annotations\n\n{_body(shared)[1]}\n\n{body}'


def _body(text: str) -> tuple[str, str]:
    """Docstring of a script, and its lines without it, without imports of the shared module and of the future."""
    tree = ast.parse(text)
    lines = text.splitlines()
    left_out = set(range(tree.body[0].lineno, (tree.body[0].end_lineno or 0) + 1))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in (SHARED, "__future__"):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    kept = [line for number, line in enumerate(lines, 1) if number not in left_out]
    return ast.get_docstring(tree, clean=False) or "", "\n".join(kept).strip() + "\n"


def measure(cell: Cell, bench: Bench, *, limit_seconds: float, out_of_time: bool) -> Record:
    """Run a cell in a process of its own.

    Args:
        limit_seconds: when it is ended.
        out_of_time: it is the budget that ends it then, not a limit for what hangs.

    Returns:
        The record, of ``status`` ``ok``; ``failed``, ``hung``, ``rubbish``, ``refused`` (by paceline, for its settings)
        or ``cut off``, with ``why``.

    Raises:
        DiskFullError: there is no room for its files, or it failed for that. Its weights are removed.
    """
    load = os.getloadavg()[0]
    rung, folder = cell.rung, bench.folder / "cells" / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    cache = bench.folder / "caches" / rung.name
    if cell.cold:
        shutil.rmtree(cache, ignore_errors=True)
    cold = not cache.is_dir()  # a later cell's too, where somebody made room on the disk
    with disk_errors(bench.folder / cell.name):
        folder.mkdir(parents=True)
        cache.mkdir(parents=True, exist_ok=True)
    seed = bench.seed + cell.repeat
    with Gauge(bench.gpu_uuids if takes_all(rung) else bench.gpu_uuids[:1]) as gauge:
        command, outcome, trained = _carried_out(cell, bench, folder, cache, seed, limit_seconds)
    problem = _no_room(outcome, folder)
    if problem:
        empty(folder)
        raise DiskFullError(
            f"{bench.folder}: no room for {cell.name}", problem, "free some space there; the same command goes on"
        )
    found = _of_ours(trained, bench) if trained else _of_contender(outcome, bench, folder)
    if found["status"] == "hung" and out_of_time:
        found = {"status": CUT_OFF, "why": "the budget was spent"}
    empty(folder)
    return {
        "rung": rung.name,
        "repeat": cell.repeat,
        "contender": rung.contender,
        "settings": dict(rung.settings),
        "seed": seed,
        "cold": cold,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - outcome.seconds)),
        "load": round(load, 2),
        "whole_seconds": round(outcome.seconds, 3),
        "peak_host_bytes": outcome.peak_bytes,
        **gauge.figures(),
        **found,
        "command": command,
    }


def _carried_out(
    cell: Cell, bench: Bench, folder: Path, cache: Path, seed: int, limit_seconds: float
) -> tuple[list[str], Outcome, Trained | None]:
    """The command, how it ended, and of paceline's own runs what they left."""
    rung = cell.rung
    ours = rung.contender == OURS
    told: dict[str, Any] = {"log": folder / "log.txt", "limit_seconds": limit_seconds, "folder": folder}
    told["environment"] = environment(
        cache,
        sources=(SOURCE,) if ours else (),
        processes=bench.gpus if rung.launched else 1,
        all_gpus=takes_all(rung),
    )
    if ours:
        options = set_options({"seed": seed, **rung.settings})
        if takes_all(rung):
            options += ["--gpus", str(bench.gpus)]
        trained = train(bench.recipe, folder / "run", options, **told)
        return trained.command, trained.outcome, trained
    command = _command(cell, bench, folder, seed)
    return command, run(command, **told), None


def empty(folder: Path) -> None:
    """Remove the weights that a cell has saved."""
    shutil.rmtree(folder / "saved", ignore_errors=True)
    drop_large(folder / "run")


def takes_all(rung: Rung) -> bool:
    """Whether it runs on all GPUs that there are."""
    return rung.gpus > 1 or rung.settings.get("devices") == ALL_DEVICES


def _command(cell: Cell, bench: Bench, folder: Path, seed: int) -> list[str]:
    """The contender's script and its job, both written down, so that the line can be typed again."""
    scripts = bench.folder / "contenders"
    path = scripts / f"{cell.rung.contender}.py"
    write_atomically(path, script(cell.rung.contender).encode())
    job = {**bench.job, "seed": seed, "save": str(folder / "saved"), "settings": dict(cell.rung.settings)}
    write_atomically(folder / "job.json", json.dumps(job, indent=2, ensure_ascii=False).encode())
    return script_command(path, str(folder / "job.json"), processes=bench.gpus if cell.rung.launched else 1)


def _of_contender(outcome: Outcome, bench: Bench, folder: Path) -> Record:
    if outcome.status != "ok":
        return _unwell(outcome)
    line = outcome.first("event", "result")
    if line is None:
        return {"status": "rubbish", "why": "it ended well, and printed no result"}
    result, extent = line.fields, bench.extent
    seconds, steps, losses = result.get("steady_seconds"), result.get("steady_steps"), result.get("losses")
    if problem := _implausible(result, extent, folder / "saved"):
        return {"status": "rubbish", "why": problem}
    rate = bench.batch_size * steps / seconds if seconds and steps else None
    return {
        "status": "ok",
        "quality": result["quality"],
        "losses": [round(loss, 6) for loss in losses or ()],
        "samples_per_second": round(rate, 2) if rate else None,
        "peak_allocated_bytes": result.get("peak_allocated_bytes"),
        "peak_reserved_bytes": result.get("peak_reserved_bytes"),
        "stages": _stages(outcome, seconds / steps if seconds and steps else 0.0),
        "device": result.get("device"),
        "versions": result.get("versions"),
    }


def _implausible(result: Mapping[str, Any], extent: Extent, saved: Path) -> str:
    """What is wrong with a result; empty where nothing is."""

    def number(value: object) -> TypeGuard[float]:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    losses, seconds = result.get("losses"), result.get("steady_seconds")
    quality = result.get("quality")
    if not number(quality) or not 0 <= quality <= 1:
        return f"its quality is no share: {quality!r}"
    if losses is not None:
        if not isinstance(losses, list) or len(losses) != extent.steps or not all(map(number, losses)):
            told = len(losses) if isinstance(losses, list) else losses
            return f"{extent.steps} losses were due, one a step; found {told!r}"
        if not number(seconds) or not seconds > 0 or result.get("steady_steps") != extent.steps - extent.warm_up:
            return f"its window of steps has no time: {seconds!r}"
    if not saved.is_dir() or not any(saved.iterdir()):
        return "it saved no model"
    return ""


def _stages(outcome: Outcome, step_seconds: float) -> dict[str, float]:
    """Seconds of each stage, from when the lines came."""
    at = {line.fields["event"]: line.seconds for line in outcome.lines if "event" in line.fields}
    begins = {"import": "imported", "data": "data", "model": "model", "train": "trained"}
    found, before = {}, 0.0
    for stage, event in {**begins, "evaluate": "evaluated", "save": "saved"}.items():
        if event in at:
            found[stage] = max(0.0, at[event] - before)
            before = at[event]
    if "first_update" in at and "model" in at and step_seconds:
        # what the first step takes beyond the others
        found["compile"] = min(found["train"], max(0.0, at["first_update"] - at["model"] - step_seconds))
        found["train"] -= found["compile"]
    found["other"] = max(0.0, outcome.seconds - before)
    return {stage: round(seconds, 3) for stage, seconds in found.items()}


def _of_ours(trained: Trained, bench: Bench) -> Record:
    outcome, told = trained.outcome, trained.summary or {}
    if outcome.status != "ok":
        unwell = _unwell(outcome)
        return {**unwell, "status": "refused"} if outcome.code == UserError.exit_code else unwell
    try:
        phases, quality = dict(told["seconds"]), _number(told["final"]["test"]["accuracy"])
    except (KeyError, TypeError, ValueError):
        return {"status": "rubbish", "why": "it ended well, and left no whole summary"}
    rate = trained.samples_per_second(bench.extent.warm_up)
    if len(trained.steps) != bench.extent.steps or not rate:
        return {"status": "rubbish", "why": f"{bench.extent.steps} steps were due; found {len(trained.steps)}"}
    stages = {
        "import": phases.get("start", 0.0) + phases.get("import", 0.0),
        "data": phases.get("data", 0.0),
        "model": phases.get("model", 0.0),
        "compile": phases.get("compile", 0.0) + phases.get("capture", 0.0),
        "train": phases.get("train", 0.0),
        "evaluate": phases.get("evaluate", 0.0),
        "save": phases.get("save", 0.0) + phases.get("checkpoint", 0.0),
    }
    stages["other"] = max(0.0, outcome.seconds - sum(stages.values()))
    return {
        "status": "ok",
        "quality": quality,
        "losses": [round(_number(line.fields["loss"]), 6) for line in trained.steps],
        "samples_per_second": round(rate, 2),
        "peak_allocated_bytes": told.get("peak_bytes"),
        "peak_reserved_bytes": (told.get("memory") or {}).get("reserved"),
        "stages": {stage: round(value, 3) for stage, value in stages.items()},
        "execution": told.get("execution"),
    }


def _number(value: object) -> float:
    """Figures that are no number are spelled out in records."""
    return float(value) if isinstance(value, (int, float, str)) else math.nan


def _unwell(outcome: Outcome) -> Record:
    """How a process ended that did not end well."""
    if outcome.status == "timeout":
        last = [line.fields.get("event") for line in outcome.lines if "event" in line.fields][-1:]
        where = f" after {last[0]!r}" if last else ""
        return {"status": "hung", "why": f"ended after {outcome.seconds:.0f} s{where}"}
    return {"status": "failed", "why": _reason(outcome), "error": outcome.error}


def _no_room(outcome: Outcome, folder: Path) -> str:
    """What says that a process failed because the disk is full; empty where nothing does."""
    if outcome.status != "failed":
        return ""
    free = shutil.disk_usage(folder).free
    said = NO_ROOM.search(outcome.error) and not SHARED_MEMORY.search(outcome.error)
    return f"{_reason(outcome)}; {free:,} bytes free" if said or free < NEARLY_FULL else ""


def _reason(outcome: Outcome) -> str:
    """One line out of a log: an error of paceline's with its why, else the last line."""
    # what was printed as events stands among it
    lines = [line.strip() for line in outcome.error.splitlines() if line.strip() and not line.startswith("{")]
    ours = next((at for at, line in enumerate(lines) if line.startswith("paceline: ")), None)
    if ours is not None:
        told = lines[ours].removeprefix("paceline: ")
        why = next((line.removeprefix("why: ") for line in lines[ours + 1 :] if line.startswith("why: ")), "")
        return f"{told}: {why}"[:KEPT_OF_WHY] if why else told[:KEPT_OF_WHY]
    if outcome.code < 0:
        return f"ended by signal {-outcome.code}" + (f": {lines[-1]}"[:KEPT_OF_WHY] if lines else "")
    # what was printed on the way may stand behind it
    raised = [line for line in lines if RAISED.match(line)]
    lines = raised or lines
    return lines[-1][:KEPT_OF_WHY] if lines else f"exit code {outcome.code}, without a word"


def matmul_rate(folder: Path) -> Line | None:
    """What the device reaches in a matrix product, in a process of its own; None where that did not work."""
    path = folder / "contenders" / "matmul.py"
    write_atomically(path, script("matmul").encode())
    outcome = run(
        script_command(path),
        environment=environment(folder / "caches" / "matmul"),
        log=folder / "cells" / "matmul.txt",
        limit_seconds=120,
    )
    return outcome.first("event", "result") if outcome.status == "ok" else None
