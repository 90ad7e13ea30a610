"""Whether a model has an embedding for every token of its data: on a GPU a missing one is an assert without a name."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from paceline.contract.errors import ModelError, excerpt
from paceline.contract.label_names import listed
from paceline.data.dataset import Dataset, Tokens
from paceline.models.structure import input_embeddings
from paceline.recipe import Recipe


def unused_tokens(recipe: Recipe, model: nn.Module, dataset: Dataset, tokenizer: Any) -> str:
    """Return a notice where a tokenizer has tokens without an embedding and no sample has one of them; else "".

    Tokens are added to a tokenizer, for filling as a rule, and the model's embeddings forgotten.

    Args:
        tokenizer: that the samples are encoded with; None: they are images or bare tokens.

    Raises:
        ModelError: a sample has one; names the token, the sample and both sizes.
    """
    table = input_embeddings(model)
    if tokenizer is None or table is None or len(tokenizer) <= len(table):
        return ""
    check_token_ids(recipe, model, dataset.each_window(), tokenizer)
    others = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= len(table))
    names = listed([excerpt(token, 40) for _, token in others], 5)
    sizes = f"the tokenizer has {len(tokenizer):,} tokens, and the model {len(table):,} token embeddings"
    return f"{sizes}: no text has one of the others ({names})"


def check_token_ids(recipe: Recipe, model: nn.Module, dataset: Dataset, tokenizer: Any = None) -> None:
    """Compare the largest token id of a data set with the model's input embeddings: one pass over the tokens.

    Ids are unsigned, so that none is too small. A model that does not say where its embeddings are is let through.

    Args:
        tokenizer: that names the token, where there is one.

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
        if tokenizer is not None:
            raise _no_embedding(recipe, dataset.origins.of(sample), largest, tokenizer, len(table))
    raise ModelError(
        f"{found}that the model has no embedding for",
        f"{_tokenizer(recipe)}, and {_model(recipe)} has {len(table):,} token embeddings, ids 0 to {len(table) - 1:,}",
        f"--set data.random.vocabulary={len(table)}"
        if recipe.data.source == "builtin:random"
        else "use the tokenizer that the model was made with, or a whole copy of it",
    )


def _no_embedding(recipe: Recipe, place: str, number: int, tokenizer: Any, rows: int) -> ModelError:
    """The error of a text with a token that the tokenizer has and the model has not."""
    size = max(len(tokenizer), number + 1)
    resized = f"model.resize_token_embeddings({size}) in transformers, save the model, and train on that"
    return ModelError(
        f"{place}: has the token {excerpt(str(tokenizer.convert_ids_to_tokens(number)))} (id {number:,}), for which the"
        " model has no embedding",
        f"its tokenizer has {len(tokenizer):,} tokens, and {_model(recipe)} has {rows:,} token embeddings",
        f"give the model of model.factory {size:,} embeddings"
        if recipe.model.factory
        else f"remove the token from the texts; or {resized}",
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
