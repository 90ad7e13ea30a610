"""Pickled weights: refused with the command that converts them, which reads tensors and nothing else."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.contract.errors import ModelError
from paceline.models.config import read_config
from paceline.models.convert import convert
from paceline.models.load import load_model
from paceline.recipe.parts import ModelPart
from tests.testing.tiny import write_tiny_model


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A model whose weights are only there as pytorch_model.bin."""
    folder = write_tiny_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["tied"] = weights["classifier.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(tmp_path / "expected.safetensors")
    return folder


def load(folder: Path) -> torch.nn.Module:
    part = ModelPart(source=str(folder))
    return load_model(
        part, read_config(part), num_labels=2, label_names="ab", kind="classification", vocabulary_size=100, pad_id=0
    )


def test_the_error_names_the_command_and_the_command_mends_it(pickled: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load(pickled)
    command = caught.value.fix.split()
    assert command[:2] == ["paceline", "convert"]
    done = subprocess.run([sys.executable, "-m", "paceline", *command[1:]], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"wrote {pickled}/model.safetensors\n"), done.stderr
    expected = load_file(tmp_path / "expected.safetensors")
    found = load(pickled).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert (pickled / "pytorch_model.bin").is_file()


def test_shards_are_converted_one_by_one(pickled: Path) -> None:
    weights = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    (pickled / "pytorch_model.bin").unlink()
    names = [name for name in sorted(weights) if name != "tied"]
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        shard = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: weights[name] for name in part}, pickled / shard)
        index |= dict.fromkeys(part, shard)
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    written = convert(pickled)
    assert [path.name for path in written] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    found = load(pickled).state_dict()
    assert all(torch.equal(weights[name], found[name]) for name in names)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_not_run(pickled: Path, tmp_path: Path) -> None:
    trap = tmp_path / "was run"
    for content in (Evil(trap), {"weight": torch.zeros(1), "evil": Evil(trap)}):
        torch.save(content, pickled / "pytorch_model.bin")
        with pytest.raises(ModelError, match="cannot be read as tensors"):
            convert(pickled)
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(trap), protocol=2))
    with pytest.raises(ModelError, match="cannot be read as tensors"):
        convert(pickled)
    assert not trap.exists()
    assert not (pickled / "model.safetensors").exists()


def test_a_training_checkpoint_is_unwrapped(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "state_dict": {"weight": torch.arange(3.0)}}, tmp_path / "best.pth")
    assert load_file(convert(tmp_path)[0])["weight"].tolist() == [0, 1, 2]


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        convert(tmp_path / "nothing")
    with pytest.raises(ModelError, match="no weights to convert"):
        convert(tmp_path)
    torch.save([torch.zeros(1)], tmp_path / "one.pt")
    with pytest.raises(ModelError, match="not a state_dict"):
        convert(tmp_path)
    torch.save({"a": torch.zeros(1)}, tmp_path / "two.pt")
    with pytest.raises(ModelError, match=r"several files.*\n.*one.pt, two.pt"):
        convert(tmp_path)
    index = {"weight_map": {"a": "../outside.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the folder"):
        convert(tmp_path)


@pytest.mark.parametrize(
    "content",
    [Evil(Path("never")), pickle.dumps(Evil(Path("never")), protocol=2), pickle.dumps({"a": 1}), b"not a pickle", b""],
    ids=["code in a zip", "code", "a later protocol", "no pickle", "empty"],
)
def test_torchs_advice_to_read_pickles_unguarded_is_not_passed_on(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "weights.bin"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ModelError, match="cannot be read as tensors") as error:
        convert(tmp_path)
    assert error.value.why, "the reason is missing"
    assert "weights_only" not in str(error.value)
    assert "\x1b" not in str(error.value)


def test_a_damaged_index_is_told(pickled: Path) -> None:
    for content in ("[" * 100_000, "{}", "[1]", '{"weight_map": {"a": 3}}'):
        (pickled / "pytorch_model.bin.index.json").write_text(content)
        with pytest.raises(ModelError, match=r"index.json: damaged"):
            convert(pickled)
