"""metrics.jsonl: every record of a run, one line of JSON each, on disk as soon as it is known."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, final

from pydantic import TypeAdapter, ValidationError

from paceline.contract.errors import RunFolderError, excerpt
from paceline.contract.files import disk_errors
from paceline.contract.plain import FORMERLY, plain
from paceline.contract.records import (
    CheckpointRecord,
    EvaluationRecord,
    MemoryPlan,
    MetricsRecord,
    Notice,
    Observer,
    Record,
    RunRecord,
    RunStarted,
    StepRecord,
    TraceRecord,
)

KINDS: dict[str, type[Record]] = {
    "start": RunStarted,
    "step": StepRecord,
    "metrics": MetricsRecord,
    "evaluation": EvaluationRecord,
    "checkpoint": CheckpointRecord,
    "notice": Notice,
    "trace": TraceRecord,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
_ADAPTERS: dict[type[Record], TypeAdapter[Record]] = {kind: TypeAdapter(kind) for kind in (*KINDS.values(), RunRecord)}


@final
class MetricsFile(Observer):
    """Appends each record as a line with a ``kind``: ``start``, ``step``, ``metrics``, ``evaluation``, ``checkpoint``,
    ``notice``, ``trace``.

    The lines are always valid JSON: numbers that are not finite are the strings ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``. A resumed run appends to the same file: its ``start`` line says after which step, and what was
    written before about later steps no longer counts. The recipe and the summary have files of their own.

    Raises:
        DiskFullError: no room, when a record is written.
        RunFolderError: the file may not be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with disk_errors(path):
            self._file = FileIO(path, "a+")
        _drop_cut_line(self._file)

    def observe(self, record: Record) -> None:
        if type(record) not in _NAMES:
            return
        if isinstance(record, RunStarted):
            record = dataclasses.replace(record, recipe={})  # recipe.yaml lies beside this file
        self._write(record_to_json(record) + b"\n")

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        # unbuffered, so that a line lost to a full disk is not tried again when the file is closed
        with disk_errors(self._path, len(line)):
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]


def record_to_json(record: Record) -> bytes:
    """One line of valid JSON for any record, a RunRecord for summary.json too; ``kind`` first where it has a name."""
    named = {"kind": _NAMES[type(record)]} if type(record) in _NAMES else {}
    return json.dumps({**named, **plain(record)}, ensure_ascii=False, allow_nan=False).encode()


def read_metrics(path: Path) -> list[Record]:
    """The records in a metrics.jsonl, in the order written; a last line cut by a crash is left out.

    Raises:
        RunFolderError: the file is missing, or a line is damaged (says which).
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise RunFolderError(f"{path}: missing", "this is not the folder of a run that has started") from None
    # whatever follows the last line break was still being written
    return [_record(path, number, line) for number, line in enumerate(lines[:-1], start=1) if line.strip()]


def record_from_plain(kind: type[Record], fields: Any) -> Record:
    """A record from plain data as JSON gives it, also of earlier releases; unknown fields are ignored.

    Raises:
        ValidationError: pydantic's, when a field is missing or of the wrong type.
    """
    return _ADAPTERS[kind].validate_python(_with_todays_keys(fields) if kind is RunRecord else fields)


def _with_todays_keys(summary: Any) -> Any:
    """Earlier releases wrote some fields of a summary, and of the plan in it, under other keys."""
    if not isinstance(summary, Mapping):
        return summary
    memory = summary.get("memory")
    if isinstance(memory, Mapping) and isinstance(memory.get("plan"), Mapping):
        memory = {**memory, "plan": _renamed(MemoryPlan, memory["plan"])}
    return {**_renamed(RunRecord, summary), "memory": memory}


def _renamed(kind: type[RunRecord | MemoryPlan], told: Mapping[str, Any]) -> dict[str, Any]:
    former = {each.metadata[FORMERLY]: each.name for each in dataclasses.fields(kind) if FORMERLY in each.metadata}
    return {**{now: told[key] for key, now in former.items() if key in told}, **told}


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        fields = json.loads(line)
        return record_from_plain(KINDS[fields["kind"]], fields)
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
        why = type(error).__name__ if isinstance(error, ValidationError) else str(error)
        shown = excerpt(line.decode("utf-8", "replace"))
        raise RunFolderError(f"{path}:{number}: not a record: {shown}", why, "remove the line") from None


def _drop_cut_line(file: FileIO) -> None:
    """Forget what a crash left after the last line break, so that the next line stands alone."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        file.truncate(end)
