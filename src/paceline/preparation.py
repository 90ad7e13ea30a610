"""Before the first step: data and model from a recipe, put into a build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.data.dataset import Dataset, Images, Tokens
from paceline.data.prepare import prepare
from paceline.engine.assemble import assemble_build
from paceline.errors import RecipeError
from paceline.files import cache_folder
from paceline.models.config import max_positions, modality, read_config
from paceline.models.images import image_settings, preferred_size
from paceline.models.load import load_model
from paceline.models.saved import SavedModel
from paceline.models.structure import blocks, final_linear, set_trained
from paceline.models.tokenizers import tokenizer_source
from paceline.recipe import Recipe
from paceline.records import Decision
from paceline.seams import Build
from paceline.stopwatch import Stopwatch
from paceline.tasks import task_for


@dataclass(frozen=True)
class Prepared:
    """Data and model, ready to be assembled."""

    recipe: Recipe
    decisions: tuple[Decision, ...]
    dataset: Dataset
    tokenizer: Any
    build: Build
    saved: SavedModel


def prepare_run(
    recipe: Recipe,
    decisions: tuple[Decision, ...],
    *,
    watch: Stopwatch,
    rows: object | None = None,
    quarantine: Path | None = None,
) -> Prepared:
    """Read, deal and encode the data; load or build the model; put both into a build.

    Args:
        recipe: checked against this machine.
        decisions: those taken so far; the ones about sizes of samples are added.
        watch: told how long data and model take.
        rows: data in memory in place of the recipe's source.
        quarantine: takes rows that cannot be used, where the recipe says to skip them.
    """
    part = recipe.model
    with watch.phase("model"):
        config = read_config(part)
        shapes = _shape_decisions(recipe, max_positions(config), preferred_size(part, config) if part.source else None)
        recipe = recipe.with_settings(f"{decision.setting}={decision.value}" for decision in shapes)
    with watch.phase("data"):
        dataset, tokenizer = encoded(recipe, rows, quarantine)
    with watch.phase("model"):
        task = task_for(dataset.kind, dataset.label_names, recipe.task)
        shape = dataset.inputs.pixels.shape[1:] if isinstance(dataset.inputs, Images) else None
        images = image_settings(part, shape) if shape else None
        random = recipe.data.random.vocabulary
        model = load_model(
            part,
            config,
            num_labels=task.num_outputs,
            label_names=dataset.label_names,
            kind=dataset.kind,
            vocabulary_size=None if shape else len(tokenizer) if tokenizer else random,
            pad_id=dataset.inputs.pad_id if isinstance(dataset.inputs, Tokens) else None,
            image_shape=shape,
            seed=recipe.seed,
        )
        set_trained(model, part.train)
        if part.train == "features":
            final_linear(model, task.num_outputs).requires_grad_()  # the one that is fitted
        build = assemble_build(
            recipe,
            model,
            dataset,
            task,
            torch.device(recipe.device),
            blocks=[block for _, block in blocks(model)],
            normalisation=(images.mean, images.std) if images else ((), ()),
        )
    saved = SavedModel(
        label_names=dataset.label_names,
        kind=dataset.kind,
        modality="image" if images else "text",
        max_length=None if images else recipe.data.max_length,
        pairs=isinstance(dataset.inputs, Tokens) and dataset.inputs.second is not None,
        image=images,
        factory=part.factory,
    )
    return Prepared(recipe, (*decisions, *shapes), dataset, tokenizer, build, saved)


def _shape_decisions(recipe: Recipe, positions: int | None, image_size: int | None) -> list[Decision]:
    """Sizes of samples that the model decides where the recipe leaves them open."""
    data = recipe.data
    if positions is not None and data.max_length > positions:
        if "max_length" in data.model_fields_set:
            raise RecipeError(
                f"data.max_length = {data.max_length}",
                f"the model has positions for {positions} tokens",
                f"--set data.max_length={positions}",
            )
        reason = "the model has no more positions"
        return [Decision(setting="data.max_length", value=str(positions), reason=reason)]
    if image_size is not None and data.image_size is None:
        reason = "the size that the model was trained on"
        return [Decision(setting="data.image_size", value=str(image_size), reason=reason)]
    return []


def encoded(recipe: Recipe, rows: object | None = None, quarantine: Path | None = None) -> tuple[Dataset, Any]:
    """The data set of a recipe whose sizes are settled, and the tokenizer it was encoded with (None without one)."""
    part = recipe.model
    config = read_config(part)
    reads = modality(part, config)
    cache = cache_folder()
    needs_no_tokenizer = reads == "image" or recipe.data.source == "builtin:random"
    source = None if needs_no_tokenizer else tokenizer_source(part, config, cache)

    def encode(cache: Path | None) -> Dataset:
        return prepare(
            recipe.data,
            recipe.task,
            tokenizer=source,
            max_length=recipe.data.max_length,
            modality=reads,
            cache=cache,
            rows=rows,
            quarantine=quarantine,
        )

    dataset = encode(cache)
    if source is None or isinstance(dataset.inputs, Images):
        return dataset, None
    tokenizer = source.settle(dataset.fingerprint)
    if tokenizer is None:
        # the encoded data were cached, but the vocabulary trained on them is gone: train it again
        dataset = encode(None)
        tokenizer = source.settle(dataset.fingerprint)
    return dataset, tokenizer
