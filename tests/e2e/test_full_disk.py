"""The disk fills up at any byte of a run: an error that teaches, what was there before whole, and a way on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from paceline.contract import files
from paceline.run.checkpoint import store
from paceline.run_folder import has_checkpoint
from paceline.verbs.train import resume, train
from tests.e2e.commands import Paceline
from tests.e2e.whole_runs import Outcome, assert_same, outcome, recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DISK_BYTES = 8 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB, which may be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def leave(disk: Path, room: int) -> Path:
    """Fill the disk but for ``room`` bytes; the file that fills it."""
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, free(disk) - room)))
    return filler


@pytest.fixture
def told_plain(pretrained: Path, reviews: Path, tmp_path: Path) -> Path:
    """A recipe of everything that writes: checkpoints, metrics, TensorBoard, a report."""
    chosen = recipe(
        pretrained,
        reviews,
        loop={"checkpoint_every": 4, "keep_last": 2},
        name="filled",
        observe={"console": "plain", "report": True, "tensorboard": True},
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(chosen.plain()))
    return path


# where metrics find the disk full first, a checkpoint under way beside them finds it too, and warns
@pytest.mark.filterwarnings("default:.*the last checkpoint was not saved:UserWarning")
@pytest.mark.parametrize("checks", [True, False], ids=["room is looked at", "somebody else fills it meanwhile"])
def test_wherever_the_disk_fills_up(
    checks: bool,
    disk: Path,
    told_plain: Path,
    paceline: Paceline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = outcome(train(told_plain, out=tmp_path / "undisturbed"))
    if not checks:
        for module in (store, files):
            monkeypatch.setattr(module, "require_room", lambda *_: None)
    monkeypatch.setenv("PACELINE_CACHE", str(disk / "cache"))
    before = free(disk)
    train(told_plain, out=disk / "first")
    used = before - free(disk)
    subprocess.run(["rm", "-r", str(disk / "first"), str(disk / "cache")], check=True)
    codes = set()
    rooms = [*range(0, 64 * 1024, 8192), *range(64 * 1024, used, max(4096, used // 16)), 2 * used, before]
    for room in rooms:
        filler, folder = leave(disk, room), disk / f"run-{room}"
        done = paceline("train", told_plain, "--out", folder)
        codes.add(done.code)
        assert done.code in (0, 2), f"{room} bytes: {done}"
        if done.code == 2:
            assert "no room for" in done.err or "cannot be written" in done.err, f"{room} bytes: {done.err}"
            assert "  fix: " in done.err, done.err
        filler.unlink()
        assert_gone_on(folder, told_plain, whole, room)
        subprocess.run(["rm", "-rf", str(folder), str(disk / "cache")], check=True)
    assert codes == {0, 2}, "it was full every time, or never: this test saw nothing"


def assert_gone_on(folder: Path, told: Path, whole: Outcome, room: int) -> None:
    """With room again, the run is finished as a person would, and nothing half-written is left."""
    if (folder / "summary.json").exists():
        return
    if has_checkpoint(folder):
        record = resume(folder)
    else:
        subprocess.run(["rm", "-rf", str(folder)], check=True)
        record = train(told, out=folder)
    assert_same(outcome(record), whole)
    left = [path for path in folder.rglob(".*") if path.name != ".lock"]
    assert not left, f"{room} bytes: left behind {left}"
