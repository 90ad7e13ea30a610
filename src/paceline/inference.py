"""A saved model at work: measured on labelled data, or labelling rows."""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from paceline.data.dataset import Dataset
from paceline.data.prepare import prepare_for_inference
from paceline.engine.assemble import assemble_build
from paceline.engine.evaluate import Infer, evaluate, inference
from paceline.engine.numerics import numerics
from paceline.errors import DataError, UserError, nearest
from paceline.facts import this_machine
from paceline.files import disk_errors
from paceline.models.saved import LoadedModel, load_saved
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.parts import DataPart
from paceline.records import EvaluationRecord
from paceline.run_folder import RunFolder
from paceline.seams import Build, Ids, Task
from paceline.tasks import task_for

WINDOW = 4096
"""Rows whose predictions are held at a time, so that they can be sorted by length and written in their order."""


def evaluate_saved(folder: Path, data: str | None, rows: object | None, split: str) -> EvaluationRecord:
    """See ``paceline.evaluate``."""
    run, recipe, loaded = _open(folder)
    with numerics(recipe.techniques.precision, deterministic=recipe.deterministic):
        if data is None and rows is None:
            dataset, ids = _own_split(recipe, run, split)
        else:
            dataset, _ = _encode(loaded, _data_part(recipe, data), rows, labelled=True)
            ids = dataset.splits["all"]
        build = _build(recipe, loaded, dataset)
        size = recipe.loop.evaluation_batch_size or recipe.loop.batch_size
        return evaluate(inference(build), build, split, ids, size, step=0, epoch=0)


def predict_rows(folder: Path, data: str, out: Path, rows: object | None) -> int:
    """See ``paceline.predict``."""
    kinds = {".csv": ",", ".tsv": "\t", ".jsonl": None}
    if out.suffix not in kinds:
        raise UserError(f"-o {out}: unknown kind of file", f"known: {', '.join(kinds)}", f"-o {out.stem}.csv")
    _, recipe, loaded = _open(folder)
    with numerics(recipe.techniques.precision, deterministic=recipe.deterministic):
        dataset, table = _encode(loaded, _data_part(recipe, data), rows, labelled=False)
        build = _build(recipe, loaded, dataset)
        size = recipe.loop.evaluation_batch_size or recipe.loop.batch_size
        originals = table.rows or [{"file": dataset.origins.of(i)} for i in range(len(dataset))]
        predicted = predictions(inference(build), build, dataset.splits["all"], size)
        _write(out, kinds[out.suffix], originals, predicted, build.task)
    return len(dataset)


def predictions(infer: Infer, build: Build, ids: Ids, batch_size: int) -> Iterator[np.ndarray[Any, Any]]:
    """Probabilities [C] of each sample, in the order of ``ids``; ``WINDOW`` of them are held at a time."""
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        ordered = build.layout.sorted(window)
        found: dict[int, np.ndarray[Any, Any]] = {}
        for first in range(0, len(ordered), batch_size):
            chosen = ordered[first : first + batch_size]
            probabilities = build.task.probabilities(infer(build.layout.collate(chosen))).cpu().numpy()
            found |= dict(zip(chosen.tolist(), probabilities, strict=True))
        yield from (found[i] for i in window.tolist())


def _open(folder: Path) -> tuple[RunFolder, Recipe, LoadedModel]:
    run = RunFolder.view(folder)
    recipe, _ = choose(run.read_recipe().with_settings(["device=auto"]), this_machine())
    part = recipe.model
    loaded = load_saved(run.model, factory=part.factory, trust_remote_code=part.trust_remote_code)
    return run, recipe, loaded


def _data_part(recipe: Recipe, source: str | None) -> DataPart:
    """The run's columns and sizes for another source; splits are the run's own affair."""
    changed = {"source": source or "memory", "validation": None, "test": None, "split": None}
    return recipe.data.model_copy(update=changed)


def _encode(loaded: LoadedModel, part: DataPart, rows: object | None, *, labelled: bool) -> tuple[Dataset, Any]:
    saved = loaded.saved
    return prepare_for_inference(
        part,
        tokenizer=_Given(loaded.tokenizer) if loaded.tokenizer is not None else None,
        max_length=saved.max_length,
        label_names=saved.label_names,
        kind=saved.kind,
        labelled=labelled,
        rows=rows,
        modality=saved.modality,
    )


def _own_split(recipe: Recipe, run: RunFolder, split: str) -> tuple[Dataset, Ids]:
    from paceline.run import encoded

    if recipe.data.source == "memory":
        raise DataError(f"{run.path}: was trained on rows in memory", fix="give --data FILE, or rows= from Python")
    dataset, _ = encoded(recipe)
    if split not in dataset.splits:
        raise DataError(f"--split {split}: the run has no such split", fix=nearest(split, dataset.splits))
    return dataset, dataset.splits[split]


def _build(recipe: Recipe, loaded: LoadedModel, dataset: Dataset) -> Build:
    saved = loaded.saved
    task: Task = task_for(saved.kind, saved.label_names, recipe.task)
    normalisation = (saved.image.mean, saved.image.std) if saved.image else ((), ())
    # nothing is differentiated here, so there is nothing to recompute
    plain = recipe.with_settings(["techniques.recompute=false"])
    device = torch.device(recipe.device)
    return assemble_build(plain, loaded.model, dataset, task, device, blocks=(), normalisation=normalisation)


class _Given:
    """A tokenizer that exists already, as a source of one."""

    key = ""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def get(self, training_texts: Any) -> Any:
        return self._tokenizer


def _write(
    out: Path,
    delimiter: str | None,
    originals: Sequence[Mapping[str, Any]],
    predicted: Iterator[np.ndarray[Any, Any]],
    task: Task,
) -> None:
    """Rows with their predictions; the file appears whole or not at all."""
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                described = (
                    {**row, **_described(task, scores, set(row), joined=delimiter is not None)}
                    for row, scores in zip(originals, predicted, strict=True)
                )
                _write_rows(file, delimiter, described)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(partial, 0o666 & ~umask)
            os.replace(partial, out)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise


def _write_rows(file: TextIO, delimiter: str | None, rows: Iterator[dict[str, Any]]) -> None:
    if delimiter is None:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        return
    first = next(rows)
    writer = csv.DictWriter(file, list(first), delimiter=delimiter, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerow(first)
    writer.writerows(rows)


def _described(task: Task, scores: np.ndarray[Any, Any], taken: set[str], *, joined: bool) -> dict[str, Any]:
    """``prediction`` and a probability a label, under names that no column of the row has."""
    names = task.label_names
    if task.kind == "regression":
        found: dict[str, Any] = {"prediction": float(scores[0])}
    elif task.kind == "multi_label":
        chosen = [name for name, score in zip(names, scores, strict=True) if score > 0.5]
        found = {"prediction": "|".join(chosen) if joined else chosen}
    else:
        found = {"prediction": names[int(scores.argmax())]}
    if task.kind != "regression":
        found |= {f"probability of {n}": round(float(s), 6) for n, s in zip(names, scores, strict=True)}
    return {_free(name, taken): value for name, value in found.items()}


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name = f"{name}_"
    return name
