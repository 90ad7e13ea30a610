"""report.html from a run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline._version import __version__
from paceline.contract.files import write_atomically
from paceline.contract.records import Decision, EvaluationRecord
from paceline.contract.redaction import without_credentials
from paceline.observe.collect import Collected, collect
from paceline.observe.data_facts import data_facts
from paceline.observe.formats import amount, duration, figure, rate, share, size
from paceline.recipe.bounds import BoundedLoader
from paceline.report.curves import curves
from paceline.report.memory import memory
from paceline.report.page import page_of
from paceline.report.time_budget import time_budgets
from paceline.run_folder import require_writable

PHASES = (
    *("start", "import", "data", "model", "compile", "capture"),
    *("train", "evaluate", "checkpoint", "save", "other"),
)
"""Each phase has a colour of its own in the style sheet, in this order."""
LARGEST_MATRIX = 20
"""Classes above which the most frequent mistakes are listed instead of the whole matrix."""
LONGEST_LABEL = 120
LONGEST_LIST = 200
"""Notices, checkpoints and mix-ups beyond this many are counted, not listed."""


def build_report(folder: Path) -> Path:
    """Write report.html into a run folder, from the files in it, and return its path.

    The file stands alone and is inert: styles and charts are inline, there is no script, and a content security
    policy forbids requests. A run that was cut short or is still going gets a report of what there is.

    Raises:
        RunFolderError: not a run folder, one of its files is damaged, or it cannot be written.
        DiskFullError: no room; a report that was there before is intact.
    """
    run = collect(folder)
    require_writable(folder)
    page = page_of("report.html", _content(run))
    path = folder / "report.html"
    write_atomically(path, page.encode("utf-8", "backslashreplace"))
    return path


def _content(run: Collected) -> dict[str, Any]:
    summary, started = run.summary, run.started
    name = summary.name if summary else started.name if started else run.folder.name
    steps = summary.steps if summary else run.steps[-1].step if run.steps else 0
    return {
        "name": name,
        "folder": summary.folder if summary else started.folder if started else str(run.folder),
        "status": summary.status if summary else "not finished",
        "progress": f"{steps:,} of {started.total_steps:,} steps" if started else f"{steps:,} steps",
        "device": started.device if started else "",
        "model": _model(run),
        "tiles": list(_tiles(run)),
        "curves": curves(run),
        "data": _data(run),
        "phases": _phases(run),
        "overlapped": sorted(run.summary.overlapped_seconds.items()) if run.summary else [],
        "execution": list(run.summary.execution.items()) if run.summary else [],
        "time_budgets": time_budgets(run.folder),
        "memory": memory(summary.memory) if summary and summary.memory else None,
        "final": _final(run),
        "thresholds": _thresholds(run),
        "matrix": _matrix(run),
        "decisions": _decisions(run),
        "notices": _Listed.of([(notice.level, notice.message) for notice in run.notices]),
        "checkpoints": _checkpoints(run),
        # a run refuses secrets in its recipe; the file may be older, or have been edited
        "recipe": without_credentials(run.recipe).splitlines(),
        "environment": list(_flat(run.manifest))[:500],
        "version": __version__,
    }


@dataclass(frozen=True)
class _Listed:
    """The first rows of a list, and how many more there are."""

    rows: list[Any]
    num_more: int

    @classmethod
    def of(cls, rows: Any, limit: int = LONGEST_LIST) -> _Listed:
        return cls(list(rows[:limit]), max(len(rows) - limit, 0))


def _checkpoints(run: Collected) -> dict[str, Any]:
    """Checkpoints that are there, the newest first, the step of the best, and how many were removed since."""
    there = [one for one in run.checkpoints if (run.folder / "checkpoints" / Path(one.folder).name).is_dir()]
    return {
        "listed": _Listed.of(there[::-1]),
        "best": next((one.step for one in reversed(there) if one.is_best), None),
        "num_removed": len(run.checkpoints) - len(there),
    }


@dataclass(frozen=True, kw_only=True)
class _Tile:
    value: str
    unit: str
    label: str


def _tiles(run: Collected) -> Iterator[_Tile]:
    """The few figures that a person looks for first."""
    summary = run.summary
    final = summary.final if summary else _latest(run)
    # what was never trained on comes first
    for split, metrics in sorted(final.items(), key=lambda item: item[0] != "test"):
        if split != "train" and (metric := _headline_metric(run, metrics)):
            yield _Tile(value=figure(metrics[metric]), unit="", label=f"{split} {metric}")
    if summary:
        yield _Tile(value=rate(summary.samples_per_second), unit="/s", label="samples, in training")
        if summary.tokens_per_second != summary.samples_per_second:
            yield _Tile(value=rate(summary.tokens_per_second), unit="/s", label="real tokens")
            yield _Tile(value=share(summary.padding_share), unit="", label="padding")
        if summary.peak_bytes is not None:
            value, unit = size(summary.peak_bytes).split(" ")
            yield _Tile(value=value, unit=unit, label="peak memory")
        if "total" in summary.seconds:
            yield _Tile(value=duration(summary.seconds["total"]), unit="", label="from start to end")
        if summary.first_update_seconds is not None:
            yield _Tile(value=duration(summary.first_update_seconds), unit="", label="to the first update")


def _headline_metric(run: Collected, metrics: Mapping[str, float]) -> str | None:
    recipe = _parsed(run.recipe)
    loop = recipe.get("loop")
    wanted = str(loop.get("best_metric", "")).removeprefix("-") if isinstance(loop, dict) else ""
    others = [name for name in metrics if name != "loss"]
    return next((name for name in (wanted, "accuracy", *others, "loss") if name in metrics), None)


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        found = yaml.load(text, Loader=BoundedLoader)
    except yaml.YAMLError:
        return {}  # edited by hand since: it is shown as it is, and only the choice of the headline rests on it
    return found if isinstance(found, dict) else {}


def _latest(run: Collected) -> dict[str, dict[str, float]]:
    """Metrics of the newest evaluation of each split, for a run without a summary."""
    return {record.split: {"loss": record.loss, **record.metrics} for record in run.evaluations}


def _final(run: Collected) -> dict[str, Any]:
    metrics = run.summary.final if run.summary else _latest(run)
    columns = list(dict.fromkeys(name for values in metrics.values() for name in values))
    samples = dict(run.started.samples) if run.started else {}
    rows = [(split, samples.get(split), [values.get(name) for name in columns]) for split, values in metrics.items()]
    if run.summary:
        rows += [
            (f"{split}, {of}: not saved", samples.get(split), [values.get(name) for name in columns])
            for split, scores in run.summary.final_scores.items()
            for of, values in scores.items()
            if of != run.summary.saved
        ]
        found = run.summary.baseline.items()
        rows += [(f"{split}, baseline", samples.get(split), [v.get(name) for name in columns]) for split, v in found]
    return {"columns": columns, "rows": rows, "is_final": run.summary is not None}


def _thresholds(run: Collected) -> list[tuple[str, float]]:
    return [(label[:LONGEST_LABEL], found) for label, found in run.summary.thresholds.items()] if run.summary else []


def _model(run: Collected) -> str:
    if run.started is None:
        return ""
    trained, every = run.started.num_trained_parameters, run.started.num_parameters
    return (
        f"{amount(trained)} of {amount(every)} parameters trained"
        if trained != every
        else f"{amount(every)} parameters"
    )


def _decisions(run: Collected) -> tuple[Decision, ...]:
    if run.summary:
        return run.summary.decisions
    return run.started.decisions if run.started else ()


def _data(run: Collected) -> list[tuple[str, str]]:
    found = run.summary.data if run.summary else run.started.data if run.started else None
    return data_facts(found) if found else []


def _phases(run: Collected) -> list[tuple[str, float, float, int]]:
    """Name, seconds, share and number of the colour of each phase, as far as known, in the order of a run."""
    if run.summary:
        seconds = {name: spent for name, spent in run.summary.seconds.items() if name != "total"}
    else:
        seconds = {
            "train": sum(record.seconds for record in run.steps),
            "evaluate": sum(record.seconds for record in run.evaluations),
            "checkpoint": sum(record.seconds for record in run.checkpoints),
        }
    total = sum(seconds.values())
    colours = {name: colour for colour, name in enumerate(PHASES)}
    ordered = sorted(seconds.items(), key=lambda phase: colours.get(phase[0], len(PHASES) - 1))
    return [(name, s, s / total, colours.get(name, len(PHASES) - 1)) for name, s in ordered if s > 0]


def _matrix(run: Collected) -> dict[str, Any] | None:
    """The confusion matrix of the test split, or else of the newest evaluation that has one."""
    counted = [record for record in run.evaluations if record.confusion]
    if not counted:
        return None
    best = run.summary.best_step if run.summary else None
    record = max(counted, key=lambda record: (record.split == "test", record.step == best, record.step))
    counts = record.confusion or ()
    names = run.started.label_names if run.started else ()
    labels = [names[index][:LONGEST_LABEL] if index < len(names) else str(index) for index in range(len(counts))]
    is_whole = len(counts) <= LARGEST_MATRIX
    return {
        "split": record.split,
        "step": record.step,
        "labels": labels,
        "rows": _matrix_rows(labels, counts) if is_whole else [],
        "mix_ups": None if is_whole else _Listed.of(_mix_ups(labels, record), limit=40),
    }


def _matrix_rows(labels: list[str], counts: tuple[tuple[int, ...], ...]) -> list[dict[str, Any]]:
    rows = []
    for index, row in enumerate(counts):
        total = sum(row)
        cells = [(count, count / total if total else 0.0) for count in row]
        rows.append(
            {"label": labels[index], "cells": cells, "total": total, "right": row[index] / total if total else None}
        )
    return rows


def _mix_ups(labels: list[str], record: EvaluationRecord) -> list[tuple[str, str, int, float]]:
    """True label, predicted label, count and share of the true label's samples, most frequent first."""
    found = [
        (labels[true], labels[predicted], count, count / sum(row))
        for true, row in enumerate(record.confusion or ())
        for predicted, count in enumerate(row)
        if count and true != predicted
    ]
    return sorted(found, key=lambda mix_up: -mix_up[2])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested plain data with dotted names; short lists stay on one line."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
            yield from _flat({str(index): item for index, item in enumerate(value)}, f"{prefix}{key}.")
        else:
            text = (
                ", ".join(str(item) for item in value)
                if isinstance(value, list)
                else ""
                if value is None
                else str(value)
            )
            yield f"{prefix}{key}", text[:2000]
