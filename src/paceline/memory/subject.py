"""What a plan is about: a recipe's data and model, as far as they decide sizes.

The model is built of its configuration, weights are not read. The data are those of the recipe where they have been
encoded before, or are made from nothing; otherwise every text is taken for as long as it may be, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.contract.errors import RecipeError, UserError
from paceline.contract.files import cache_folder
from paceline.contract.records import Decision
from paceline.data.builtin import PREFIX
from paceline.data.dataset import Dataset, Images, Origins, Tokens
from paceline.data.labels import empty_labels
from paceline.data.prepare import cached
from paceline.data.sources import locate_files
from paceline.data.task_rows import rows_of
from paceline.models.config import checkpoint_labels, modality
from paceline.models.processor import Processor
from paceline.models.tokenizers import tokenizer_source
from paceline.prepare.preparation import encoded, settle_shapes
from paceline.recipe import Recipe
from paceline.recipe.catalogue.tasks import ONE_CLASS
from paceline.recipe.techniques import ENTRIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Subject:
    """A recipe whose sizes are settled, and samples of these sizes."""

    recipe: Recipe
    decisions: tuple[Decision, ...]
    config: PretrainedConfig | None
    dataset: Dataset
    assumed: tuple[str, ...]
    """About the samples, for people."""


def subject_of(recipe: Recipe, *, read_data: bool = False) -> Subject:
    """What is known of a recipe without its weights.

    Args:
        recipe: as ``choose`` made it.
        read_data: read and encode the data as a run would, which takes as long.

    Raises:
        DataError: the data are to be read and cannot be used.
        RecipeError: nothing says how large a sample is.
        ModelError: the model's configuration cannot be read.
    """
    if read_data:
        locate_files(recipe.data)  # a file that is missing is sooner found than a model
    recipe, decisions, config, processor = settle_shapes(recipe)
    assumed = tuple[str, ...]()
    if read_data or recipe.data.source.startswith(PREFIX):
        dataset: Dataset | None = encoded(recipe)[0]
    else:
        dataset = _encoded_before(recipe, config, processor)
    if dataset is None:
        dataset, assumed = _assumed(recipe, config, processor)
        # what is by labels, which are not known: it takes nothing to speak of
        recipe = recipe.with_settings(["task.class_weights=null", "loop.sampler=null"])
        if dataset.is_images and recipe.data.resident == "auto":
            recipe = recipe.with_settings(["data.resident=false"])  # how many there are is not known
    return Subject(recipe, tuple(decisions), config, dataset, (*assumed, *_not_counted(recipe)))


def _not_counted(recipe: Recipe) -> Iterator[str]:
    """What no trace of such a run shows."""
    yield from (entry.assumed for entry in ENTRIES if entry.assumed and entry.is_on(recipe))
    if recipe.parallel.offload != "none":
        where = "in main memory" if recipe.parallel.offload_folder is None else "in main memory and on a disk"
        yield f"weights, gradients and states {where}, which is not counted; on the GPU not measured"


def _encoded_before(recipe: Recipe, config: PretrainedConfig | None, processor: Processor | None) -> Dataset | None:
    part, cache = recipe.model, cache_folder()
    try:
        reads = modality(part, config)
        source = None if reads == "image" else tokenizer_source(part, config, cache)
        head = checkpoint_labels(recipe.model, config)
        return cached(
            recipe.data,
            recipe.task,
            tokenizer=source,
            modality=reads,
            cache=cache,
            head=head,
            picture=processor,
        )
    except UserError:
        return None  # data, or a tokenizer, that are not on this machine: a run would say so


def _assumed(
    recipe: Recipe, config: PretrainedConfig | None, processor: Processor | None
) -> tuple[Dataset, tuple[str, ...]]:
    """Samples as large as they may be, enough of them for an evaluation."""
    loop, data = recipe.loop, recipe.data
    count = 2 * max(loop.batch_size, loop.evaluated_together)
    kind = recipe.task.type if recipe.task.type != "auto" else ONE_CLASS
    names = ("0", "1") if rows_of(kind).has_classes else ("target",)
    said: tuple[str, ...]
    inputs: Tokens | Images
    if modality(recipe.model, config) == "image":
        shape = None if processor is None else processor.shape
        if shape is None and data.image_size is not None:
            shape = (data.image_size, data.image_size, getattr(config, "num_channels", 3))
        if shape is None:
            raise RecipeError(
                "data.image_size: not set",
                "the data have not been read on this machine, and the model does not say how large its images are",
                "--set data.image_size=224, or --read-data",
            )
        inputs = Images(np.zeros((count, *shape), dtype=np.uint8))
        counted = "the images themselves are not counted"
        if recipe.data.resident == "auto":
            counted += ", up to a tenth of the GPU more where they are kept there"
        said = (f"{shape[1]} x {shape[0]} pixels an image; {counted}",)
    else:
        offsets = np.arange(count + 1, dtype=np.int64) * data.max_length
        pad_id = getattr(config, "pad_token_id", None) or 0
        inputs = Tokens(np.zeros(int(offsets[-1]), dtype=np.uint16), offsets, pad_id)
        said = (f"{data.max_length} tokens in every text, the most there may be; --read-data looks",)
        if data.overflow == "windows":
            said = (f"one window of {data.max_length} tokens in every text; --read-data counts windows",)
    if recipe.techniques.compile == "auto":
        few = f"{count:,} samples, as few as its batches take: compiling pays in a longer run"
        said += (f"{few}; --set techniques.compile=true plans that, --read-data counts them",)
    dataset = Dataset(
        inputs=inputs,
        labels=empty_labels(count, kind, names).values,
        kind=kind,
        label_names=names,
        splits=dict.fromkeys(("train", "validation"), np.arange(count)),
        origins=Origins(("assumed",), np.zeros(count, np.int32), np.zeros(count, np.int64)),
        fingerprint="assumed",
    )
    return dataset, said
