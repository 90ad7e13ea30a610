"""What is saved of a model with adapters loads in peft, in transformers and here, and computes the same."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.contract.errors import ModelError
from paceline.models.adapters import CONFIG, WEIGHTS, base_of, merged
from paceline.models.config import read_config
from paceline.models.load import load_model
from paceline.models.saved import SavedModel, load_saved, save_model
from paceline.models.structure import head_names, linear_layers
from paceline.recipe.parts import ModelPart
from paceline.techniques.lora import apply_lora
from tests.testing.hub import LoopbackHub
from tests.testing.tiny import tiny_bert_config, tiny_distilbert_config, write_tiny_model

ROOT = Path(__file__).resolve().parents[3]

ROUNDING = 3e-8
"""Of logits of about 0.1: adapters that are added in, beside those that are computed apart."""

KINDS: dict[str, dict[str, Any]] = {
    "distilbert": tiny_distilbert_config(),
    "bert": tiny_bert_config(),
    "roberta": tiny_bert_config(model_type="roberta"),
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
}

NAMES = ("a", "b", "c")
IDS = torch.arange(5, 25).reshape(2, 10)


def trained(base: Path | str, **settings: Any) -> nn.Module:
    """A base model with a head for three classes, and adapters and head that are moved, as by training."""
    part = ModelPart(source=str(base), train="lora")
    config = read_config(part)
    size, pad = config.get_text_config().vocab_size, 0
    model = load_model(
        part,
        config,
        num_labels=3,
        label_names=NAMES,
        kind="classification",
        vocabulary_size=size,
        pad_id=pad,
        tell=lambda _: None,
    )
    torch.manual_seed(3)
    apply_lora(model, linear_layers(model), head_names(model), rank=4, alpha=8, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.eval()


def saved(model: nn.Module, base: Path | str, folder: Path, *, merge: bool) -> Path:
    about = SavedModel(
        label_names=NAMES,
        kind="classification",
        modality="text",
        max_length=32,
        base=None if merge else base_of(model, str(base), None),
    )
    save_model(model, None, folder, about, merged(model, model.state_dict()) if merge else None)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: write_tiny_model(tmp_path_factory.mktemp("base") / kind, settings) for kind, settings in KINDS.items()
    }


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_computes_what_was_trained(kind: str, dora: bool, bases: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = trained(bases[kind], dora=dora)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model)
    scale = max(1.0, expected.abs().max().item() / 0.1)
    adapters = saved(model, bases[kind], tmp_path / "adapters", merge=False)
    whole = saved(model, bases[kind], tmp_path / "whole", merge=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "saving changed it"
    plain = AutoModelForSequenceClassification.from_pretrained(whole).eval()
    for how, found in {
        "adapters": load_saved(adapters).model,
        "whole": load_saved(whole).model,
        "transformers": plain,
        "peft": by_peft(bases[kind], adapters),
    }.items():
        far = (logits(found) - expected).abs().max().item()
        assert far < ROUNDING * scale, f"{how}: logits are {far:.1e} from those of the trained model"
    assert not any("lora" in name for name in load_file(whole / "model.safetensors"))


def by_peft(base: Path, folder: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers', about what peft asks it
        plain = AutoModelForSequenceClassification.from_pretrained(
            base, config=AutoConfig.from_pretrained(folder), ignore_mismatched_sizes=True
        )
        return PeftModel.from_pretrained(plain, folder).eval()


def test_names_in_pefts_file_are_short_and_in_order(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = saved(trained(bases["bert"]), bases["bert"], tmp_path / "run", merge=False)
    config = json.loads((folder / CONFIG).read_text())
    assert config["target_modules"] == ["intermediate.dense", "key", "output.dense", "query", "value"]
    assert config["modules_to_save"] == ["classifier"]
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "SEQ_CLS")
    assert config["base_model_name_or_path"] == str(bases["bert"])
    assert (folder / WEIGHTS).stat().st_size < (bases["bert"] / "model.safetensors").stat().st_size


def test_a_base_that_has_changed_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", tiny_distilbert_config())
    folder = saved(trained(base), base, tmp_path / "run", merge=False)
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor + 1e-3 for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="which have changed") as caught:
        load_saved(folder)
    assert "model.lora.merge=true" in caught.value.fix


@pytest.mark.parametrize("damage", ["a weight less", "a weight more", "cut", "another method", "no file"])
def test_files_that_are_not_whole_are_refused(damage: str, bases: dict[str, Path], tmp_path: Path) -> None:
    folder = saved(trained(bases["distilbert"]), bases["distilbert"], tmp_path / "run", merge=False)
    path = folder / WEIGHTS
    tensors = load_file(path)
    name = next(name for name in tensors if ".lora_A." in name)
    if damage == "a weight less":
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    elif damage == "a weight more":
        save_file({**tensors, name.replace("layer.0", "layer.7"): tensors[name].clone()}, path)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "another method":
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, "peft_type": "IA3"}))
    else:
        path.unlink()
    with pytest.raises(ModelError) as caught:
        load_saved(folder)
    assert caught.value.fix == "use a copy that is whole"


@pytest.mark.parametrize("base", ["elsewhere", {"source": "elsewhere"}, {"source": 3, "revision": [], "digest": {}}])
def test_a_base_that_somebody_else_has_written_is_refused(base: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    folder = saved(trained(bases["distilbert"]), bases["distilbert"], tmp_path / "run", merge=False)
    about = json.loads((folder / "paceline.json").read_text())
    (folder / "paceline.json").write_text(json.dumps({**about, "base": base}))
    with pytest.raises(ModelError):
        load_saved(folder)


def test_adapters_are_no_model_to_start_from(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = saved(trained(bases["distilbert"]), bases["distilbert"], tmp_path / "run", merge=False)
    with pytest.raises(ModelError, match="holds adapters"):
        trained(folder)


def test_loading_draws_no_random_numbers(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = saved(trained(bases["distilbert"]), bases["distilbert"], tmp_path / "run", merge=False)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    load_saved(folder)
    assert torch.rand(1) == expected


def test_a_checkpoint_that_lacks_weights_outside_the_head_needs_whole_weights(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", tiny_bert_config())
    weights = load_file(base / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "pooler" not in k}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"bert\.pooler") as caught:
        trained(base)
    assert caught.value.fix == "--set model.lora.merge=true"


@pytest.mark.slow
def test_of_the_hub_the_commit_is_kept_and_loaded_again(bases: dict[str, Path], tmp_path: Path) -> None:
    """In a process of its own: where the Hub is, is settled once a process."""
    program = f"""
import json, sys
from pathlib import Path
from paceline.models.saved import load_saved
from tests.unit.models.test_adapters import saved, trained
folder = saved(trained("acme/tiny"), "acme/tiny", Path({str(tmp_path / "run")!r}), merge=False)
load_saved(folder)
print(json.loads((folder / "paceline.json").read_text())["base"])
"""
    with LoopbackHub({"acme/tiny": bases["distilbert"]}) as hub:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | hub.environment(tmp_path / "home"),
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        commit = hub.commit("acme/tiny")
    assert done.stdout.strip() == str({"source": "acme/tiny", "revision": commit, "digest": None})


def test_without_peft_adapters_are_told_and_whole_weights_load(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(bases["distilbert"])
    folders = [saved(model, bases["distilbert"], tmp_path / str(merge), merge=merge) for merge in (False, True)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="adapters, and peft") as caught:
        load_saved(folders[0])
    assert caught.value.fix == "pip install 'paceline[lora]'"
    load_saved(folders[1])
