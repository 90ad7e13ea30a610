"""Models that ranks cannot share are refused before there are ranks: by their configuration, without a weight."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import RecipeError
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config, tiny_vit_config

TEXTS = {"source": "builtin:random", "random": {"samples": 16, "vocabulary": 200, "length": 8}}
IMAGES = {"source": "builtin:digits"}

ALBERT = tiny_bert_config(model_type="albert", embedding_size=16)
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}

NETS = '''
from torch import nn

class Net(nn.Module):
    def __init__(self, num_labels):
        super().__init__()
        self.embed = nn.Embedding(200, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.head = nn.Linear(8, num_labels)
    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))

def tied(num_labels):
    net = Net(num_labels)
    net.blocks[3][0].weight = net.blocks[0][0].weight
    return net

def flat(num_labels):
    net = Net(num_labels)
    net.blocks = nn.ModuleList()
    return net

def looking(num_labels):
    """Asks for a number, which a model without memory has none of."""
    net = Net(num_labels)
    net.embed.register_forward_hook(lambda module, given, out: out if out.sum().item() else out)
    return net
'''


def model(given: Any, **parallel: Any) -> Recipe:
    by = {"factory": given} if isinstance(given, str) else {"config": given}
    data = IMAGES if isinstance(given, dict) and given["model_type"] in ("resnet", "vit") else TEXTS
    return Recipe.parse({"device": "cpu", "model": by, "data": data, "loop": {"batch_size": 8}, "parallel": parallel})


@pytest.fixture(scope="module")
def beside(predictor: Predictor, models_beside: Path) -> Predictor:
    """Can import models of one's own."""
    (models_beside / "nets_to_cut.py").write_text(NETS)
    return predictor


REFUSED: dict[str, tuple[Any, dict[str, Any], int, str]] = {
    "fewer blocks than stages": (
        tiny_bert_config(),
        {"pipeline": 4},
        4,
        r"2 blocks, and each of 4 stages.*fix: --set parallel\.pipeline=2$",
    ),
    "two stages a process": (
        tiny_bert_config(),
        {"pipeline": 2, "schedule": "interleaved"},
        2,
        r"2 blocks, and each of 4 stages.*fix: --set parallel\.schedule=1f1b",
    ),
    "one block many times": (ALBERT, {"pipeline": 2}, 2, r"1 block, and each of 2 stages.*parallel\.pipeline=1"),
    "batch norms": (tiny_resnet_config(), {"pipeline": 2}, 2, r"batch norms \(resnet.*parallel\.pipeline=1"),
    "more ranks than heads": (
        tiny_bert_config(),
        {"tensor": 4},
        4,
        r"2 attention heads, which are no multiple of 4.*fix: --set parallel\.tensor=2$",
    ),
    "heads that divide, but not among these processes": (
        tiny_vit_config(hidden_size=24, intermediate_size=48, num_attention_heads=6),
        {"tensor": 4},
        4,
        r"6 attention heads, which are no multiple of 4.*fix: --set parallel\.tensor=2$",
    ),
    "products that are no linear layers": (GPT2, {"tensor": 2}, 2, r"GPT2Block.*not an attention.*parallel\.tensor=1"),
}


@pytest.mark.parametrize(("given", "parallel", "ranks", "told"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_cut_is_refused(
    given: Any, parallel: dict[str, Any], ranks: int, told: str, predictor: Predictor
) -> None:
    with pytest.raises(RecipeError) as refused:
        predictor.require_cut(model(given, **parallel), ranks)
    assert re.search(told, str(refused.value), re.DOTALL), refused.value


@pytest.mark.parametrize(
    ("name", "parallel", "told"),
    [
        ("tied", {"pipeline": 2}, r"blocks\.0\.0\.weight and blocks\.3\.0\.weight are one weight, of stages 1 and 2"),
        ("flat", {"pipeline": 2}, r"no repeated blocks were found.*parallel\.pipeline=1"),
        ("flat", {"tensor": 2}, r"no repeated blocks were found.*parallel\.tensor=1"),
    ],
)
def test_a_model_of_ones_own_is_refused(name: str, parallel: dict[str, Any], told: str, beside: Predictor) -> None:
    with pytest.raises(RecipeError) as refused:
        beside.require_cut(model(f"nets_to_cut:{name}", **parallel), 2)
    assert re.search(told, str(refused.value), re.DOTALL), refused.value


@pytest.mark.parametrize(
    ("given", "parallel", "ranks"),
    [
        (tiny_bert_config(), {"pipeline": 2}, 4),
        (tiny_bert_config(), {"tensor": 2}, 4),
        (tiny_vit_config(), {"tensor": 2}, 2),
        ("nets_to_cut:Net", {"pipeline": 4}, 4),
        # what is not known without numbers is left to the ranks
        ("nets_to_cut:looking", {"pipeline": 2}, 2),
    ],
)
def test_a_model_that_can_be_cut_is_not_refused(
    given: Any, parallel: dict[str, Any], ranks: int, beside: Predictor
) -> None:
    beside.require_cut(model(given, **parallel), ranks)


def test_what_else_is_wrong_is_left_to_the_ranks(predictor: Predictor) -> None:
    predictor.require_cut(model(tiny_bert_config(hidden_size=15), tensor=2), 2)
    with_factory = model("no_such_module:net", tensor=2)
    predictor.require_cut(with_factory, 2)
