"""What a model is, read from recipes and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import ModelError
from paceline.models.config import checkpoint_labels, max_positions, modality, read_config
from paceline.recipe.parts import ModelPart
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config, tiny_vit_config


def folder_with(tmp_path: Path, **settings: object) -> ModelPart:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return ModelPart(source=str(tmp_path))


def test_overrides_are_put_into_a_folders_configuration(tmp_path: Path) -> None:
    part = folder_with(tmp_path, **tiny_bert_config())
    changed = part.model_copy(update={"config": {"hidden_dropout_prob": 0.3, "attn_implementation": "eager"}})
    config = read_config(changed)
    assert config is not None
    assert (config.hidden_dropout_prob, config._attn_implementation, config.hidden_size) == (0.3, "eager", 16)


def test_a_factory_has_no_configuration() -> None:
    part = ModelPart(factory="nets:build")
    assert read_config(part) is None
    assert modality(part, None) == "any"
    assert max_positions(None) is None


@pytest.mark.parametrize("with_source", [True, False])
def test_an_unknown_setting_names_the_nearest(tmp_path: Path, with_source: bool) -> None:
    part = ModelPart(config=tiny_bert_config(hidden_sise=8))
    if with_source:
        part = folder_with(tmp_path, **tiny_bert_config()).model_copy(update={"config": {"hidden_sise": 8}})
    with pytest.raises(ModelError, match=r"model.config.hidden_sise = 8.*\n.*'hidden_size'"):
        read_config(part)


def test_settings_that_follow_from_elsewhere_are_refused() -> None:
    with pytest.raises(ModelError, match=r"num_labels: follows from the data"):
        read_config(ModelPart(config=tiny_bert_config(num_labels=5)))
    with pytest.raises(ModelError, match=r"dtype.*\n.*\n.*techniques.precision"):
        read_config(ModelPart(config=tiny_bert_config(dtype="bfloat16")))


def test_a_value_of_the_wrong_type_is_refused_before_the_model_is_built() -> None:
    with pytest.raises(ModelError, match="hidden_size"):
        read_config(ModelPart(config=tiny_bert_config(hidden_size="wide")))


def test_an_unknown_model_type_names_the_nearest() -> None:
    with pytest.raises(ModelError, match="did you mean 'distilbert'"):
        read_config(ModelPart(config={"model_type": "distilbret"}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "secret", "auto_map": {"AutoConfig": "c.C"}}, "model.trust_remote_code=true"),
        ({"model_type": "berd"}, "unknown to this transformers"),
        ({"hidden_size": 4}, "names no model_type"),
        ({**tiny_bert_config(), "quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({**tiny_bert_config(), "attn_implementation": "someone/kernel"}, "model.trust_remote_code is off"),
    ],
)
def test_what_a_folder_asks_for_and_cannot_have(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(folder_with(tmp_path, **settings))


@pytest.mark.parametrize("inner", ["model", "snapshots/0123abc", "checkpoint-500"])
def test_a_folder_above_a_model_is_answered_with_the_model(tmp_path: Path, inner: str) -> None:
    (tmp_path / inner).mkdir(parents=True)
    (tmp_path / inner / "config.json").write_text(json.dumps(tiny_bert_config()))
    with pytest.raises(ModelError, match=r"has no config\.json") as caught:
        read_config(ModelPart(source=str(tmp_path)))
    setting, _, source = caught.value.fix.partition("=")
    assert setting == "--set model.source"
    assert getattr(read_config(ModelPart(source=source)), "model_type", "") == "bert"


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json"):
        read_config(ModelPart(source=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_config(ModelPart(source=str(tmp_path)))


def test_a_path_that_is_not_there_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "minilm").mkdir()
    with pytest.raises(ModelError, match=r"no such folder\n.*did you mean 'minilm'"):
        read_config(ModelPart(source=str(tmp_path / "minlm")))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file"):
        read_config(ModelPart(source=str(tmp_path / "model.safetensors")))


@pytest.mark.parametrize(
    ("settings", "what", "positions"),
    [
        (tiny_bert_config(), "text", 64),
        (tiny_bert_config(model_type="roberta"), "text", 62),
        (tiny_bert_config(model_type="xlm-roberta", max_position_embeddings=514), "text", 512),
        (tiny_bert_config(model_type="mpnet", max_position_embeddings=514), "text", 512),
        ({"model_type": "modernbert"}, "text", 8192),
        ({"model_type": "deberta-v2", "relative_attention": True, "position_biased_input": False}, "text", None),
        ({"model_type": "deberta-v2"}, "text", 512),
        ({"model_type": "gpt2", "n_positions": 128}, "text", 128),
        ({"model_type": "t5"}, "text", None),
        (tiny_vit_config(), "image", None),
        (tiny_resnet_config(), "image", None),
    ],
)
def test_modality_and_positions(settings: dict[str, object], what: str, positions: int | None) -> None:
    part = ModelPart(config=settings)
    config = read_config(part)
    assert (modality(part, config), max_positions(config)) == (what, positions)


def test_a_model_that_cannot_classify_is_refused() -> None:
    part = ModelPart(config={"model_type": "whisper"})
    with pytest.raises(ModelError, match="model_type = whisper: cannot classify"):
        modality(part, read_config(part))


def test_a_configuration_that_is_nested_too_deeply_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config.json: not JSON\n.*nested too deeply"):
        read_config(ModelPart(source=str(tmp_path)))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"architectures": ["BertForSequenceClassification"]}, ("LABEL_0", "LABEL_1")),
        ({"architectures": ["BertForMaskedLM"]}, ()),
        ({"architectures": ["BertModel"], "id2label": {"0": "a", "1": "b"}}, ()),
        ({"id2label": {"0": "a", "1": "b"}}, ("a", "b")),
        ({}, ()),
        (
            {"architectures": ["BertForSequenceClassification"], "id2label": {str(n): f"c{n}" for n in range(11)}},
            tuple(f"c{n}" for n in range(11)),
        ),
    ],
)
def test_classes_are_those_of_a_head_that_is_there(
    tmp_path: Path, written: dict[str, Any], expected: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **written}))
    part = ModelPart(source=str(tmp_path))
    assert checkpoint_labels(part, read_config(part)) == expected
    assert checkpoint_labels(ModelPart(config={"model_type": "bert"}), read_config(part)) == ()


@pytest.mark.parametrize("content", ["[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}", '{"a": ' * 100_000])
def test_a_configuration_that_python_cannot_read_is_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match="not JSON"):
        read_config(ModelPart(source=str(tmp_path)))
