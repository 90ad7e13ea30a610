"""Every call of a save to the operating system fails once: the older checkpoint stays, or the new one is whole."""

from __future__ import annotations

import errno
import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.errors import CheckpointError, DiskFullError, PacelineError, RunFolderError
from paceline.run.checkpoint import store as store_module
from paceline.run.checkpoint.store import CheckpointStore

CALLS = ("fsync", "replace", "rename", "mkdir", "open", "chmod", "listdir", "scandir", "unlink", "rmdir", "fdopen")


class Failpoint:
    """Counts calls and lets the ``at``-th of them fail, before or after it has taken effect."""

    def __init__(self, at: int, error: BaseException, after: bool = False) -> None:
        self.at, self.error, self.after, self.calls, self.hit = at, error, after, 0, ""

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls != self.at:
                return call(*arguments, **named)
            self.hit = name
            if self.after:
                call(*arguments, **named)
            raise self.error

        return wrapped


def save(store: CheckpointStore, step: int) -> None:
    tensors = {"model": {"w": torch.full((3,), float(step))}, "optimizer": {"m": torch.zeros(2)}}
    store.save(step, tensors, {"step": step})


def is_whole(store: CheckpointStore, step: int) -> bool:
    found = store.newest()
    return found.step == step == found.state["step"] and bool((found.tensors("model")["w"] == step).all())


def run_into(
    folder: Path, at: int, error: BaseException, after: bool = False
) -> tuple[Failpoint, CheckpointStore, BaseException | None]:
    store = CheckpointStore(folder / str(at), keep_last=1)
    save(store, 10)
    point = Failpoint(at, error, after)
    raised: BaseException | None = None
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # fsync and rename can be let through and then fail; a descriptor opened and then lost would be our own leak
        for name in ("fsync", "replace", "rename", "mkdir") if after else CALLS:
            patch.setattr(os, name, point.around(name, getattr(os, name)))
        if not after:
            patch.setattr(io, "open", point.around("io.open", io.open))
            patch.setattr(store_module, "save_file", point.around("save_file", store_module.save_file))
        try:
            save(store, 20)
        except (PacelineError, KeyboardInterrupt) as problem:
            raised = problem
    return point, store, raised


ERRORS = [
    (errno.EIO, CheckpointError),
    (errno.ENOSPC, DiskFullError),
    (errno.EROFS, RunFolderError),
    (errno.ENOENT, CheckpointError),
]


@pytest.mark.parametrize("after", [False, True], ids=["fails", "takes-effect-and-fails"])
@pytest.mark.parametrize(("number", "kind"), ERRORS, ids=[errno.errorcode[number] for number, _ in ERRORS])
def test_any_call_may_fail(tmp_path: Path, number: int, kind: type[PacelineError], after: bool) -> None:
    hits = set()
    committed = 0
    for at in range(1, 200):
        point, store, raised = run_into(tmp_path, at, OSError(number, os.strerror(number)), after)
        if not point.hit:
            break
        hits.add(point.hit)
        if raised is None:
            committed += 1
            assert is_whole(store, 20), f"call {at} ({point.hit}) failed in silence and lost the new checkpoint"
        else:
            assert isinstance(raised, kind), f"call {at} ({point.hit}): {raised!r}"
            assert is_whole(store, 10), f"call {at} ({point.hit}) cost the older checkpoint"
            assert os.listdir(store.folder) == ["step-00000010"], f"call {at} ({point.hit}) left something behind"
        save(store, 30)
        assert is_whole(store, 30), f"call {at} ({point.hit}) spoiled later saves"
        assert os.listdir(store.folder) == ["step-00000030"], f"call {at} ({point.hit}): leftovers stay for ever"
    else:
        pytest.fail("the save never ran to its end")
    assert hits >= {"fsync", "replace", "rename"}
    assert at > 10, "too few calls were seen for this test to mean anything"
    assert committed < at / 2


def test_ctrl_c_at_any_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    for at in range(1, 200):
        point, store, raised = run_into(tmp_path, at, KeyboardInterrupt())
        if not point.hit:
            break
        assert raised is not None, f"call {at} ({point.hit}) swallowed Ctrl-C"
        assert is_whole(store, 10) or is_whole(store, 20), f"call {at} ({point.hit})"
        save(store, 30)
        assert os.listdir(store.folder) == ["step-00000030"], f"call {at} ({point.hit}): leftovers stay for ever"
    assert at > 20


def test_the_order_on_disk_is_what_a_power_cut_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content before folder, folder before rename, rename before marker, and a sync after each."""
    events: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def path_of(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    def record(call: Callable[..., Any], verb: str) -> Callable[..., Any]:
        def recorded(source: Any, target: Any, **named: Any) -> None:
            events.append(f"{verb} {Path(target).name}")
            call(source, target, **named)

        return recorded

    def synced(descriptor: int) -> None:
        events.append(f"sync {path_of(descriptor).split('-')[0].split('.COMMITTED')[0]}")
        fsync(descriptor)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to name descriptors")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", record(rename, "rename to"))
    monkeypatch.setattr(os, "replace", record(replace, "replace"))
    save(CheckpointStore(tmp_path / "checkpoints", keep_last=1), 10)
    assert events == [
        "sync state.json",
        "sync model.safetensors",
        "sync optimizer.safetensors",
        "sync manifest.json",
        "sync .step",
        "rename to step-00000010",
        "sync checkpoints",
        "sync ",
        "replace COMMITTED",
        "sync step",
    ]
