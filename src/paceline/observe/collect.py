"""A run folder read back: all that the report needs, also from a run that was cut short or is still going."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from paceline.contract.errors import RunFolderError
from paceline.contract.records import CheckpointRecord, EvaluationRecord, Notice, RunRecord, RunStarted, StepRecord
from paceline.observe.metrics_file import read_metrics, record_from_plain
from paceline.run_folder import require_files


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a run folder tells about its run. What is not there yet is None or empty."""

    folder: Path
    started: RunStarted | None
    """As of the newest start; its ``recipe`` is empty."""
    steps: tuple[StepRecord, ...]
    """In order, each number once: what was recorded before a resume and done again after it is left out."""
    evaluations: tuple[EvaluationRecord, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    notices: tuple[Notice, ...]
    recipe: str
    """recipe.yaml as written."""
    manifest: Mapping[str, Any]
    summary: RunRecord | None


def collect(folder: Path) -> Collected:
    """Read metrics.jsonl, recipe.yaml, manifest.json and summary.json of a run folder.

    Raises:
        RunFolderError: the folder holds neither metrics.jsonl nor summary.json, or one of the files is damaged.
    """
    metrics, summary_file = folder / "metrics.jsonl", folder / "summary.json"
    if not metrics.exists() and not summary_file.exists():
        raise RunFolderError(
            f"{folder}: not a run folder",
            "it holds neither metrics.jsonl nor summary.json",
            "give the folder that paceline train printed",
        )
    require_files(folder)
    started: RunStarted | None = None
    steps: dict[int, StepRecord] = {}
    evaluations: dict[tuple[str, int], EvaluationRecord] = {}
    checkpoints: dict[int, CheckpointRecord] = {}
    notices: dict[Notice, None] = {}
    for record in read_metrics(metrics) if metrics.exists() else ():
        match record:
            case RunStarted():
                started, last = record, record.first_step
                steps = {step: kept for step, kept in steps.items() if step <= last}
                evaluations = {key: kept for key, kept in evaluations.items() if key[1] <= last}
                checkpoints = {step: kept for step, kept in checkpoints.items() if step <= last}
            case StepRecord():
                steps[record.step] = record
            case EvaluationRecord():
                evaluations[record.split, record.step] = record
            case CheckpointRecord():
                checkpoints[record.step] = record
            case Notice():
                notices[record] = None
    summary = read_summary(summary_file)
    if summary is not None and steps and max(steps) > summary.steps:
        summary = None  # left by a run that was stopped and has been resumed since
    recipe = folder / "recipe.yaml"
    return Collected(
        folder=folder,
        started=started,
        steps=tuple(steps[step] for step in sorted(steps)),
        evaluations=tuple(evaluations.values()),
        checkpoints=tuple(checkpoints[step] for step in sorted(checkpoints)),
        notices=tuple(notices),
        recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.exists() else "",
        manifest=_read_json(folder / "manifest.json"),
        summary=summary,
    )


def read_summary(path: Path) -> RunRecord | None:
    """Return what became of a run; None where there is no such file.

    Raises:
        RunFolderError: the file is damaged, or holds something else.
    """
    fields = _read_json(path)
    if not fields:
        return None
    try:
        return cast(RunRecord, record_from_plain(RunRecord, fields))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise RunFolderError(f"{path}: {where}: {problem['msg']}", "this is not the summary of a run") from None


def _read_json(path: Path) -> Mapping[str, Any]:
    """The mapping in a JSON file; empty when there is no such file."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path}: damaged", str(error), "remove the file, or run again") from None
    if not isinstance(found, dict):
        raise RunFolderError(f"{path}: damaged", f"holds {type(found).__name__} where a mapping belongs")
    return found
