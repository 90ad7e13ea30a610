"""Weights of somebody who means harm: sizes that lie, headers that explode, checkpoints whose checksums are right."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from paceline.verbs.train import train
from tests.e2e.commands import Paceline
from tests.e2e.whole_runs import recipe

Header = dict[str, Any]

SHORT = ("--set", "loop.max_steps=1", "--set", "observe.console=off", "--set", "observe.report=false")
ONE = "classifier.weight"


def parts_of(file: Path) -> tuple[Header, bytes]:
    """The header of a safetensors file, and its data."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def file_of(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def changed(header: Header, **entry: Any) -> bytes:
    return json.dumps({**header, ONE: {**header[ONE], **entry}}).encode()


def bombs(file: Path) -> dict[str, bytes]:
    """What stands in the place of a file of weights."""
    header, data = parts_of(file)
    names = [name for name in header if name != "__metadata__"]
    half = {name: header[name] for name in names[: len(names) // 2]}
    return {
        "a header of 2^63 bytes": file_of(b"{}", length=2**63),
        "a header that is not there": file_of(b"{}", length=90_000_000),
        "ten megabytes of blanks": file_of(b"{" + b" " * 10_000_000 + b"}"),
        "nested 50,000 times": file_of(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        "a shape that overflows": file_of(changed(header, shape=[2**40, 2**40]), data),
        "a shape below zero": file_of(changed(header, shape=[-1, 16]), data),
        "data beyond the end": file_of(changed(header, data_offsets=[0, 2**40]), data),
        "data that overlap": file_of(changed(header, data_offsets=[0, 128]), data),
        "a kind of number that is none": file_of(changed(header, dtype="X9"), data),
        "half of the tensors": file_of(json.dumps(half).encode(), data),
        "a pickle": b"\x80\x04\x95" + bytes(100),
        "HTML": b"<!DOCTYPE html><html>not found</html>",
    }


NAMES = (
    "a header of 2^63 bytes",
    "a header that is not there",
    "ten megabytes of blanks",
    "nested 50,000 times",
    "a shape that overflows",
    "a shape below zero",
    "data beyond the end",
    "data that overlap",
    "a kind of number that is none",
    "half of the tensors",
    "a pickle",
    "HTML",
)


@pytest.fixture(scope="module")
def run(pretrained: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("honest") / "run"
    train(recipe(pretrained, reviews, loop={"keep_last": 1, "save_best": False}), out=folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_weights_to_start_from(name: str, pretrained: Path, reviews: Path, paceline: Paceline, tmp_path: Path) -> None:
    shutil.copytree(pretrained, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(bombs(file)[name])
    done = paceline("train", "--model", "model", "--data", reviews, "--max-length", "64", "--out", "run", *SHORT)
    if name == "half of the tensors":  # the data do not fit the header
        assert "damaged" in done.err
    assert done.code == 2, done
    assert "model" in done.first
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_whose_checksums_are_right(name: str, run: Path, paceline: Paceline, tmp_path: Path) -> None:
    """Somebody who can write the file can write its digest too."""
    shutil.copytree(run, tmp_path / "run")
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    file, manifest = folder / "model.safetensors", folder / "manifest.json"
    content = bombs(file)[name]
    file.write_bytes(content)
    told = json.loads(manifest.read_bytes())
    told["files"]["model.safetensors"] = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(told))
    (folder / "COMMITTED").write_text(hashlib.sha256(manifest.read_bytes()).hexdigest())
    done = paceline("train", "run", "--resume", "--set", "loop.max_steps=13")
    assert done.code == 2, done
    assert "Traceback" not in done.err


STATES: dict[str, Any] = {
    "a step below zero": {"progress": {"step": -5}},
    "an epoch below zero": {"progress": {"order": {"epoch": -1}}},
    "a step beyond all": {"progress": {"step": 10**30}},
    "a place in the data beyond all": {"progress": {"order": {"step": 10**18}}},
    "an epoch that is a text": {"progress": {"order": {"epoch": "many"}}},
    "no evaluations": {"progress": {"evaluations": 7}},
    "a recipe of another kind": {"recipe": {"model": {"source": ["a"]}}},
    "a scale that is infinite": {"engine": {"loss_scale": {"scale": 1e999}}},
    "seconds that are infinite": {"seconds": {"total": 1e999}},
    "a fingerprint of megabytes": {"fingerprint": "f" * 5_000_000},
}


def laid_over(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: laid_over(old.get(key), value) for key, value in new.items()}}
    return new


@pytest.mark.parametrize("name", STATES)
def test_a_state_whose_checksums_are_right(name: str, run: Path, paceline: Paceline, tmp_path: Path) -> None:
    """What it says may be nonsense; no traceback comes of it, and nothing runs for ever."""
    shutil.copytree(run, tmp_path / "run")
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    file, manifest = folder / "state.json", folder / "manifest.json"
    content = json.dumps(laid_over(json.loads(file.read_bytes()), STATES[name])).encode()
    file.write_bytes(content)
    told = json.loads(manifest.read_bytes())
    told["files"]["state.json"] = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(told))
    (folder / "COMMITTED").write_text(hashlib.sha256(manifest.read_bytes()).hexdigest())
    done = paceline("train", "run", "--resume", "--set", "loop.max_steps=13", "--set", "observe.console=off")
    assert done.code in (0, 2), done
    assert max(map(len, done.err.splitlines()), default=0) < 2000, "a message of megabytes"
