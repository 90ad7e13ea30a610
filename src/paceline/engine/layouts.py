"""Which layout a run's samples get, and whether they live on the device."""

from __future__ import annotations

import inspect
import sys

import numpy as np
import torch
from torch import nn

from paceline.contract.errors import RecipeError
from paceline.contract.records import Decision
from paceline.data.dataset import Dataset, Images, Tokens
from paceline.data.layout import ImageLayout, PackedLayout, PaddedLayout, bucket_for, resident_bytes
from paceline.machine.device import is_gpu, memory_bytes
from paceline.recipe import Recipe

RESIDENT_SHARE = 0.1
"""Samples are kept on the GPU when they take at most this share of its memory."""

PADDED_BUCKET = 64
"""Lengths of padded batches are multiples of this where shapes should come again: 8 of them up to 512."""

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and deviation a channel, of pixel values scaled to 0..1."""


def image_layout(
    recipe: Recipe, model: nn.Module, dataset: Dataset, device: torch.device, normalisation: Normalisation
) -> ImageLayout:
    """Images, normalised; in training augmented."""
    images = dataset.inputs
    assert isinstance(images, Images)
    convolves = any(parameter.ndim == 4 for parameter in model.parameters())
    last = recipe.techniques.channels_last is not False and convolves
    return ImageLayout(
        images,
        dataset.labels,
        device,
        mean=normalisation[0],
        deviation=normalisation[1],
        resident=resident(recipe, dataset, device)[0],
        augment=recipe.data.augment,
        memory_format=torch.channels_last if last else torch.contiguous_format,
    )


def padded_layout(
    recipe: Recipe,
    model: nn.Module,
    dataset: Dataset,
    device: torch.device,
    *,
    on_host: bool = False,
    bucket: int | None = None,
) -> PaddedLayout:
    """Texts padded to the longest of their micro-batch.

    Args:
        on_host: whatever the recipe says; for a layout that serves a comparison only.
        bucket: what widths are multiples of, whatever the recipe says.
    """
    tokens = dataset.inputs
    assert isinstance(tokens, Tokens)
    if recipe.data.augment.any:
        raise RecipeError("data.augment: has no effect", "it changes images, and the data are texts", "leave it out")
    if recipe.data.normalise != "own":
        raise RecipeError("data.normalise: has no effect", "it is of images, and the data are texts", "leave it out")
    return PaddedLayout(
        tokens,
        dataset.labels,
        device,
        token_types=_takes_token_types(model),
        all_types=_tells_types_from_none(model),
        bucket=bucket or recipe.data.pad_to_multiple_of or (PADDED_BUCKET if _repeats(recipe) else 1),
        resident=not on_host and resident(recipe, dataset, device)[0],
        masked=not is_gpu(device) or _asks_for_masks(recipe, model),
    )


def packed_layout(
    recipe: Recipe, model: nn.Module, dataset: Dataset, device: torch.device, *, first_position: int
) -> PackedLayout:
    """Texts one after the other in a row."""
    tokens = dataset.inputs
    assert isinstance(tokens, Tokens)
    # matrix products like multiples of 8; a CPU does not care
    bucket = 1 if device.type == "cpu" else 8
    if _repeats(recipe):
        loop, trained = recipe.loop, dataset.splits.get("train", np.arange(len(dataset)))
        samples = loop.micro_batch_size or loop.batch_size
        steps = min(loop.max_steps or sys.maxsize, loop.epochs * -(-len(trained) // loop.batch_size))
        bucket = bucket_for(tokens.lengths[trained], samples, steps * -(-loop.batch_size // samples))
    bucket = recipe.data.pad_to_multiple_of or bucket
    return PackedLayout(
        tokens,
        dataset.labels,
        device,
        token_types=_takes_token_types(model),
        all_types=_tells_types_from_none(model),
        first_position=first_position,
        bucket=bucket,
        resident=resident(recipe, dataset, device)[0],
    )


def resident(recipe: Recipe, dataset: Dataset, device: torch.device) -> tuple[bool, tuple[Decision, ...]]:
    """Whether all samples are kept on the device, and the decision where it was open."""
    wish = recipe.data.resident
    if wish != "auto" or device.type == "cpu":
        return wish is True, ()
    size = resident_bytes(dataset.inputs)
    room = RESIDENT_SHARE * memory_bytes(device)
    fits = size <= room
    reason = f"all samples take {size / 2**20:,.0f} MiB, a tenth of the GPU's memory is {room / 2**20:,.0f}"
    return fits, (Decision(setting="data.resident", value=str(fits).lower(), reason=reason),)


def _repeats(recipe: Recipe) -> bool:
    """Whether a shape that came before is cheaper than another: graphs and compiled code are made for shapes."""
    return recipe.techniques.capture is True or recipe.techniques.compile is True


def _asks_for_masks(recipe: Recipe, model: nn.Module) -> bool:
    """Whether the model has to be given a mask that masks nothing; what a user's own does without is not known."""
    mask = inspect.signature(model.forward).parameters.get("attention_mask")
    return bool(recipe.model.factory) or (mask is not None and mask.default is mask.empty)


def _takes_token_types(model: nn.Module) -> bool:
    return "token_type_ids" in inspect.signature(model.forward).parameters


def _tells_types_from_none(model: nn.Module) -> bool:
    """Whether token types of 0 are not the same as none to this model.

    A table of types is read at 0 where none are given (BERT and its kin). GPT-2 looks types up among its tokens, XLNet
    adds what it adds to a pair: these have no table, and take none for nothing.
    """
    return not getattr(getattr(model, "config", None), "type_vocab_size", None)
