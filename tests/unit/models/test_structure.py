"""Blocks and heads of every family that is supported, and which parameters are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.contract.errors import ModelError
from paceline.models.config import modality, read_config
from paceline.models.load import load_model
from paceline.models.structure import blocks, final_linear, head_names, linear_layers, set_trained
from paceline.recipe.parts import ModelPart
from tests.testing.tiny import tiny_bert_config, tiny_distilbert_config, tiny_resnet_config, tiny_vit_config

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}

FAMILIES: dict[str, tuple[dict[str, Any], int, str]] = {
    "bert": ({}, 3, "bert.encoder.layer.2"),
    "distilbert": ({"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32}, 3, "distilbert.transformer.layer.2"),
    "roberta": ({}, 3, "roberta.encoder.layer.2"),
    "xlm-roberta": ({}, 3, "roberta.encoder.layer.2"),
    "electra": ({"embedding_size": 8}, 3, "electra.encoder.layer.2"),
    "deberta-v2": ({"relative_attention": True, "norm_rel_ebd": "layer_norm"}, 3, "deberta.encoder.layer.2"),
    "modernbert": ({}, 3, "model.layers.2"),
    "mpnet": ({}, 3, "mpnet.encoder.layer.2"),
    "albert": ({"embedding_size": 8}, 1, "albert.encoder.albert_layer_groups.0.albert_layers.0"),
    "mobilebert": ({}, 3, "mobilebert.encoder.layer.2"),
    "gpt2": ({"n_embd": 16, "n_layer": 3, "n_head": 2}, 3, "transformer.h.2"),
    "vit": ({"patch_size": 4}, 3, "vit.layers.2"),
    "swin": ({"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2, "patch_size": 2}, 4, ""),
    "convnext": ({"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2}, 4, ""),
}
OWN_NAMES = {"distilbert", "gpt2", "swin", "convnext"}


def build(settings: dict[str, Any], num_labels: int = 3) -> nn.Module:
    part = ModelPart(config=settings)
    config = read_config(part)
    is_image = modality(part, config) == "image"
    return load_model(
        part,
        config,
        num_labels=num_labels,
        label_names=[str(label) for label in range(num_labels)],
        kind="classification",
        vocabulary_size=None if is_image else 100,
        pad_id=None if is_image else 0,
        image_shape=(8, 8, 3) if is_image else None,
    )


old_deberta = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
"""transformers 5.17 compiles parts of DeBERTa in a way that newer torch frowns upon."""


@old_deberta
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_head_and_final_layer_of(family: str) -> None:
    changes, number, last = FAMILIES[family]
    model = build({"model_type": family, **({} if family in OWN_NAMES else SMALL), **changes})
    found = blocks(model)
    assert len(found) == number
    assert len({type(block) for _, block in found}) == 1
    assert all(model.get_submodule(name) is block for name, block in found)
    if last:
        assert found[-1][0] == last
    head = head_names(model)
    final = final_linear(model, 3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert names[id(final.weight)] == [name for name in head if name.endswith("weight")][-1]
    assert not any(name.startswith(block) for name in head for block, _ in found)


@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
def test_blocks_of_a_resnet_are_its_residual_blocks_not_its_stages(layer_type: str) -> None:
    model = build(tiny_resnet_config(layer_type=layer_type, depths=[3, 2]))
    assert [name for name, _ in blocks(model)] == [
        *(f"resnet.encoder.stages.0.layers.{index}" for index in range(3)),
        *(f"resnet.encoder.stages.1.layers.{index}" for index in range(2)),
    ]


def test_blocks_of_a_users_module_are_found_by_shape() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    net = nn.Sequential(nn.Linear(2, 4), nn.Sequential(Block(), Block()), nn.Linear(4, 3))
    assert [name for name, _ in blocks(net)] == ["1.0", "1.1"]
    assert head_names(net) == ["2.weight", "2.bias"]
    assert set_trained(net, "last:1") == [name for name, _ in net.named_parameters() if name.startswith(("1.1.", "2."))]
    assert blocks(nn.Linear(2, 2)) == []


def test_all_trains_everything_again_after_head() -> None:
    model = build(tiny_bert_config())
    assert set_trained(model, "head") == ["classifier.weight", "classifier.bias"]
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == head_names(model)
    assert len(set_trained(model, "all")) == len(list(model.parameters()))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert set_trained(model, "features") == []
    assert not any(parameter.requires_grad for parameter in model.parameters())


@old_deberta
def test_last_trains_the_blocks_and_what_follows_but_no_embeddings() -> None:
    trained = set_trained(build(tiny_bert_config()), "last:1")
    assert {name.split(".")[1] if name.startswith("bert") else "head" for name in trained} == {
        "encoder",
        "pooler",
        "head",
    }
    assert not any(".layer.0." in name or "embeddings" in name for name in trained)
    assert "vit.layernorm.weight" in set_trained(build(tiny_vit_config()), "last:1")
    deberta = build({"model_type": "deberta-v2", **SMALL, "relative_attention": True})
    assert "deberta.encoder.rel_embeddings.weight" not in set_trained(deberta, "last:2")


def test_only_what_is_trained_gets_a_gradient() -> None:
    model = build(tiny_distilbert_config())
    trained = set_trained(model, "last:1")
    tokens = torch.arange(12).view(2, 6)
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits.square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == trained


def test_more_blocks_than_there_are() -> None:
    with pytest.raises(ModelError, match=r"last:3.*\n.*it has 2\n.*last:2"):
        set_trained(build(tiny_bert_config()), "last:3")
    with pytest.raises(ModelError, match="share the weights of one block"):
        set_trained(build({"model_type": "albert", **SMALL, "embedding_size": 8}), "last:2")
    with pytest.raises(ModelError, match=r"model.train=head"):
        set_trained(nn.Linear(2, 2), "last:1")


def test_freezing_leaves_the_modes_of_modules_alone() -> None:
    model = build(tiny_resnet_config()).train()
    set_trained(model, "head")
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: build(tiny_bert_config()), r"has no linear layer with 7 outputs outside its base model \(bert\)"),
        (lambda: nn.Linear(4, 2), "Linear has no linear layer with 7 outputs\n"),
        (lambda: inside(), r"outside its base model \(base\)"),
    ],
)
def test_no_final_linear_layer_is_an_error_whose_way_on_works(model: Callable[[], nn.Module], words: str) -> None:
    made = model()
    with pytest.raises(ModelError, match=words) as found:
        final_linear(made, 7)
    assert found.value.what.startswith("model.train = features: ")
    assert set_trained(made, found.value.fix.partition("=")[2])


def inside() -> nn.Module:
    """A model whose layer of logits is in its base model, as Perceiver's is."""
    model = nn.Module()
    model.base_model_prefix = "base"  # type: ignore[assignment]
    model.base = nn.Sequential(nn.Linear(4, 7))
    return model


def of_family(kind: str) -> nn.Module:
    return build({"model_type": kind, **({} if kind in OWN_NAMES else SMALL), **FAMILIES[kind][0]})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("bert", {"query", "key", "value", "dense"}),
        ("distilbert", {"q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"}),
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
        ("convnext", {"pwconv1", "pwconv2"}),
        ("vit", {"q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"}),
    ],
)
def test_linear_layers_of_the_blocks_take_adapters(kind: str, expected: set[str]) -> None:
    model = of_family(kind)
    found = linear_layers(model)
    assert {name.rpartition(".")[2] for name in found} == expected
    inside = tuple(f"{name}." for name, _ in blocks(model))
    assert all(name.startswith(inside) for name in found)


def test_named_layers_take_adapters_wherever_they_are_but_for_the_head() -> None:
    model = of_family("roberta")
    found = linear_layers(model, ["value", "dense"])
    assert {name.rpartition(".")[2] for name in found} == {"value", "dense"}
    assert not any(name.startswith("classifier") for name in found), "the head is trained in full"
    assert linear_layers(model, ["layer.1.output.dense"]) == ["roberta.encoder.layer.1.output.dense"]


def test_a_model_without_linear_layers_takes_no_adapters() -> None:
    with pytest.raises(ModelError, match="no linear layers in its blocks") as caught:
        linear_layers(build(tiny_resnet_config()))
    assert "model.train=head" in caught.value.fix


@pytest.mark.parametrize("target", ["q_lim", "LayerNorm", "classifier"])
def test_a_name_that_no_linear_layer_has_is_refused(target: str) -> None:
    with pytest.raises(ModelError, match=f"no linear layer {target}") as caught:
        linear_layers(of_family("distilbert"), ["v_lin", target])
    assert "q_lin" in caught.value.why


def test_layers_whose_weights_torch_reads_past_them_take_no_adapters() -> None:
    """In evaluation TransformerEncoderLayer hands the weights of its layers to one fused kernel."""
    model = nn.Sequential(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), nn.Linear(8, 2)
    )
    with pytest.raises(ModelError, match="no linear layers in its blocks"):
        linear_layers(model)
