"""Real kills and a really full disk: whatever happens to the process, the newest committed checkpoint loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROLOGUE = """
import io, json, os, random, signal, sys, time, warnings
from pathlib import Path
import torch
from paceline.run.checkpoint import store as module
from paceline.run.checkpoint.store import CheckpointStore
from paceline.contract.errors import CheckpointError, PacelineError

torch.set_num_threads(1)
folder = Path(sys.argv[1])

def save(store, step, count=1000, **named):
    values = torch.full((count,), float(step))
    return store.save(step, {"model": {"w": values}, "optimizer": {"m": -values}}, {"step": step}, **named)

def check(store):
    "The newest checkpoint, which must be what was saved."
    found = store.newest()
    assert found.state == {"step": found.step}, found.state
    assert bool((found.tensors("model")["w"] == found.step).all()), "weights of another step"
    assert bool((found.tensors("optimizer")["m"] == -found.step).all()), "optimizer of another step"
    return found
"""

AT_EVERY_CALL = """
class Kill:
    def __init__(self, at, after):
        self.at, self.after, self.calls = at, after, 0

    def around(self, call):
        def wrapped(*arguments, **named):
            self.calls += 1
            result = call(*arguments, **named) if self.calls < self.at or self.after else None
            if self.calls == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        return wrapped

kills, outcomes = 0, []
for after in (False, True):
    for at in range(1, 300):
        store = CheckpointStore(folder / f"{at}-{after}", keep_last=1)
        save(store, 5, is_best=True)
        save(store, 10)
        child = os.fork()
        if child == 0:
            kill = Kill(at, after)
            for name in ("fsync", "replace", "rename", "mkdir", "open", "chmod", "unlink", "rmdir", "write"):
                setattr(os, name, kill.around(getattr(os, name)))
            io.open = kill.around(io.open)
            module.save_file = kill.around(module.save_file)
            save(store, 20)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found = check(store)
        outcomes.append(found.step)
        if not os.WIFSIGNALED(status):
            assert found.step == 20 and os.WEXITSTATUS(status) == 0
            break
        kills += 1
        assert found.step in (10, 20)
        assert not any("damaged" in notice for notice in found.notices), found.notices
        assert store.best().step == 5, "the best one was lost"
        # the run goes on: from where it was, over whatever the dead process left
        save(store, found.step + 1)
        assert check(store).step == found.step + 1
        names = sorted(os.listdir(store.folder))
        assert names == ["step-00000005", f"step-{found.step + 1:08d}"], names
print(json.dumps({"kills": kills, "old": outcomes.count(10), "new": outcomes.count(20)}))
"""

AT_RANDOM_TIMES = """
rng = random.Random(int(sys.argv[2]))
store = CheckpointStore(folder, keep_last=2)
hidden = kills = progress = 0
acknowledged = 0
for round in range(int(sys.argv[3])):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            step = check(store).step if acknowledged else 0
            while True:
                step += 1
                save(store, step, count=500_000)
                os.write(writer, step.to_bytes(8, "little"))
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    first = os.read(reader, 8)  # at least one save a round, then killed in the middle of a later one
    time.sleep(rng.uniform(0, 0.06))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the saving process failed by itself"
    told = first
    while data := os.read(reader, 65536):
        told += data
    os.close(reader)
    acknowledged = int.from_bytes(told[-8:], "little")
    hidden += any(name.startswith(".") for name in os.listdir(folder))
    found = check(store)
    assert found.step in (acknowledged, acknowledged + 1), (found.step, acknowledged)
    assert not any("damaged" in notice for notice in found.notices), found.notices
    kills += 1
print(json.dumps({"kills": kills, "during a save": hidden, "steps": acknowledged}))
"""

FULL_DISK = """
module.require_room = lambda *arguments: None  # as when another program fills the disk meanwhile
store = CheckpointStore(folder / "checkpoints", keep_last=1)
save(store, 10, count=200_000)
free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
(folder / "filler").write_bytes(bytes(max(0, free - int(sys.argv[2]))))
try:
    save(store, 20, count=200_000)
    outcome = {"error": None}
except PacelineError as error:
    outcome = {"error": type(error).__name__, "why": error.why}
outcome["names"] = sorted(os.listdir(store.folder))
outcome["newest"] = check(store).step
(folder / "filler").unlink()
save(store, 30, count=200_000)
outcome["then"] = check(store).step
print(json.dumps(outcome))
"""


def run(script: str, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", PROLOGUE + script, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
def test_killed_at_every_call_of_a_save(tmp_path: Path) -> None:
    outcome = run(AT_EVERY_CALL, tmp_path)
    assert outcome["kills"] > 40, outcome
    assert outcome["old"] > 10, "no kill came before the commit: this test saw nothing"
    assert outcome["new"] > 2, "no kill came after the commit: this test saw nothing"


@pytest.mark.slow
def test_killed_at_random_times_while_saving_over_and_over(tmp_path: Path) -> None:
    outcome = run(AT_RANDOM_TIMES, tmp_path, 1, 50)
    assert outcome["kills"] == 50
    assert outcome["during a save"] > 5, f"hardly a kill fell into a save: {outcome}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 4096, 100_000, 900_000, 1_610_000])
def test_a_disk_that_is_really_full(small_disk: Path, left: int) -> None:
    """Full at the folder, at the state, within the first shard, within the second, and at the manifest."""
    outcome = run(FULL_DISK, small_disk, left)
    assert outcome["error"] == "DiskFullError", outcome
    assert "bytes needed" in outcome["why"]
    assert outcome["names"] == ["step-00000010"], "the partial checkpoint still takes up room"
    assert (outcome["newest"], outcome["then"]) == (10, 30)
