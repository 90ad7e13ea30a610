"""A turn of a cell: the command that runs it, and what its output comes to."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from suites import Cell, Turn

from paceline.bench.process import Line, Outcome, run
from paceline.bench.records import Record
from paceline.bench.start import SOURCE, Trained, drop_large, environment, script_command, set_options, train

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = ROOT / "benchmarks" / "contenders"

MATMUL_FLOPS = {"NVIDIA H200": 790e12}
"""GPU -> its rate, which MFU is a share of: bf16 products of 8192 x 8192, the best seen. No figure for other GPUs."""

LAST_LOSSES = 50
"""As the contenders report it."""


def measure(
    turn: Turn, folder: Path, recipe: Sequence[str], workload: Path | None, *, on_gpus: bool, limit_seconds: float
) -> Record:
    """Run one turn in fresh processes.

    Args:
        turn: what is run.
        folder: of the whole suite: caches, logs and run folders go there.
        recipe: the recipe's file and its ``--set`` options; empty where no workload is needed.
        workload: the workload folder.
        on_gpus: each process has a GPU; else all share the CPU.
        limit_seconds: wall time left for it.

    Returns:
        The record, with ``status`` ``ok``, ``failed``, ``timeout`` or ``not installed``.
    """
    cell = turn.cell
    cache = cache_folder(turn, folder)
    if turn.cold:
        shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    name = f"{cell.name.replace('/', '_')}-{'cold' if turn.cold else 'warm'}{turn.round}"
    log = folder / "logs" / cell.suite / f"{name}.log"
    more: dict[str, Any] = {"log": log, "limit_seconds": limit_seconds, "folder": ROOT}
    if cell.script:
        settings = json.dumps(dict(cell.settings))
        command = script_command(CONTENDERS / cell.script, str(workload or folder), settings, processes=cell.processes)
        variables = environment(cache, sources=(CONTENDERS,), processes=cell.processes)
        outcome = run(command, environment=variables, **more)
        found = _of_contender(cell, outcome, workload)
    else:
        out = folder / "runs" / cell.suite / name
        options = [*recipe[1:], *paceline_options(cell, on_gpus=on_gpus)]
        variables = environment(cache, sources=(SOURCE,), all_gpus=cell.processes > 1)
        trained = train(recipe[0], out, options, environment=variables, **more)
        command, outcome = trained.command, trained.outcome
        found = _of_paceline(cell, trained, workload)
        drop_large(out)
    return {
        **identity(turn),
        "status": outcome.status,
        "total_seconds": round(outcome.seconds, 3),
        **found,
        **({"error": outcome.error} if outcome.error else {}),
        "command": command,
    }


def identity(turn: Turn) -> Record:
    """The fields of a record that say what was run."""
    cell = turn.cell
    return {
        "suite": cell.suite,
        "work": cell.work,
        "work_of_one": cell.work_of_one,
        "processes": cell.processes,
        "contender": cell.contender,
        "settings": {**cell.settings, **cell.recipe_settings, "batch_size": cell.batch_size},
        "cold": turn.cold,
        "round": turn.round,
    }


def cache_folder(turn: Turn, folder: Path) -> Path:
    """Empty before a cold turn; what the first cold turn leaves in it is what the warm ones find."""
    number = turn.round if turn.cold else 0
    return folder / "caches" / turn.cell.suite / f"{turn.cell.name.replace('/', '_')}-{number}"


def paceline_options(cell: Cell, *, on_gpus: bool) -> list[str]:
    """The cell's batch, number of steps and processes, as options of ``paceline train``."""
    steps = cell.settings["warm_up"] + cell.settings["measured"]
    settings: dict[str, Any] = {"loop.batch_size": cell.batch_size, "loop.max_steps": steps}
    if "precision" in cell.settings:
        settings["techniques.precision"] = cell.settings["precision"]
    options = set_options({**settings, **cell.recipe_settings})
    if cell.processes > 1:
        options += ["--gpus" if on_gpus else "--processes", str(cell.processes)]
    return options


def _of_contender(cell: Cell, outcome: Outcome, workload: Path | None) -> Record:
    if outcome.first("event", "not installed"):
        return {"status": "not installed"}
    found: Record = {}
    if first := outcome.first("event", "first_update"):
        found["first_update_seconds"] = round(first.seconds, 3)
    if (line := outcome.first("event", "result")) is None:
        return found if outcome.status != "ok" else {**found, "status": "failed", "error": "it printed no result"}
    result = {key: value for key, value in line.fields.items() if key not in ("event", "time")}
    steady = result.pop("seconds", None)
    if steady is None or workload is None:  # a matrix product
        return {**found, **result}
    warm = outcome.first("event", "warm")
    assert warm is not None
    step = steady / result["steps"]
    found["one_time_seconds"] = round(warm.seconds - step * cell.settings["warm_up"], 3)
    spec = read_spec(workload)
    squared = result.pop("squared_lengths")
    return {**found, **result, **_rates(spec, steady, result["samples"], result["tokens"], squared)}


def _of_paceline(cell: Cell, trained: Trained, workload: Path | None) -> Record:
    outcome, steps, told = trained.outcome, trained.steps, trained.summary
    found: Record = {}
    if steps:
        found["first_update_seconds"] = round(steps[0].seconds, 3)
    if outcome.status != "ok" or told is None or workload is None:
        return found
    start = outcome.first("kind", "start")
    found.update(
        loss=statistics.fmean(line.fields["loss"] for line in steps[-LAST_LOSSES:]),
        num_parameters=start.fields["num_parameters"] if start else None,
        peak_allocated_bytes=told.get("peak_bytes"),
        peak_reserved_bytes=(told.get("memory") or {}).get("reserved"),
        phases={name: round(seconds, 3) for name, seconds in told["seconds"].items()},
        path=told.get("execution"),
        final=told.get("final"),
    )
    early = (told.get("execution") or {}).get("early_pooling") == "the last block"
    return {**found, **_window(cell, steps, workload, early=early)}


def _window(cell: Cell, steps: Sequence[Line], workload: Path, *, early: bool) -> Record:
    """The steady rate over the same steps as everybody's, and whether they were the same samples."""
    warm_up, measured, size = (cell.settings[key] for key in ("warm_up", "measured", "batch_size"))
    inside = steps[warm_up : warm_up + measured]
    seconds = sum(line.fields["seconds"] for line in inside)
    # what the run says of itself, beside what was seen from here
    seen = inside[-1].seconds - steps[warm_up - 1].seconds
    earlier = sum(line.fields["seconds"] for line in steps[1:warm_up])
    reached = steps[0].seconds + earlier
    lengths, order = _lengths(workload), np.load(workload / "order.npy")
    ids = order[:, : order.shape[1] // size * size].reshape(-1)[: (warm_up + measured) * size]
    expected = lengths[ids].reshape(-1, size).sum(1).tolist()
    squared = int((lengths[ids[warm_up * size :]] ** 2).sum())
    samples, tokens = (sum(line.fields[key] for line in inside) for key in ("samples", "tokens"))
    return {
        "steps": measured,
        "samples": samples,
        "tokens": tokens,
        "one_time_seconds": round(reached - seconds / measured * warm_up, 3),
        "seen_samples_per_second": round(samples / seen, 1) if seen > 0 else None,
        "padding_share": round(1 - tokens / sum(line.fields["slots"] for line in inside), 4),
        "same_batches": expected == [line.fields["tokens"] for line in steps],
        **_rates(read_spec(workload), seconds, samples, tokens, squared, early=early),
    }


def _rates(
    spec: Mapping[str, Any],
    seconds: float,
    samples: int,
    tokens: int | None,
    squared: int | None,
    *,
    early: bool = False,
) -> Record:
    """Rates of the window; floating-point operations are those of real samples and tokens alone.

    Args:
        early: of the last block, one position a text is computed; the operations left out are not counted.
    """

    def flops(counts: Mapping[str, float]) -> float:
        seen = {"flops_per_sample": samples, "flops_per_token": tokens, "flops_per_squared_length": squared}
        return sum(counts[name] * (number or 0) for name, number in seen.items() if name in counts)

    return {
        "steady_seconds": round(seconds, 4),
        "samples_per_second": round(samples / seconds, 1),
        "tokens_per_second": round(tokens / seconds) if "flops_per_token" in spec and tokens else None,
        "model_flops_per_second": flops(spec["early_pooling"] if early else spec) / seconds,
        **({"whole_model_flops_per_second": flops(spec) / seconds} if early else {}),
    }


def mfu(record: Mapping[str, Any], gpu: str | None, key: str = "model_flops_per_second") -> float | None:
    """Model FLOP/s over the GPUs' rate of a large matrix product; None for a GPU whose rate is not known.

    Args:
        key: ``model_flops_per_second`` counts what is computed; ``whole_model_flops_per_second`` also what a run that
            is pooled early leaves out.
    """
    rate, peak = record.get(key), MATMUL_FLOPS.get(gpu or "")
    return round(rate / (peak * record["processes"]), 4) if rate and peak else None


def read_spec(workload: Path) -> dict[str, Any]:
    """spec.json of a workload folder."""
    spec: dict[str, Any] = json.loads((workload / "spec.json").read_text(encoding="utf-8"))
    return spec


def _lengths(workload: Path) -> np.ndarray:
    """int64 [n]: tokens of each sample; 1 for an image."""
    offsets = workload / "offsets.npy"
    if offsets.exists():
        return np.diff(np.load(offsets))
    return np.ones(len(np.load(workload / "labels.npy")), dtype=np.int64)
