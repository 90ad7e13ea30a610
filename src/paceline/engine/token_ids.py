"""Whether a model has an embedding for every token of its data: on a GPU a missing one is an assert without a name."""

from __future__ import annotations

import numpy as np
from torch import nn

from paceline.data.dataset import Dataset, Tokens
from paceline.errors import ModelError
from paceline.models.structure import input_embeddings
from paceline.recipe import Recipe


def check_token_ids(recipe: Recipe, model: nn.Module, dataset: Dataset) -> None:
    """Compare the largest token id of a data set with the model's input embeddings: one pass over the tokens.

    Ids are unsigned, so that none is too small. A model that does not say where its embeddings are is let through.

    Raises:
        ModelError: an id has no embedding; names the sample, the tokenizer and the model.
    """
    table, tokens = input_embeddings(model), dataset.inputs
    if table is None or not isinstance(tokens, Tokens):
        return
    largest = int(tokens.flat.max(initial=0))
    if max(largest, tokens.pad_id) < len(table):
        return
    if largest < len(table):
        found = f"the filling between samples is token id {tokens.pad_id:,} "
    else:
        sample = int(np.searchsorted(tokens.offsets, int(tokens.flat.argmax()), side="right")) - 1
        found = f"{dataset.origins.of(sample)}: is encoded with token id {largest:,} "
    raise ModelError(
        f"{found}that the model has no embedding for",
        f"{_tokenizer(recipe)}, and {_model(recipe)} has {len(table):,} token embeddings, ids 0 to {len(table) - 1:,}",
        f"--set data.random.vocabulary={len(table)}"
        if recipe.data.source == "builtin:random"
        else "use the tokenizer that the model was made with, or a whole copy of it",
    )


def _tokenizer(recipe: Recipe) -> str:
    if recipe.data.source == "builtin:random":
        return f"data.random.vocabulary = {recipe.data.random.vocabulary}"
    return f"model.tokenizer = {recipe.model.tokenizer}"


def _model(recipe: Recipe) -> str:
    part = recipe.model
    if part.factory:
        return f"model.factory = {part.factory}"
    return f"model.source = {part.source}" if part.source else "the model of model.config"
