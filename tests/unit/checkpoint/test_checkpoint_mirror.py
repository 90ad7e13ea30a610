"""A mirror holds what the store has committed, whole, and nothing that happens there disturbs who saves."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from paceline.contract.errors import CheckpointError, RecipeError, RunFolderError, UserError
from paceline.run.checkpoint.mirror import Mirror
from paceline.run.checkpoint.remote import Remote
from paceline.run.checkpoint.restore import restore
from paceline.run.checkpoint.store import CheckpointStore


@pytest.fixture(params=["path", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where the copies go."""
    if request.param == "path":
        yield str(tmp_path / "elsewhere")
        return
    yield "memory://elsewhere"
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]


class Run:
    """A run folder that saves, and its mirror."""

    def __init__(self, folder: Path, place: str, keep_last: int = 1, started: str = "now") -> None:
        self.folder, self.store = folder, CheckpointStore(folder / "checkpoints", keep_last)
        folder.mkdir(exist_ok=True)
        (folder / "recipe.yaml").write_text("recipe")
        (folder / "manifest.json").write_text(json.dumps({"starts": [{"time": started}]}))
        self.mirror = Mirror(place, folder)

    def save(self, step: int, **named: Any) -> None:
        (self.folder / "metrics.jsonl").write_text("{}\n" * step)
        tensors = {"model": {"w": torch.full((5,), float(step))}, "optimizer": {"m": torch.zeros(2)}}
        self.store.save(step, tensors, {"step": step}, **named)
        self.mirror.poke()


@pytest.fixture
def run(place: str, tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run", place)
    yield made
    made.mirror.close()


def there(place: str, name: str = "run") -> list[str]:
    return Remote(f"{place}/{name}").names("checkpoints")


def test_what_is_committed_is_there_and_comes_back(run: Run, place: str, tmp_path: Path) -> None:
    run.mirror.begin(may_begin=True)
    for step in (10, 20, 30):
        run.save(step, is_best=step == 20)
        assert run.mirror.wait(20) == []
    assert there(place) == ["step-00000020", "step-00000030"], "what the run drops is dropped there too"
    told: list[str] = []
    assert restore(f"{place}/run", tmp_path / "back", told.append) == 30
    assert told == []
    back = CheckpointStore(tmp_path / "back" / "checkpoints", 1)
    assert back.newest().state == {"step": 30}
    assert torch.equal(back.newest().tensors("model")["w"], torch.full((5,), 30.0))
    best = back.best()
    assert best is not None
    assert best.step == 20
    for name in ("recipe.yaml", "manifest.json", "metrics.jsonl"):
        assert (tmp_path / "back" / name).read_bytes() == (run.folder / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_was_saved_before_the_start_is_copied_too(run: Run, place: str) -> None:
    run.save(10)
    run.mirror.begin(may_begin=True)
    assert run.mirror.wait(20) == []
    assert there(place) == ["step-00000010"]


def test_nobody_waits_for_a_place_that_hangs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    read = Remote.read

    def hanging(self: Remote, *arguments: Any) -> Any:
        answers.wait(30)
        return read(self, *arguments)

    monkeypatch.setattr(Remote, "read", hanging)
    run.mirror.begin(may_begin=True, seconds=0.01)
    run.save(10)
    assert run.mirror.notices() == []
    (late,) = run.mirror.wait(0.01)
    assert "is not there after 0.01 seconds; the next start copies it" in late
    answers.set()
    assert run.mirror.wait(20) == []


def test_an_error_is_a_notice_and_the_next_checkpoint_tries_again(
    run: Run, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, failures = Remote.send, iter([OSError("no route\nto it"), OSError("no route"), RuntimeError("slow down")])

    def failing(self: Remote, *arguments: Any) -> None:
        for error in failures:
            raise error
        send(self, *arguments)

    monkeypatch.setattr(Remote, "send", failing)
    run.mirror.begin(may_begin=True)
    assert run.mirror.wait(20) == []
    noticed = []
    for step in (10, 20, 30, 40):
        run.save(step)
        noticed.append([line.partition(": ")[2] for line in run.mirror.wait(20)])
    late = "the newest checkpoint is not there after 20 seconds; the next start copies it"
    assert noticed == [
        ["cannot be written (OSError: no route); the next checkpoint tries again", late],
        [late],
        ["cannot be written (RuntimeError: slow down); the next checkpoint tries again", late],
        [],
    ]
    assert there(place) == ["step-00000040"]


def test_a_copy_that_was_cut_off_is_no_checkpoint_and_the_next_start_makes_it(
    run: Run, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, sent, is_cut = Remote.send, list[str](), True

    def cut(self: Remote, file: Any, name: str) -> None:
        sent.append(name.rpartition("/")[2])
        if is_cut and len(sent) >= 3:
            raise OSError("cut off")
        send(self, file, name)

    monkeypatch.setattr(Remote, "send", cut)
    run.save(10)
    run.mirror.begin(may_begin=True)
    assert "cut off" in run.mirror.wait(20)[0]
    run.mirror.close()
    assert Remote(f"{place}/run").read("checkpoints/step-00000010/COMMITTED") is None, "by half, and marked as whole"
    again, is_cut = Run(run.folder, place), False
    again.mirror.begin(may_begin=True)
    assert again.mirror.wait(20) == []
    again.mirror.close()
    assert sent[-1] == "COMMITTED"
    assert restore(f"{place}/run", tmp_path / "back", lambda _: None) == 10


def test_other_bytes_than_were_saved_do_not_come_back(run: Run, place: str, tmp_path: Path) -> None:
    """A disk that gives back something else."""
    run.save(10)
    path = run.folder / "checkpoints/step-00000010/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    run.mirror.begin(may_begin=True)
    assert run.mirror.wait(20) == []
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        restore(f"{place}/run", tmp_path / "back", lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir() if "back" in path.name) == []


def test_damage_there_is_told_and_the_one_before_taken(place: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", place, keep_last=3)
    run.mirror.begin(may_begin=True)
    for step in (10, 20, 30):
        run.save(step)
    assert run.mirror.wait(20) == []
    run.mirror.close()
    remote = Remote(f"{place}/run")
    content = remote.read("checkpoints/step-00000030/model.safetensors")
    assert content
    remote.write("checkpoints/step-00000030/model.safetensors", content[:-1] + b"?")
    remote.write("checkpoints/step-00000020/optimizer.safetensors", b"cut")
    told: list[str] = []
    assert restore(f"{place}/run", tmp_path / "back", told.append) == 10
    assert told == [
        "step-00000030: left out, model.safetensors does not have its SHA-256",
        "step-00000020: left out, optimizer.safetensors does not have its size",
    ]
    assert CheckpointStore(tmp_path / "back" / "checkpoints", 1).newest().step == 10


def test_a_hostile_mirror_writes_nowhere_else(place: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", place)
    run.mirror.begin(may_begin=True)
    run.save(10)
    assert run.mirror.wait(20) == []
    run.mirror.close()
    remote = Remote(f"{place}/run")
    manifest = json.loads(remote.read("checkpoints/step-00000010/manifest.json") or b"")
    manifest["files"]["../../../out.safetensors"] = manifest["files"]["model.safetensors"]
    remote.write("checkpoints/step-00000010/manifest.json", json.dumps(manifest).encode())
    told: list[str] = []
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        restore(f"{place}/run", tmp_path / "back", told.append)
    assert told == ["step-00000010: left out, its manifest.json is damaged"]
    assert not (tmp_path / "back").exists()


def test_another_run_of_the_same_name_is_refused(run: Run, place: str, tmp_path: Path) -> None:
    run.mirror.begin(may_begin=True)
    run.save(10)
    assert run.mirror.wait(20) == []
    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other" / "run", place, started="later")
    with pytest.raises(UserError, match=r"holds another run of this name\n  fix: choose another --out"):
        other.mirror.begin(may_begin=True)
    other.save(20)
    other.mirror.close()
    assert there(place) == ["step-00000010"], "the other run's checkpoints were touched"


def test_a_place_that_only_a_strangers_folder_names_is_not_written(run: Run, place: str) -> None:
    with pytest.raises(UserError, match="holds nothing of this run") as error:
        run.mirror.begin(may_begin=False)
    assert error.value.fix == f"--set loop.checkpoint_mirror={place} on the command line says that it is meant"
    assert there(place) == []


def test_a_folder_that_is_gone_removes_nothing_there(run: Run, place: str) -> None:
    run.mirror.begin(may_begin=True)
    run.save(10)
    assert run.mirror.wait(20) == []
    (run.folder / "checkpoints").rename(run.folder / "gone")
    run.mirror.poke()
    assert run.mirror.wait(20) == []
    assert there(place) == ["step-00000010"]


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("nonsense://x", ("loop.checkpoint_mirror = nonsense://x\n", "s3://BUCKET/FOLDER, or a path")),
        ("file::memory://x", ("within one another",)),
        ("{run}/..", ("where the run itself is",)),
        ("{run}/inside", ("where the run itself is",)),
    ],
)
def test_a_place_that_cannot_be_is_refused(url: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(RecipeError) as error:
        Mirror(url.format(run=folder), folder)
    for part in parts:
        assert part in str(error.value), error.value


@pytest.mark.parametrize(("url", "fix"), [("s3://bucket/runs", "pip install 'paceline[mirror]'"), ("gs://b/r", "")])
def test_a_package_that_is_missing_is_named(
    url: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: str) -> None:
        raise ImportError("Please install somefs")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(RecipeError, match="Please install somefs") as error:
        Mirror(url, tmp_path)
    assert error.value.what == f"loop.checkpoint_mirror = {url}"
    assert error.value.fix == fix


def test_what_another_restore_left_is_no_checkpoint_of_this_run(run: Run, place: str, tmp_path: Path) -> None:
    run.mirror.begin(may_begin=True)
    run.save(10)
    assert run.mirror.wait(20) == []
    unfinished = tmp_path / ".back.restoring" / "checkpoints"
    unfinished.mkdir(parents=True)
    other = CheckpointStore(unfinished, 1)
    other.save(90, {"model": {"w": torch.zeros(5)}, "optimizer": {"m": torch.zeros(2)}}, {"step": 90})
    assert restore(f"{place}/run", tmp_path / "back", lambda _: None) == 10
    assert CheckpointStore(tmp_path / "back" / "checkpoints", 1).steps() == (10,)


def test_a_run_is_not_restored_over_another(run: Run, place: str, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is there already"):
        restore(f"{place}/run", run.folder, lambda _: None)
    with pytest.raises(RunFolderError, match="no run is there"):
        restore(f"{place}/nothing", tmp_path / "back", lambda _: None)
    assert sorted(os.listdir(tmp_path)) == ["run"]
