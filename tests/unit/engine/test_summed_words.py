"""Where ranks sum only the rows of words that occur: on cards, of models whose words are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.engine.assemble import _summed_words
from paceline.errors import RecipeError
from tests.parity.driving import assembled, recipe
from tests.parity.reference import tiny_model

CARD = {"device": torch.device("cuda")}
CPU: dict[str, Any] = {"device": torch.device("cpu")}


@pytest.mark.parametrize(
    ("wish", "build", "model", "by_rows"),
    [
        ("auto", CARD, {}, True),
        ("auto", CPU, {}, False),
        ("auto", CARD, {"trust_remote_code": True}, False),
        ("auto", CARD, {"source": None, "factory": "models:made"}, False),
        (True, CPU, {}, True),
        (True, CARD, {"trust_remote_code": True}, True),
        (False, CARD, {}, False),
    ],
)
def test_rows_are_summed_where_they_are_known(
    wish: object, build: dict[str, Any], model: dict[str, Any], by_rows: bool
) -> None:
    made = assembled(tiny_model(), recipe()).build
    chosen = recipe(parallel={"sum_words": wish}, model=model)
    found = _summed_words(chosen, replace(made, **build))
    words = made.model.distilbert.embeddings.word_embeddings.weight
    assert found is (words if by_rows else None)


def test_what_was_asked_for_and_cannot_be_is_refused() -> None:
    made = assembled(tiny_model(), recipe()).build
    chosen = recipe(parallel={"sum_words": True}, model={"source": None, "factory": "models:made"})
    with pytest.raises(RecipeError, match="sum_words"):
        _summed_words(chosen, made)
