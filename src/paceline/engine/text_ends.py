"""Whether a model whose head reads a text at its end token finds as many of them in every text."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from paceline.data.dataset import Dataset, Tokens
from paceline.device import PLANNED
from paceline.engine.compared import as_it_is
from paceline.errors import ModelError
from paceline.seams import Forward, Layout
from paceline.techniques.packing import exactly


def check_text_ends(model: nn.Module, forward: Forward, layout: Layout, dataset: Dataset, device: torch.device) -> None:
    """Count the end tokens of each text; where they differ, see whether the model takes two such texts in a batch.

    BART, T5 and their kin read the last end token, and take no batch of texts that have not all as many of them.

    Raises:
        ModelError: it does not; names the first text that has not as many as most.
    """
    config, tokens = getattr(model, "config", None), dataset.inputs
    end = getattr(config, "eos_token_id", None)
    if not getattr(config, "is_encoder_decoder", False) or not isinstance(end, int):
        return
    if not isinstance(tokens, Tokens) or not len(tokens):
        return
    places = np.flatnonzero(tokens.flat == end)
    counts = np.bincount(np.searchsorted(tokens.offsets, places, side="right") - 1, minlength=len(tokens))
    usual = int(np.bincount(counts).argmax())
    others = np.flatnonzero(counts != usual)
    if device.type == PLANNED or (usual and not len(others)):
        return
    odd = int(others[0]) if len(others) else 0
    try:
        with exactly(device), torch.no_grad(), as_it_is(model):
            forward(model.eval(), layout.collate(np.array([np.flatnonzero(counts == usual)[0], odd])))
    except ModelError as error:
        if "eos" not in error.why and "0 elements" not in error.why:
            return  # about something else: the first step says it
        most = f", where most texts have {usual}" if len(others) else ", and no text has any"
        raise ModelError(
            f"{dataset.origins.of(odd)}: {_tokens(int(counts[odd]))} (id {end}){most}",
            f"a {type(model).__name__} reads a text at its last end token, and takes no batch in which their numbers"
            " differ or are 0",
            "take out of the text what the tokenizer reads as that token, such as </s>" if usual else _way_on(tokens),
        ) from error


def _way_on(tokens: Tokens) -> str:
    """What helps where the model's end token ends no text."""
    last = np.unique(tokens.flat[tokens.offsets[1:] - 1])
    if len(last) == 1:
        return f"--set model.config.eos_token_id={last[0]}, the token that ends every text here"
    return "use the tokenizer that the model was made with, which ends every text with that token"


def _tokens(count: int) -> str:
    return f"the text has {count} end token{'s' * (count != 1)}"
