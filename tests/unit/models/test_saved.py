"""Saved models: whole or absent, loadable in plain transformers, and nothing of them is executed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification, AutoTokenizer

from paceline.contract.errors import DiskFullError, ModelError
from paceline.models import saved as saved_module
from paceline.models.config import read_config
from paceline.models.images import ImageSettings, image_settings, preferred_size
from paceline.models.load import load_model
from paceline.models.saved import SavedModel, load_saved, on_host, read_saved, save_model, unwrapped
from paceline.models.tokenizers import tokenizer_source
from paceline.optim.flat import FlatLayout
from paceline.recipe.parts import ModelPart
from tests.testing.tiny import TEXTS, tiny_bert_config, tiny_vit_config

TEXT = SavedModel(label_names=("bad", "good"), kind="classification", modality="text", max_length=32)


def bert(seed: int = 0) -> tuple[Any, Any]:
    part = ModelPart(config=tiny_bert_config())
    config = read_config(part)
    tokenizer = tokenizer_source(part, config, None).get(TEXTS)
    model = load_model(
        part,
        config,
        num_labels=2,
        label_names=TEXT.label_names,
        kind="classification",
        vocabulary_size=len(tokenizer),
        pad_id=tokenizer.pad_token_id,
        seed=seed,
    )
    return model.eval(), tokenizer


def linear(num_labels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, num_labels))


def test_a_saved_text_model_is_the_same_in_plain_transformers(tmp_path: Path) -> None:
    model, tokenizer = bert()
    save_model(model, tokenizer, tmp_path / "model", TEXT)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    batch = AutoTokenizer.from_pretrained(tmp_path / "model")(list(TEXTS), padding=True, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(theirs(**batch).logits, model(**batch).logits)
    assert theirs.config.id2label == {0: "bad", 1: "good"}
    (tmp_path / "usual").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert modes == {(tmp_path / "usual").stat().st_mode}, "others cannot read the saved model"
    assert not any(path.suffix in (".bin", ".pt", ".pth", ".pkl") for path in (tmp_path / "model").iterdir())


def test_weights_in_a_flat_buffer_and_tied_ones_are_saved_as_ever(tmp_path: Path) -> None:
    model, tokenizer = bert()
    FlatLayout([list(model.parameters())]).move_in()
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    empty = {"floats": torch.empty(0), "whole": torch.empty(0, dtype=torch.int64)}
    state = on_host({**model.state_dict(), **tied.state_dict(), **empty})
    assert [state[name].dtype for name in empty] == [torch.float32, torch.int64]
    assert state["0.weight"] is state["1.weight"], "one weight of two names would be written twice"
    assert all(value.is_contiguous() for value in state.values())
    save_model(model, tokenizer, tmp_path / "model", TEXT)
    loaded = load_saved(tmp_path / "model").model.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert size < 1.5 * sum(value.nbytes for value in model.state_dict().values()), "each weight once"


def test_a_saved_model_is_read_back_whole(tmp_path: Path) -> None:
    model, tokenizer = bert()
    save_model(model, tokenizer, tmp_path / "model", TEXT)
    loaded = load_saved(tmp_path / "model")
    assert loaded.saved == TEXT
    assert loaded.tokenizer is not None
    assert loaded.tokenizer(TEXTS[0]) == tokenizer(TEXTS[0])
    assert not loaded.model.training
    assert all(torch.equal(value, loaded.model.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_saved_tokenizer_cuts_where_the_training_did(tmp_path: Path) -> None:
    model, tokenizer = bert()
    before = tokenizer.model_max_length
    save_model(model, tokenizer, tmp_path / "model", replace(TEXT, max_length=7))
    assert tokenizer.model_max_length == before != 7
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs.model_max_length == 7
    assert len(theirs("the " * 20, truncation=True)["input_ids"]) == 7


def test_saving_prints_nothing_and_leaves_nothing_beside_the_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = bert()
    for _ in range(2):
        save_model(model, tokenizer, tmp_path / "model", TEXT)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


def test_names_lose_what_wrappers_put_before_them(tmp_path: Path) -> None:
    model, tokenizer = bert()
    expected = set(model.state_dict())
    model.bert.encoder.layer[0] = torch.compile(model.bert.encoder.layer[0], backend="eager")
    assert set(model.state_dict()) != expected
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    save_model(wrapped, tokenizer, tmp_path / "model", TEXT)
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == expected
    assert unwrapped(wrapped) is model


def test_an_image_model_keeps_how_pixels_are_prepared(tmp_path: Path) -> None:
    part = ModelPart(config=tiny_vit_config())
    model = load_model(
        part, read_config(part), num_labels=2, label_names=("a", "b"), kind="classification", image_shape=(8, 8, 1)
    )
    image = image_settings(part, (8, 8, 1))
    assert image == ImageSettings(height=8, width=8, channels=1, mean=(0.5,), std=(0.5,))
    saved = SavedModel(label_names=("a", "b"), kind="classification", modality="image", image=image)
    save_model(model, None, tmp_path / "model", saved)
    loaded = load_saved(tmp_path / "model")
    assert (loaded.saved, loaded.tokenizer) == (saved, None)
    assert AutoModelForImageClassification.from_pretrained(tmp_path / "model").config.image_size == 8
    again = ModelPart(source=str(tmp_path / "model"))
    assert preferred_size(again, read_config(again)) == 8


def test_a_pretrained_models_mean_and_deviation_are_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "resnet"}))
    written = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"shortest_edge": 224}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    part = ModelPart(source=str(tmp_path))
    settings = image_settings(part, (32, 32, 3))
    assert (settings.mean, settings.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert image_settings(part, (32, 32, 1)).mean == pytest.approx((0.2,))
    assert preferred_size(part, read_config(part)) == 224


def test_a_factorys_module_is_only_built_by_the_function_the_caller_names(tmp_path: Path) -> None:
    reference = f"{__name__}:linear"
    saved = SavedModel(label_names=("a", "b", "c"), kind="classification", modality="image", factory=reference)
    model = linear(3)
    save_model(model, None, tmp_path / "model", saved)
    with pytest.raises(ModelError, match=r"was built by .*\n.*does not decide.*\n.*model.factory="):
        load_saved(tmp_path / "model")
    with pytest.raises(ModelError, match="not by os:system"):
        load_saved(tmp_path / "model", factory="os:system")
    found = load_saved(tmp_path / "model", factory=reference).model
    assert torch.equal(found.state_dict()["1.weight"], model.state_dict()["1.weight"])


def test_tied_weights_of_a_factorys_module_are_written_once_each(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    saved = SavedModel(label_names=("a",), kind="regression", modality="image", factory="nets:build")
    save_model(model, None, tmp_path / "model", saved)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(stored["0.weight"], stored["1.weight"])


@pytest.mark.parametrize("where", ["write", "first rename", "second rename"])
def test_a_save_that_is_cut_off_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    old, tokenizer = bert(seed=0)
    new, _ = bert(seed=1)
    folder = tmp_path / "model"
    save_model(old, tokenizer, folder, TEXT)
    rename = Path.rename
    done: list[Path] = []

    def cut_off(self: Path, target: Path) -> Path:
        done.append(self)
        if len(done) == {"first rename": 1, "second rename": 2}[where]:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        if where == "write":
            patch.setattr(saved_module, "_write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        else:
            patch.setattr(Path, "rename", cut_off)
        with pytest.raises(KeyboardInterrupt):
            save_model(new, tokenizer, folder, TEXT)
    found = load_saved(folder).model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in old.state_dict().items())
    save_model(new, tokenizer, folder, TEXT)
    assert torch.equal(load_saved(folder).model.state_dict()["classifier.weight"], new.classifier.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    model, tokenizer = bert()
    save_model(model, tokenizer, tmp_path / "model", TEXT)

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(DiskFullError, match="bytes needed"):
        save_model(model, tokenizer, tmp_path / "model", TEXT)
    assert load_saved(tmp_path / "model").saved == TEXT
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_is_wrong_with_a_saved_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model that paceline saved"):
        load_saved(tmp_path / "nothing")
    model, tokenizer = bert()
    folder = tmp_path / "model"
    save_model(model, tokenizer, folder, TEXT)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:500])
    with pytest.raises(ModelError, match="damaged"):
        load_saved(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model.safetensors is missing"):
        load_saved(folder)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded"):
        load_saved(folder)
    (folder / "paceline.json").write_text('{"kind": 3}')
    with pytest.raises(ModelError, match=r"paceline.json: cannot be used"):
        read_saved(folder)


def test_a_flipped_bit_of_the_weights_is_noticed_and_ones_own_weights_can_be_used(tmp_path: Path) -> None:
    """It loads as any other number: only a checksum tells."""
    model, tokenizer = bert()
    save_model(model, tokenizer, tmp_path / "model", TEXT)
    path, about = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "paceline.json"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"(?s)model.safetensors: is not what was saved.*SHA-256") as error:
        load_saved(tmp_path / "model")
    assert "take 'weights' out of paceline.json" in error.value.fix
    told = json.loads(about.read_text())
    del told["weights"]
    about.write_text(json.dumps(told))
    assert load_saved(tmp_path / "model").saved == TEXT, "what an earlier release saved is read too"


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("classification", {"thresholds": [0.3, 0.4]}),
        ("classification", {"label_names": ["a", "b", "c"], "thresholds": [0.3]}),
        ("multi_label", {"thresholds": [0.3]}),
        ("regression", {"thresholds": [0.3]}),
        ("classification", {"class_weights": [1.0]}),
        ("classification", {"class_weights": ["many", 1]}),
    ],
)
def test_numbers_that_are_not_of_its_labels_are_told(tmp_path: Path, kind: str, wrong: dict[str, Any]) -> None:
    found = {"label_names": ["a", "b"], "kind": kind, "modality": "text", "max_length": 8, "image": None}
    (tmp_path / "paceline.json").write_text(json.dumps({**found, "factory": None, **wrong}))
    with pytest.raises(ModelError, match=r"paceline.json: cannot be used"):
        read_saved(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "paceline.json"])
def test_a_file_that_is_nested_too_deeply_is_told(tmp_path: Path, name: str) -> None:
    save_model(*bert(), tmp_path / "model", TEXT)
    (tmp_path / "model" / name).write_text("[" * 100_000)
    with pytest.raises(ModelError, match=f"{name}(.|\n)*nested too deeply"):
        load_saved(tmp_path / "model")


@pytest.mark.parametrize("name", ["config.json", "paceline.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_or_a_folder_in_a_files_place_does_not_hang(tmp_path: Path, name: str) -> None:
    """Opening a pipe waits for somebody who writes into it."""
    save_model(*bert(), tmp_path / "model", TEXT)
    path = tmp_path / "model" / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match=f"{name}: is no regular file"):
        load_saved(tmp_path / "model")
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match=f"{name}: is no regular file"):
        load_saved(tmp_path / "model")
