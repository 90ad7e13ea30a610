"""Checkpoints go out and come back bit for bit; rotation keeps what must stay; what is damaged is named."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.errors import CheckpointError, DiskFullError, RunFolderError
from paceline.run.checkpoint.store import Checkpoint, CheckpointStore


def weights(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((4, 3), float(step))}, "optimizer": {"w.moment": torch.full((5,), -float(step))}}


def save(store: CheckpointStore, *steps: int, best: int | None = None) -> None:
    for step in steps:
        store.save(step, weights(step), {"step": step}, is_best=step == best)


def holds(checkpoint: Checkpoint, step: int) -> bool:
    tensors = {stem: checkpoint.tensors(stem) for stem in ("model", "optimizer")}
    same = all(
        torch.equal(tensors[stem][name], t) for stem, named in weights(step).items() for name, t in named.items()
    )
    return checkpoint.step == step and checkpoint.state == {"step": step} and same


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """What an attacker can do who knows the format: a changed manifest with a marker that fits."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    content = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(content)
    (folder / "COMMITTED").write_text(hashlib.sha256(content).hexdigest())


def entry(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


# ---- there and back


def test_tensors_and_state_come_back_bit_for_bit(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    kept = {
        "bf16": torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2**40),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "turned": base.view(3, 4).t(),
        "strided": base[::2],
        "left": base[:6],
        "right": base[6:],
        "overlapping": base[3:9],
        "whole": base,
        "tied": base,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "näme/with.odd characters": torch.ones(1),
    }
    state = {"lr": 0.1 + 0.2, "best": None, "seed": 2**63, "loss": float("inf"), "text": "é\x00\n", "list": [1, [2]]}
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    record = store.save(7, {"model": kept, "none": {}}, state)
    found = store.newest()
    tensors = found.tensors("model")
    assert tensors.keys() == kept.keys()
    for name, tensor in kept.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert tensors[name].shape == tensor.shape, name
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensors[name], tensor)]
        assert torch.equal(*bits), name
    assert found.tensors("none") == {}
    assert found.state == state
    assert found.notices == ()
    files = [path for path in found.folder.iterdir() if path.name not in ("manifest.json", "COMMITTED")]
    assert record.num_bytes == sum(path.stat().st_size for path in files)
    assert (record.step, record.folder, record.is_best) == (7, str(found.folder), False)


def test_equal_checkpoints_alone_have_equal_digests(tmp_path: Path) -> None:
    digests = []
    for name, step in (("one", 1), ("other", 1), ("later", 2)):
        store = CheckpointStore(tmp_path / name, keep_last=1)
        save(store, step)
        digests.append(store.newest().digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_loaded_tensor_may_be_changed_without_changing_the_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    store.newest().tensors("model")["w"].add_(1)
    assert holds(store.newest(), 1)


def test_no_file_of_a_checkpoint_is_a_pickle_and_others_may_read_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    before = os.umask(0o022)
    try:
        save(store, 1)
    finally:
        os.umask(before)
    folder = store.newest().folder
    assert names(folder) == ["COMMITTED", "manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644, path.name


def test_a_stem_that_is_a_path_and_a_state_that_is_not_json_write_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    with pytest.raises(ValueError, match="stem"):
        store.save(1, {"../model": {}}, {})
    with pytest.raises(TypeError):
        store.save(1, {}, {"tensor": torch.ones(1)})
    assert not store.folder.exists()


def test_a_stem_that_was_not_saved_is_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    with pytest.raises(CheckpointError, match="scaler"):
        store.newest().tensors("scaler")


# ---- which one


def test_no_checkpoint_is_an_error_and_never_step_0(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        store = CheckpointStore(folder, keep_last=1)
        with pytest.raises(CheckpointError, match="no checkpoint"):
            store.newest()
        assert store.best() is None
        assert store.steps() == ()


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10, 20, 30, 40, 50, best=20)
    assert store.steps() == (20, 40, 50)
    assert holds(store.newest(), 50)
    best = store.best()
    assert best is not None
    assert holds(best, 20)
    save(store, 60, best=60)
    assert store.steps() == (20, 50, 60), "20 is still the best of the run up to 50"
    save(store, 70)
    assert store.steps() == (60, 70), "a best one that no checkpoint needs stays"
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 9, 99_999_999, 100_000_000)
    assert store.newest().step == 100_000_000


def test_a_step_saved_again_replaces_the_first_only_when_committed(tmp_path: Path, monkeypatch: Any) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 10)
    with monkeypatch.context() as patch:
        patch.setattr("paceline.run.checkpoint.store.write_atomically", _fail)
        with pytest.raises(CheckpointError, match="not saved"):
            store.save(10, weights(11), {"step": 11})
    assert holds(store.newest(), 10)
    store.save(10, weights(11), {"again": True})
    assert store.newest().state == {"again": True}
    assert names(tmp_path) == ["step-00000010.2"]
    save(store, 10)
    assert holds(store.newest(), 10)
    assert len(names(tmp_path)) == 1


def test_the_best_stays_when_its_step_is_saved_again_without_being_marked(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 10, best=10)
    save(store, 10)
    best = store.best()
    assert best is not None
    assert holds(best, 10)
    save(store, 20)
    assert store.steps() == (10, 20)
    assert len(names(tmp_path)) == 2


def test_two_editions_of_one_step_count_as_one(tmp_path: Path) -> None:
    """The best one of a step, and the same step saved again: the second edition took the place of an older step."""
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10, 20, best=20)
    save(store, 20)
    assert names(tmp_path) == ["step-00000010", "step-00000020", "step-00000020.2"]
    save(store, 30)
    assert names(tmp_path) == ["step-00000020", "step-00000020.2", "step-00000030"]
    save(store, 40)
    assert names(tmp_path) == ["step-00000020", "step-00000030", "step-00000040"], "the best, in the edition marked"


def test_the_later_edition_of_a_step_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10, 20, best=10)
    store.save(20, weights(20), {"step": 20, "edition": 2})
    save(store, 30)
    assert store.steps() == (10, 20, 30)
    assert names(tmp_path) == ["step-00000010", "step-00000020.2", "step-00000030"]


def test_falling_back_finds_the_best_of_that_time(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10, best=10)
    save(store, 20)
    save(store, 30, best=30)
    (tmp_path / "step-00000030" / "model.safetensors").write_bytes(b"")
    assert store.newest().step == 20
    best = store.best()
    assert best is not None
    assert holds(best, 10)
    assert "step-00000030/model.safetensors" in best.notices[0]
    save(store, 25)
    best = store.best()
    assert best is not None
    assert holds(best, 10)
    assert best.notices == ()


def test_a_run_that_went_back_drops_what_came_after(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10, 20, 30, best=30)
    (tmp_path / "step-00000030" / "model.safetensors").write_bytes(b"")
    assert store.newest().step == 20
    save(store, 25)
    assert store.steps() == (20, 25), "the damaged later checkpoint must not push out the new one"
    assert store.best() is None, "the best of a run that no longer is"


def _fail(*arguments: Any, **named: Any) -> None:
    raise OSError(5, "Input/output error")


# ---- damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x10
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    (file, damage)
    for file in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
    for damage in (truncate, flip, empty, Path.unlink)
]


@pytest.mark.parametrize(("file", "damage"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, file: str, damage: Callable[[Path], None]) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10, 20, best=20)
    damage(tmp_path / "step-00000020" / file)
    found = store.newest()
    assert holds(found, 10)
    assert f"step-00000020/{file}" in found.notices[0], found.notices
    assert "step 10" in found.notices[-1]
    with pytest.raises(CheckpointError, match=f"step-00000020/{file}"):
        store.best()


@pytest.mark.parametrize("damage", [truncate, flip, empty])
def test_a_damaged_marker_is_damage(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10, 20)
    damage(tmp_path / "step-00000020" / "COMMITTED")
    found = store.newest()
    assert holds(found, 10)
    assert "COMMITTED" in found.notices[0]


def test_without_a_marker_there_is_no_checkpoint_and_the_next_save_clears_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 10, 20)
    (tmp_path / "step-00000020" / "COMMITTED").unlink()
    found = store.newest()
    assert holds(found, 10)
    assert "step-00000020: left out" in found.notices[0]
    save(store, 20)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_all_damaged_is_an_error_that_lists_every_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 10, 20, 30)
    flip(tmp_path / "step-00000010" / "state.json")
    flip(tmp_path / "step-00000020" / "model.safetensors")
    truncate(tmp_path / "step-00000030" / "optimizer.safetensors")
    truncate(tmp_path / "step-00000030" / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        store.newest()
    for file in ("10/state.json", "20/model.safe", "30/optimizer.safe", "30/model.safe"):
        assert f"step-000000{file}" in raised.value.what
    assert raised.value.fix
    assert store.steps() == (10, 20, 30), "reading must not delete anything"


def test_rotation_never_drops_the_only_whole_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 10)
    for step in (20, 30):
        save(store, step)
        flip(tmp_path / f"step-000000{step}" / "model.safetensors")
        with pytest.raises(CheckpointError):
            store.newest()
    save(store, 25)
    assert holds(store.newest(), 25)


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_deleted(tmp_path: Path, monkeypatch: Any) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 10, best=10)
    read = os.open

    def failing(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith("step-00000010/manifest.json"):
            raise OSError(5, "Input/output error")
        return read(path, *arguments, **named)

    monkeypatch.setattr(os, "open", failing)
    with pytest.warns(UserWarning, match="not dropped"):
        save(store, 20)
    assert holds(store.newest(), 20)
    monkeypatch.undo()
    best = store.best()
    assert best is not None
    assert holds(best, 10)


def test_a_checkpoint_of_a_later_paceline_is_not_skipped(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10, 20)
    edit_manifest(tmp_path / "step-00000020", lambda manifest: manifest.update(version=2))
    with pytest.raises(CheckpointError, match="format 2"):
        store.newest()


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("model.safetensors", True),
        ("model.safetensors", False),
        ("state.json", True),
        ("state.json", False),
        ("optimizer.safetensors", True),
    ],
)
def test_a_manifest_made_again_that_leaves_a_file_out_is_damage(tmp_path: Path, name: str, stays: bool) -> None:
    """What is not listed is not checked, and would be read all the same."""
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10, 20)
    edit_manifest(tmp_path / "step-00000020", lambda manifest: manifest["files"].pop(name))
    if not stays:
        (tmp_path / "step-00000020" / name).unlink()
    found = store.newest()
    assert holds(found, 10)
    assert f"leaves out {name}" in found.notices[0]
    assert store.steps() == (10,)


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 10)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000099")
    found = store.newest()
    assert holds(found, 10)
    assert "step 99" in found.notices[0]


# ---- leftovers


def test_leftovers_of_dead_processes_are_removed_and_a_live_ones_kept(tmp_path: Path) -> None:
    dead, alive = 2**22 + 1, os.getppid()  # above the largest process id that Linux gives
    for name in (
        f".step-00000005.partial-{dead}",
        f".step-00000005.2.discarded-{dead}",
        f".step-00000006.partial-{os.getpid()}",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / f".step-00000005.partial-{alive}").mkdir()
    (tmp_path / "notes.txt").write_text("the user's own")
    (tmp_path / "step-12").mkdir()
    save(CheckpointStore(tmp_path, keep_last=1), 10)
    assert names(tmp_path) == [f".step-00000005.partial-{alive}", "notes.txt", "step-00000010", "step-12"]


def test_a_leftover_of_a_process_whose_number_another_one_has_now_is_removed(tmp_path: Path) -> None:
    """Process ids come again: a live process that was started after the last change has not made it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        old, recent = (tmp_path / f".step-0000000{step}.partial-{process.pid}" for step in (5, 6))
        for leftover in (old, recent):
            leftover.mkdir()
        os.utime(old, (0, 0))
        save(CheckpointStore(tmp_path, keep_last=1), 10)
        assert names(tmp_path) == [recent.name, "step-00000010"], "only what it may be writing stays"


def test_what_cannot_be_deleted_is_out_of_sight_and_tried_again(tmp_path: Path, monkeypatch: Any) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 10)

    def refuse(path: Path) -> None:
        (path / "model.safetensors").unlink()
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.warns(UserWarning, match="cannot be removed yet"):
            save(store, 20)
    assert [name for name in names(tmp_path) if name.startswith("step")] == ["step-00000020"]
    assert holds(store.newest(), 20)
    save(store, 30)
    assert names(tmp_path) == ["step-00000030"]


# ---- no room, no permission


def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 10)
    usage = shutil.disk_usage(tmp_path)._replace(free=1234)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError) as raised:
        store.save(20, {"model": {"w": torch.zeros(1_000_000)}}, {})
    needed = int(raised.value.why.split()[0].replace(",", ""))
    assert 4_000_000 < needed < 4_200_000
    assert "1,234 bytes free" in raised.value.why
    assert names(tmp_path) == ["step-00000010"]
    assert holds(store.newest(), 10)


def test_a_disk_that_fills_up_while_saving_leaves_the_older_one(tmp_path: Path, monkeypatch: Any) -> None:
    from safetensors import SafetensorError

    def full(*arguments: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 10)
    monkeypatch.setattr("paceline.run.checkpoint.store.save_file", full)
    with pytest.raises(DiskFullError, match="bytes needed"):
        save(store, 20)
    assert names(tmp_path) == ["step-00000010"]
    assert holds(store.newest(), 10)


def test_the_room_asked_for_covers_what_is_written(tmp_path: Path) -> None:
    from paceline.run.checkpoint import store as module

    tensors = {"model": {f"layer.{i}.näme": torch.zeros(i) for i in range(500)}, "optimizer": {}}
    content = json.dumps({"x": list(range(1000))}).encode()
    CheckpointStore(tmp_path, keep_last=1).save(1, tensors, json.loads(content))
    written = sum(path.stat().st_size for path in (tmp_path / "step-00000001").iterdir())
    asked = module._room(content, {f"{stem}.safetensors": named for stem, named in tensors.items()})
    assert written <= asked <= 3 * written


def test_a_folder_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user, probably root, may write everywhere")
        with pytest.raises(RunFolderError, match="cannot be written"):
            save(CheckpointStore(tmp_path / "checkpoints", keep_last=1), 1)
    finally:
        tmp_path.chmod(0o755)


def test_a_file_in_the_folders_place_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="not saved"):
        save(CheckpointStore(tmp_path / "checkpoints", keep_last=1), 1)


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, 1)
    shutil.rmtree(store.folder)
    save(store, 2)
    assert holds(store.newest(), 2)


# ---- a stranger's folder


@pytest.mark.parametrize("name", ["../../secret.safetensors", "{outside}", "..", "", "model.pkl", "a.safetensors\n"])
def test_a_manifest_that_names_other_files_is_refused(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "secret.safetensors"
    outside.write_bytes(b"secret")
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, 1)
    folder = store.folder / "step-00000001"
    name = name.format(outside=outside)
    if name.startswith(("model", "a")):
        shutil.copy(outside, folder / name)
    files = {name: entry(outside)}
    edit_manifest(folder, lambda manifest: manifest["files"].update(files))
    with pytest.raises(CheckpointError, match=r"manifest\.json: files"):
        store.newest()


@pytest.mark.parametrize("content", ["[]", "{}", "null", "[" * 100_000, '{"files": {}}', "\xff\xfe"])
def test_a_manifest_that_is_something_else_is_refused(tmp_path: Path, content: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    encoded = content.encode("latin-1")
    (tmp_path / "step-00000001" / "manifest.json").write_bytes(encoded)
    (tmp_path / "step-00000001" / "COMMITTED").write_text(hashlib.sha256(encoded).hexdigest())
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        store.newest()


@pytest.mark.parametrize("content", ["[]", "7", "[" * 100_000, "{"])
def test_a_state_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    path = tmp_path / "step-00000001" / "state.json"
    path.write_text(content)
    edit_manifest(path.parent, lambda manifest: manifest["files"].update({"state.json": entry(path)}))
    with pytest.raises(CheckpointError, match=r"state\.json"):
        store.newest()


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json", "COMMITTED"])
def test_a_link_in_a_checkpoint_is_never_followed(tmp_path: Path, file: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, 1)
    inside = store.folder / "step-00000001" / file
    inside.rename(tmp_path / "outside")
    inside.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=f"{file}: is a link"):
        store.newest()


def test_a_link_put_in_place_after_the_check_is_not_followed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, 1)
    found = store.newest()
    inside = found.folder / "model.safetensors"
    inside.rename(tmp_path / "outside")
    inside.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="is a link"):
        found.tensors("model")


def test_a_linked_checkpoint_folder_is_neither_read_nor_removed(tmp_path: Path) -> None:
    other = CheckpointStore(tmp_path / "other", keep_last=1)
    save(other, 50)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, 10)
    (store.folder / "step-00000050").symlink_to(other.folder / "step-00000050")
    assert holds(store.newest(), 10)
    save(store, 50)
    assert holds(store.newest(), 50)
    assert (store.folder / "step-00000050").is_symlink()
    assert holds(other.newest(), 50)


def test_a_pipe_in_a_files_place_does_not_hang(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    (tmp_path / "step-00000001" / "state.json").unlink()
    os.mkfifo(tmp_path / "step-00000001" / "state.json")
    with pytest.raises(CheckpointError, match="no regular file"):
        store.newest()


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.sentinel,))


def test_a_planted_pickle_is_never_read(tmp_path: Path) -> None:
    sentinel = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(sentinel))
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2)
    save(store, 10, 20)
    folder = store.folder / "step-00000020"
    for name in ("model.pt", "optimizer.bin", "state.pkl", "data.pkl", ".metadata"):
        (folder / name).write_bytes(bomb)
    found = store.newest()
    assert holds(found, 20), "files that the manifest does not list are of no concern"
    (folder / "model.safetensors").write_bytes(bomb)
    edit_manifest(
        folder, lambda manifest: manifest["files"].update({"model.safetensors": entry(folder / "model.safetensors")})
    )
    with pytest.raises(CheckpointError, match="no tensors"):
        store.newest().tensors("model")
    assert not sentinel.exists(), "a pickle was executed"
    pickle.loads(bomb)
    assert sentinel.exists(), "the bomb of this test is a dud"


@pytest.mark.parametrize("name", ["manifest.json", "COMMITTED", "state.json"])
def test_a_folder_in_a_files_place_is_damage(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1, 2)
    (tmp_path / "step-00000002" / name).unlink()
    (tmp_path / "step-00000002" / name).mkdir()
    found = store.newest()
    assert holds(found, 1)
    assert f"{name}: is no regular file" in found.notices[0]
    save(store, 3)
    assert holds(store.newest(), 3)
