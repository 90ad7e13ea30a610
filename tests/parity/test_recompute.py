"""Recomputed activations are the same activations, dropout included."""

from dataclasses import replace

import pytest
import torch

from paceline.contract.errors import RecipeError
from paceline.techniques import recompute
from paceline.techniques.recompute import apply_recompute
from tests.parity.driving import assembled, assert_same_bits, recipe, train
from tests.parity.reference import tiny_model


def test_recompute_changes_no_bit() -> None:
    plain, recomputed = recipe(), recipe(techniques={"recompute": True})
    one, other = tiny_model(dropout=0.2), tiny_model(dropout=0.2)
    assert train(assembled(one, plain), plain) == train(assembled(other, recomputed), recomputed)
    assert_same_bits(one, other)


def test_each_block_runs_twice_in_training_and_once_in_evaluation() -> None:
    model = tiny_model()
    calls = []
    for block in model.distilbert.transformer.layer:
        block.attention.register_forward_hook(lambda *_: calls.append(1))
    apply_recompute(list(model.distilbert.transformer.layer))
    inputs = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    model(**inputs).logits.sum().backward()
    assert len(calls) == 4
    calls.clear()
    with torch.no_grad():
        model(**inputs)
    assert len(calls) == 2


def test_a_recipe_that_asks_for_it_gets_it() -> None:
    chosen, model, calls = recipe(techniques={"recompute": True}), tiny_model(), list[int]()
    run = assembled(model, chosen)
    for block in run.build.blocks:
        block.attention.register_forward_hook(lambda *_: calls.append(1))
    train(run, chosen, steps=1)
    assert len(calls) == 2 * len(run.build.blocks)


def test_another_model_of_the_class_is_left_alone() -> None:
    model, other = tiny_model(), tiny_model()
    apply_recompute(list(model.distilbert.transformer.layer))
    assert "forward" not in vars(other.distilbert.transformer.layer[0])


def test_batch_normalisation_is_refused() -> None:
    """Its running statistics would be updated twice a step."""
    run = assembled(tiny_model(), recipe())
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(RecipeError, match="batch normalisation"):
        recompute.apply(replace(run.build, blocks=(block,)))
