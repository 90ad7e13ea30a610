"""Classifiers that were trained elsewhere: what is read off their files, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, ResNetConfig, ResNetForImageClassification

from paceline.contract.errors import ModelError
from paceline.models.pretrained import LONGEST, load_pretrained, names_a_model
from paceline.models.tokenizers import UNLIMITED, bert_tokenizer
from tests.testing.tiny import tiny_bert_config

VOCABULARY = {word: at for at, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "film", "dull"))}


def bert(folder: Path, model_max_length: int = UNLIMITED, **settings: Any) -> torch.nn.Module:
    plain = {key: value for key, value in tiny_bert_config().items() if key != "model_type"}
    model = BertForSequenceClassification(BertConfig(**plain | {"vocab_size": len(VOCABULARY), **settings})).eval()
    model.save_pretrained(folder)
    bert_tokenizer(VOCABULARY, model_max_length, True).save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("settings", "kind", "names"),
    [
        ({"id2label": {0: "bad", 1: "good"}}, "classification", ("bad", "good")),
        ({"num_labels": 3}, "classification", ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"num_labels": 1}, "regression", ("LABEL_0",)),
        ({"problem_type": "multi_label_classification"}, "multi_label", ("LABEL_0", "LABEL_1")),
        ({"problem_type": "regression", "id2label": {0: "stars"}}, "regression", ("stars",)),
    ],
)
def test_what_was_learned_is_read_off_the_configuration(
    tmp_path: Path, settings: dict[str, Any], kind: str, names: tuple[str, ...]
) -> None:
    model = bert(tmp_path, **settings)
    loaded = load_pretrained(tmp_path, pairs=False)
    assert (loaded.saved.kind, loaded.saved.label_names, loaded.saved.modality) == (kind, names, "text")
    assert not loaded.model.training
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name


@pytest.mark.parametrize(
    ("model_max_length", "positions", "expected"), [(20, 40, 20), (UNLIMITED, 40, 40), (60, 40, 40)]
)
def test_texts_are_cut_to_what_model_and_tokenizer_take(
    tmp_path: Path, model_max_length: int, positions: int, expected: int
) -> None:
    bert(tmp_path, model_max_length, max_position_embeddings=positions)
    assert load_pretrained(tmp_path, pairs=False).saved.max_length == expected


def test_without_any_limit_texts_are_cut_as_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bert(tmp_path)
    for module in ("pretrained", "tokenizers"):
        monkeypatch.setattr(f"paceline.models.{module}.max_positions", lambda _: None)
    assert load_pretrained(tmp_path, pairs=True).saved.max_length == LONGEST
    assert load_pretrained(tmp_path, pairs=True).saved.pairs


def test_an_image_model_brings_its_size(tmp_path: Path) -> None:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": 3}
    ResNetForImageClassification(ResNetConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="does not say what size"):
        load_pretrained(tmp_path, pairs=False)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 32}, "image_mean": [0.1, 0.2, 0.3]}')
    loaded = load_pretrained(tmp_path, pairs=False)
    assert loaded.saved.image is not None
    assert (loaded.saved.image.height, loaded.saved.image.channels) == (32, 3)
    assert loaded.saved.image.mean == pytest.approx((0.1, 0.2, 0.3), abs=1e-6)
    assert loaded.processor is not None, "its own processor is not used"
    assert (loaded.saved.modality, loaded.saved.max_length, loaded.tokenizer) == ("image", None, None)


def test_adapters_are_told_from_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "bert-base-uncased", "peft_type": "LORA"}'
    )
    assert names_a_model(tmp_path)
    with pytest.raises(ModelError, match=r"holds adapters .*\n.*bert-base-uncased\n.*--model bert-base-uncased"):
        load_pretrained(tmp_path, pairs=False)


@pytest.mark.parametrize("content", ["[]", "{", '{"base_model_name_or_path": 3}', "[" * 100_000, "\udcff"])
def test_a_damaged_configuration_of_adapters_is_still_one_of_adapters(tmp_path: Path, content: str) -> None:
    (tmp_path / "adapter_config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ModelError, match="holds adapters"):
        load_pretrained(tmp_path, pairs=False)


def test_pickled_weights_are_named(tmp_path: Path) -> None:
    bert(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="paceline convert"):
        load_pretrained(tmp_path, pairs=False)


def test_a_name_of_the_hub_is_none_where_a_folder_may_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    expected = {
        "owner/name": True,
        "runs/x": False,
        "runs": False,
        "x": True,
        "distilbert-base-uncased": True,
        "/a/b": False,
        "a/b/c": False,
    }
    assert {name: names_a_model(Path(name)) for name in expected} == expected
    assert names_a_model(Path("model"))
