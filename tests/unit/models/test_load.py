"""Models as they come: pretrained, from a configuration, from a function, and what cannot be loaded."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.contract.errors import ModelError, RecipeError
from paceline.models.config import read_config
from paceline.models.load import load_model
from paceline.models.tokenizers import tokenizer_source
from paceline.recipe.parts import ModelPart
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config, tiny_vit_config, write_tiny_model


def load(part: ModelPart, num_labels: int = 2, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "num_labels": num_labels,
        "label_names": [f"name {label}" for label in range(num_labels)],
        "kind": "classification",
        "vocabulary_size": 155,
        "pad_id": 0,
        "seed": 1,
    }
    return load_model(part, read_config(part), **{**given, **changes})


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_checkpoint_with_as_many_labels_keeps_its_head(pretrained: Path) -> None:
    model = load(ModelPart(source=str(pretrained)))
    stored = load_file(pretrained / "model.safetensors")
    assert model.state_dict().keys() == stored.keys()
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    assert model.training


def test_another_number_of_labels_gives_a_head_drawn_from_the_seed(pretrained: Path) -> None:
    models = [load(ModelPart(source=str(pretrained)), 5, seed=seed) for seed in (1, 1, 2)]
    first, same, other = (model.classifier.weight for model in models)
    assert first.shape == (5, 16)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    stored = load_file(pretrained / "model.safetensors")["bert.pooler.dense.weight"]
    assert all(torch.equal(model.bert.pooler.dense.weight, stored) for model in models)


@pytest.mark.parametrize("with_source", [True, False])
def test_loading_leaves_the_callers_random_numbers_alone(pretrained: Path, with_source: bool) -> None:
    part = ModelPart(source=str(pretrained)) if with_source else ModelPart(config=tiny_bert_config())
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load(part, 5)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_checkpoints_become_fp32_master_weights(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny_model(tmp_path / "half", dtype=dtype)
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    model = load(ModelPart(source=str(folder)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    stored = load_file(folder / "model.safetensors")["classifier.weight"]
    assert stored.dtype is getattr(torch, dtype)
    assert torch.equal(model.classifier.weight, stored.float())


def test_labels_and_kind_are_in_the_models_configuration(pretrained: Path) -> None:
    config = load(ModelPart(source=str(pretrained)), 3, kind="multi_label").config
    assert config.id2label == {0: "name 0", 1: "name 1", 2: "name 2"}
    assert config.label2id["name 2"] == 2
    assert (config.num_labels, config.problem_type) == (3, "multi_label_classification")
    assert config.name_or_path == str(pretrained)


def test_random_weights_follow_the_seed_and_the_tokenizer() -> None:
    part = ModelPart(config=tiny_bert_config())
    first, same, other = (load(part, seed=seed, vocabulary_size=321, pad_id=4) for seed in (1, 1, 2))
    assert first.get_input_embeddings().weight.shape == (321, 16)
    assert (first.config.vocab_size, first.config.pad_token_id, first.get_input_embeddings().padding_idx) == (321, 4, 4)
    assert torch.equal(first.get_input_embeddings().weight, same.get_input_embeddings().weight)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_special_tokens_outside_a_small_vocabulary_do_not_reach_the_model() -> None:
    settings = {"model_type": "modernbert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = load(ModelPart(config={**settings, "intermediate_size": 32}))
    assert model.config.sep_token_id is None
    assert model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.shape == (1, 2)


def test_images_give_channels_and_size() -> None:
    for settings in (tiny_vit_config(), tiny_resnet_config()):
        model = load(ModelPart(config=settings), vocabulary_size=None, pad_id=None, image_shape=(8, 8, 1))
        assert model.config.num_channels == 1
        assert model(pixel_values=torch.zeros(2, 1, 8, 8)).logits.shape == (2, 2)


def test_a_model_for_the_other_kind_of_data() -> None:
    with pytest.raises(ModelError, match="a bert reads text, but the data are images"):
        load(ModelPart(config=tiny_bert_config()), vocabulary_size=None, image_shape=(8, 8, 3))
    with pytest.raises(ModelError, match="a vit reads images, but the data are texts"):
        load(ModelPart(config=tiny_vit_config()))
    with pytest.raises(ModelError, match=r"image_size = 16, but the images have 8\n.*\n.*data.image_size=16"):
        load(ModelPart(config=tiny_vit_config(image_size=16)), vocabulary_size=None, image_shape=(8, 8, 3))


def test_a_vocabulary_that_is_larger_than_the_embeddings(pretrained: Path) -> None:
    load(ModelPart(source=str(pretrained)), vocabulary_size=200)  # its own: the texts may have none of the others
    other = ModelPart(source=str(pretrained), tokenizer="others")
    with pytest.raises(ModelError, match=r"155 token embeddings, but the tokenizer has 200 tokens\n.*\n.*own"):
        load(other, vocabulary_size=200)
    with pytest.raises(ModelError, match=r"leave model.config.vocab_size out"):
        load(ModelPart(config=tiny_bert_config(vocab_size=100)))


def test_an_override_that_changes_shapes_is_refused_not_reinitialised(pretrained: Path) -> None:
    part = ModelPart(source=str(pretrained), config={"intermediate_size": 64})
    with pytest.raises(ModelError, match=r"has the shape \[\d+.*the configuration asks for.*\n.*\n.*model.config"):
        load(part)


def write_renamed(folder: Path, pretrained: Path, prefix: str, *, shards: int = 1) -> Path:
    """The weights of ``pretrained`` under other names, in so many files."""
    weights = {f"{prefix}{name}": value for name, value in load_file(pretrained / "model.safetensors").items()}
    names = sorted(weights)
    places = dict.fromkeys(names, "model.safetensors")
    if shards > 1:
        places = {n: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, n in enumerate(names)}
        index = {"metadata": {"total_size": 0}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in set(places.values()):
        of_file = {name: weights[name] for name in names if places[name] == file}
        save_file(of_file, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_bytes((pretrained / "config.json").read_bytes())
    return folder


def test_weights_of_another_model_are_refused_not_left_random(pretrained: Path, tmp_path: Path) -> None:
    write_renamed(tmp_path, pretrained, "net.")
    with pytest.raises(ModelError, match=r"not those of a BertForSequenceClassification\n.*it holds net\."):
        load(ModelPart(source=str(tmp_path)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_saved_under_data_parallel_lose_the_prefix_for_good(tmp_path: Path, shards: int, dtype: str) -> None:
    plain = write_tiny_model(tmp_path / "plain", dtype=dtype)
    (tmp_path / "prefixed").mkdir()
    folder = write_renamed(tmp_path / "prefixed", plain, "module.", shards=shards)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    expected, found = (load(ModelPart(source=str(source))) for source in (plain, folder))
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in found.state_dict().items())
    assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}
    assert found.training
    assert found.config.name_or_path == str(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "a file was changed"
    found.save_pretrained(tmp_path / "saved")
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert names == load_file(plain / "model.safetensors").keys(), "the prefix is back"


def test_a_prefix_of_some_weights_only_is_none(pretrained: Path, tmp_path: Path) -> None:
    write_renamed(tmp_path, pretrained, "module.")
    weights = load_file(tmp_path / "model.safetensors")
    weights["stray"] = torch.zeros(1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"it holds module\."):
        load(ModelPart(source=str(tmp_path)))


def test_a_new_head_is_drawn_where_prefixed_weights_have_another(pretrained: Path, tmp_path: Path) -> None:
    folder = write_renamed(tmp_path, pretrained, "module.")
    expected, found = (load(ModelPart(source=str(source)), 5) for source in (pretrained, folder))
    assert torch.equal(found.classifier.weight, expected.classifier.weight)
    assert torch.equal(found.bert.pooler.dense.weight, expected.bert.pooler.dense.weight)


def test_a_few_missing_weights_are_named_in_a_warning(
    pretrained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = load_file(pretrained / "model.safetensors")
    without = {name: value for name, value in weights.items() if "pooler" not in name and "classifier" not in name}
    save_file(without, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((pretrained / "config.json").read_bytes())
    with caplog.at_level(logging.WARNING):
        load(ModelPart(source=str(tmp_path)))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "no weights for bert.pooler.dense.bias, bert.pooler.dense.weight; they start random" in message


def test_a_new_head_is_normal_and_prints_nothing(pretrained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(ModelPart(source=str(pretrained)), 7)
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


def test_damaged_and_missing_weights(pretrained: Path, tmp_path: Path) -> None:
    part = ModelPart(source=str(tmp_path))
    (tmp_path / "config.json").write_bytes((pretrained / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"has no model.safetensors"):
        load(part)
    (tmp_path / "model.safetensors").write_bytes((pretrained / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors: damaged"):
        load(part)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match=r"git-lfs's note.*\n.*\n.*cd .* && git lfs pull"):
        load(part)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "model.safetensors"]
)
def test_a_note_of_git_lfs_is_named_whichever_file_it_stands_for(pretrained: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(pretrained, tmp_path / "m")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    part = ModelPart(source=str(folder))

    def load_both() -> None:
        tokenizer_source(part, read_config(part), None)
        load(part)

    with pytest.raises(ModelError, match=rf"{name}: only git-lfs's note.*\n.*\n.*cd {folder} && git lfs pull"):
        load_both()


def test_a_configuration_that_makes_no_model() -> None:
    with pytest.raises(ModelError, match=r"makes no bert model\n.*hidden size.*multiple"):
        load(ModelPart(config=tiny_bert_config(num_attention_heads=3)))


NETS = """
import torch
from torch import nn
from nets_beside import WIDTH

def build(num_labels): return nn.Linear(WIDTH, num_labels)
def without_labels(): return nn.Linear(4, 2)
def no_module(num_labels): return {"logits": num_labels}
def broken(num_labels): return [][num_labels]
def lazy(num_labels): return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(num_labels))
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the current folder, forgotten again afterwards."""
    import sys

    (tmp_path / "nets_of_test.py").write_text(NETS)
    (tmp_path / "nets_beside.py").write_text("WIDTH = 4")
    (tmp_path / "nets_needing.py").write_text("import not_installed_at_all")
    (tmp_path / "nets_failing.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    for name in ("nets_of_test", "nets_beside", "nets_needing", "nets_failing"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("nets")
def test_a_factory_is_imported_from_the_current_folder_and_seeded() -> None:
    import sys

    path = list(sys.path)
    first, same, other = (load(ModelPart(factory="nets_of_test:build"), 3, seed=seed) for seed in (1, 1, 2))
    assert isinstance(first, nn.Linear)
    assert first.out_features == 3
    assert torch.equal(first.weight, same.weight)
    assert not torch.equal(first.weight, other.weight)
    assert sys.path == path


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nets_of_tset:build", "there is no module nets_of_tset"),
        ("nets_needing:build", r"needs the module not_installed_at_all\n.*install"),
        ("nets_failing:build", r"cannot be imported\n.*ZeroDivisionError.*nets_failing.py:1"),
        ("nets_of_test:biuld", "has no function biuld\n.*did you mean 'build'"),
        ("nets_of_test:without_labels", r"num_labels=2\n.*TypeError.*\n.*def without_labels\(num_labels\)"),
        ("nets_of_test:no_module", "returned dict"),
        ("nets_of_test:broken", r"IndexError.*nets_of_test.py:9"),
        ("nets_of_test:lazy", r"1 is a LazyLinear without a shape\n.*first batch.*\n.*its in_features"),
    ],
)
def test_what_is_wrong_with_a_factory(reference: str, message: str) -> None:
    with pytest.raises((ModelError, RecipeError), match=message):
        load(ModelPart(factory=reference))


NAMED, UNNAMED = ("entailment", "neutral", "contradiction"), ("LABEL_0", "LABEL_1", "LABEL_2")


def write_head(folder: Path, named: tuple[str, ...], **changes: Any) -> Path:
    """A checkpoint whose head has a row for each of these classes."""
    write_tiny_model(folder, num_labels=len(named))
    written = json.loads((folder / "config.json").read_text())
    written |= {"id2label": dict(enumerate(named)), "label2id": {name: index for index, name in enumerate(named)}}
    (folder / "config.json").write_text(json.dumps(written | changes))
    return folder


def told_of(folder: Path, names: tuple[str, ...], kind: str = "classification", seed: int = 7) -> tuple[Any, list[str]]:
    """The model for labels of these names, and what was told of it."""
    told: list[str] = []
    part = ModelPart(source=str(folder))
    config = read_config(part)
    vocabulary = config.vocab_size if config is not None else None
    changes = {"kind": kind, "label_names": names, "vocabulary_size": vocabulary, "seed": seed, "tell": told.append}
    return load(part, len(names), **changes), told


@pytest.mark.parametrize(
    ("head", "names", "kept", "words"),
    [
        (NAMED, NAMED, True, ()),
        (NAMED, ("Entailment", "Neutral", "Contradiction"), True, ()),
        (NAMED, ("0", "1", "2"), True, ("by number: 0 is entailment, 1 is neutral, 2 is contradiction",)),
        (NAMED, ("a", "b", "c"), False, ("entailment, neutral, contradiction) is lost", "a new head for a, b, c")),
        (NAMED, ("entailment", "other"), False, ("3 classes (entailment", "is lost; a new head for entailment, other")),
        (UNNAMED, UNNAMED, True, ()),
        (UNNAMED, ("0", "1", "2"), True, ("by number: 0 is LABEL_0, 1 is LABEL_1, 2 is LABEL_2",)),
        (UNNAMED, ("a", "b", "c"), True, ("no names", "in this order: a is LABEL_0, b is LABEL_1, c is LABEL_2")),
        (UNNAMED, ("1", "2", "3"), True, ("in this order: 1 is LABEL_0, 2 is LABEL_1, 3 is LABEL_2",)),
        (UNNAMED, ("0", "1"), False, ("3 classes (LABEL_0", "is lost", "that are written LABEL_0, LABEL_1 keep it")),
        (UNNAMED, ("a", "b"), False, ("(LABEL_0, LABEL_1, LABEL_2) is lost; a new head for a, b starts random",)),
    ],
)  # fmt: skip
def test_a_head_is_kept_for_its_own_classes_only(
    tmp_path: Path, head: tuple[str, ...], names: tuple[str, ...], kept: bool, words: tuple[str, ...]
) -> None:
    folder = write_head(tmp_path / "model", head)
    model, told = told_of(folder, names)
    before = load_file(folder / "model.safetensors")["classifier.weight"]
    after = model.get_parameter("classifier.weight")
    assert (before.shape == after.shape and torch.equal(before, after)) == kept
    assert len(told) == bool(words), told
    assert all(word in told[0] for word in words), told


def test_of_a_checkpoint_without_a_head_nothing_is_told(pretrained: Path, tmp_path: Path) -> None:
    weights = load_file(pretrained / "model.safetensors")
    save_file(
        {n: v for n, v in weights.items() if "classifier" not in n}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "config.json").write_bytes((pretrained / "config.json").read_bytes())
    for names in (("0", "1"), ("a", "b"), ("a", "b", "c")):
        assert told_of(tmp_path, names)[1] == []


def test_a_regression_asks_for_no_names(tmp_path: Path) -> None:
    assert told_of(write_head(tmp_path / "one", ("stars",)), ("target",), kind="regression")[1] == []
    _, told = told_of(write_head(tmp_path / "three", NAMED), ("target",), kind="regression")
    assert "its head is lost; a new head for target starts random" in told[0]


@pytest.mark.parametrize("family", ["perceiver", "swiftformer"])
@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "c")], ids=["as many classes", "more classes"])
def test_all_layers_of_logits_are_drawn_again_wherever_they_are(
    tmp_path: Path, family: str, names: tuple[str, ...]
) -> None:
    """Perceiver has its own inside the base model, SwiftFormer has two."""
    from tests.parity.tiny_families import write_image_model, write_text_model

    is_image = family == "swiftformer"
    folder = (write_image_model if is_image else write_text_model)(family, tmp_path / "model")
    told: list[str] = []
    part = ModelPart(source=str(folder))
    config = read_config(part)
    changes: dict[str, Any] = {"label_names": names, "tell": told.append}
    if is_image:
        changes |= {"vocabulary_size": None, "pad_id": None, "image_shape": (32, 32, 3)}
    else:
        changes |= {"vocabulary_size": config.vocab_size if config is not None else None}
    model = load(part, len(names), **changes)
    stored = load_file(folder / "model.safetensors")
    same = [n for n, v in model.named_parameters() if v.shape == stored[n].shape and torch.equal(v, stored[n])]
    new = {name for name, _ in model.named_parameters()} - set(same)
    layers = ["head", "dist_head"] if is_image else ["perceiver.decoder.decoder.final_layer"]
    assert {name for name in new if name.endswith(".weight")} == {f"{layer}.weight" for layer in layers}
    assert all(len(model.get_parameter(f"{layer}.weight")) == len(names) for layer in layers)
    assert "is lost; a new head for a, b" in told[0]


def test_a_t5_that_names_no_first_token_of_its_decoder_is_refused_with_the_setting() -> None:
    settings = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ModelError, match="a t5 without decoder_start_token_id") as found:
        load(ModelPart(config=settings))
    assert found.value.fix == "--set model.config.decoder_start_token_id=0"
    assert load(ModelPart(config={**settings, "decoder_start_token_id": 0})).config.decoder_start_token_id == 0
