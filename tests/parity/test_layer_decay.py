"""Layer decay is AdamW over one group a parameter, each with the rate that its depth gives it, worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from paceline.contract.errors import RecipeError
from paceline.models.structure import blocks
from paceline.optim.layer_decay import rate_factors
from paceline.optim.optimizer import parameter_groups
from paceline.recipe import Recipe
from paceline.recipe.parts import GroupPart, OptimizerPart, SchedulePart
from paceline.seams import Alone, World
from tests.distributed import splitting
from tests.parity.cards import run_example
from tests.parity.driving import assembled, assert_same_bits, recipe, train
from tests.parity.reference import tiny_model, train_by_hand
from tests.testing.distributed import run_distributed

DECAY = 0.8
BY_HAND = {"distilbert.embeddings.": DECAY**3, "distilbert.transformer.layer.0.": DECAY**2}
BY_HAND |= {"distilbert.transformer.layer.1.": DECAY, "pre_classifier.": 1.0, "classifier.": 1.0}


def by_hand(name: str) -> float:
    return next(factor for start, factor in BY_HAND.items() if name.startswith(start))


def hand_written(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": lr * by_hand(name)} for name, p in model.named_parameters()]
    return torch.optim.AdamW(groups, weight_decay=0.01)


def test_a_run_equals_a_hand_written_loop_bit_for_bit() -> None:
    chosen = recipe(optimizer={"layer_decay": DECAY})
    ours, theirs = tiny_model(), tiny_model()
    losses = train(assembled(ours, chosen), chosen)
    assert losses == train_by_hand(theirs, make_optimizer=hand_written)
    assert_same_bits(ours, theirs)
    plain = recipe()
    assert losses != train(assembled(tiny_model(), plain), plain)


def test_bert_as_electra_and_beit_have_it() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30}
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=3, **sizes))
    found = rate_factors(model, [block for _, block in blocks(model)], 0.5)
    depth = {"bert.embeddings": 4, "encoder.layer.0": 3, "encoder.layer.1": 2, "encoder.layer.2": 1}
    for name, factor in found.items():
        assert factor == 0.5 ** next((d for part, d in depth.items() if part in name), 0), name


def test_of_an_image_model_the_patches_and_positions_are_embeddings_and_the_last_norm_is_the_heads() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 8, "patch_size": 4}
    model = ViTForImageClassification(ViTConfig(num_hidden_layers=2, **sizes))
    found = rate_factors(model, [block for _, block in blocks(model)], 0.5)
    assert {found[name] for name in found if ".embeddings." in name} == {0.5**3}
    assert found["vit.layernorm.weight"] == found["classifier.weight"] == 1.0


def test_what_lies_between_blocks_counts_to_the_one_before_and_tables_to_the_embeddings() -> None:
    inner = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.Embedding(3, 2)])
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "body": inner, "head": nn.Linear(2, 2)})
    found = rate_factors(model, [inner[0], inner[2]], 0.1)
    expected = {"stem": 3, "body.0": 2, "body.1": 2, "body.2": 1, "body.3": 3, "head": 0}
    assert {name.rpartition(".")[0]: pytest.approx(factor) for name, factor in found.items()} == {
        name: 0.1**depth for name, depth in expected.items()
    }


def test_a_groups_own_rate_wins_and_its_other_settings_do_not() -> None:
    model = tiny_model()
    part = OptimizerPart(
        lr=1.0, groups=(GroupPart(match="*layer.0.*", lr=0.5), GroupPart(match="*layer.1.*", weight_decay=0.0))
    )
    factors = rate_factors(model, model.distilbert.transformer.layer, DECAY)
    found = parameter_groups(list(model.named_parameters()), part, SchedulePart(), frozenset(), factors)
    rates = {name: group.lr for group in found for name, p in model.named_parameters() if p in set(group.parameters)}
    assert {rate for name, rate in rates.items() if "layer.0." in name} == {0.5}
    assert {rate for name, rate in rates.items() if "layer.1." in name} == {DECAY}
    assert {rate for name, rate in rates.items() if "embeddings" in name} == {DECAY**3}
    assert [group.name for group in found][-4:] == [
        "rest",
        "rest (no decay)",
        "rest x 0.512",
        "rest x 0.512 (no decay)",
    ]
    assert sum(len(group.parameters) for group in found) == len(rates)


@pytest.mark.parametrize("value", [1.0, 0.0, 1.2, -0.5])
def test_values_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(RecipeError, match=r"optimizer\.layer_decay"):
        Recipe.parse({"model": {"source": "any"}, "optimizer": {"layer_decay": value}})


def test_a_model_without_blocks_is_refused() -> None:
    model = tiny_model()
    model.distilbert.transformer.layer, kept = nn.ModuleList(), model.distilbert.transformer.layer
    assert len(kept) == 2
    with pytest.raises(RecipeError, match="no repeated blocks were found in DistilBert"):
        assembled(model, recipe(optimizer={"layer_decay": 0.9}))


def over_ranks(world: World, strategy: str) -> float:
    """How far weights are from those of one process after five steps; 0 where a rank has none of them."""
    optimizer = {"layer_decay": DECAY, "groups": [{"match": "classifier.*", "lr": 0.01}]}
    chosen = recipe(optimizer=optimizer, parallel={"strategy": strategy})
    ours, alone = splitting.assembled(world, chosen), splitting.assembled(Alone(), recipe(optimizer=optimizer))
    splitting.train(ours, chosen, world, 5)
    splitting.train(alone, chosen, Alone(), 5)
    found, expected = ours.engine.whole(), alone.engine.whole()
    return splitting.furthest(found, expected) if found else 0.0


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_give_what_one_gives(strategy: str) -> None:
    assert max(run_distributed(over_ranks, 2, strategy)) < 1e-6


def test_the_example_on_its_card() -> None:
    model = tiny_model()
    optimizer = run_example("layer_decay", model=model)["optimizer"]
    assert {round(group["lr"] / 5e-5, 6) for group in optimizer.param_groups} == {1.0, 0.9, 0.81, 0.729}
