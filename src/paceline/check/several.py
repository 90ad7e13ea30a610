"""The same steps on one rank and on several: what each process does, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.check.subject import stilled
from paceline.data.dataset import Dataset
from paceline.engine.evaluate import evaluate
from paceline.models.config import read_config
from paceline.models.images import ImageSettings
from paceline.prepare.assemble import assemble
from paceline.prepare.course import Course
from paceline.prepare.preparation import build_for, encoded, model_for, size_of_vocabulary
from paceline.recipe import Recipe
from paceline.seams import Build, Mesh, World

Job = Mapping[str, Any]
"""What a rank is asked for, as JSON: recipe, splits, images, weights (a file), double, steps, split, out (a file)."""


def job_for(
    recipe: Recipe,
    dataset: Dataset,
    images: ImageSettings | None,
    *,
    weights: Path,
    split: str,
    double: bool,
    out: Path,
) -> Job:
    """Steps of a recipe over the samples of the splits.

    Args:
        weights: file of the model's weights.
        split: to evaluate.
        out: file for the weights that the steps end with.
    """
    return {
        "recipe": recipe.plain(),
        "splits": {name: ids.tolist() for name, ids in dataset.splits.items()},
        "fingerprint": dataset.fingerprint,
        "images": None if images is None else asdict(images),
        "weights": str(weights),
        "split": split,
        "double": double,
        "out": str(out),
    }


def carried_out(job: Job, world: World) -> dict[str, Any]:
    """Do a job as one of the ranks of ``world``; the first one writes the weights.

    Returns:
        losses and norms of the steps, and the evaluation: the same on every rank.
    """
    recipe = Recipe.parse(job["recipe"])
    dataset, tokenizer = encoded(recipe)
    if dataset.fingerprint != job["fingerprint"]:
        raise ValueError("the data have changed, or are read otherwise by a rank")
    dataset = replace(dataset, splits={name: np.array(ids, dtype=np.int64) for name, ids in job["splits"].items()})
    found = job["images"]
    images = found and ImageSettings(**{**found, "mean": tuple(found["mean"]), "std": tuple(found["std"])})
    vocabulary = size_of_vocabulary(recipe, dataset, tokenizer)
    model = model_for(recipe, read_config(recipe.model), dataset, vocabulary, tell=lambda _: None)
    model.load_state_dict(load_file(job["weights"]), strict=False)
    model = stilled(model.double() if job["double"] else model)
    mesh = Mesh.over(world, tensor=recipe.parallel.tensor)
    build = build_for(recipe, model, dataset, torch.device(recipe.device), images, mesh=mesh)
    told, weights = stepped(recipe, build, dataset, mesh, job["split"])
    if world.is_first:
        save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, job["out"])
    return told


def stepped(
    recipe: Recipe, build: Build, dataset: Dataset, mesh: Mesh, split: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An epoch's steps and an evaluation; what they come to, and the weights at the end."""
    course = Course(recipe, dataset, build, mesh)
    assembled = assemble(recipe, build, course.total_steps, mesh=mesh)
    engine, at = assembled.engine, course.start
    losses, norms = list[float](), list[float]()
    for step in range(course.steps_per_epoch):
        loss = engine.accumulate(course.input(at, step)).loss
        losses.append(float(mesh.data.all_reduce(loss.detach().clone()) if mesh.data.size > 1 else loss))
        norms.append(float(engine.update().norm))
        at = course.after(at)
    ids = dataset.splits[split]
    size = uneven_size(len(ids))
    found = evaluate(engine.infer, build, split, ids, size, step=0, epoch=0, world=mesh.data)
    weights = {name: tensor.detach().cpu().clone() for name, tensor in engine.whole().items()}
    engine.close()
    evaluation = {"loss": found.loss, **found.metrics, "samples": found.samples}
    return {"losses": losses, "norms": norms, "evaluation": evaluation}, weights


def uneven_size(count: int) -> int:
    """Samples of a batch of which ``count`` samples make an odd number, so that two ranks have not equally many; where
    that can be, the last one is smaller."""
    odd = [size for size in range(1, count) if -(-count // size) % 2]
    return next((size for size in reversed(odd) if count % size), odd[-1] if odd else 1)
