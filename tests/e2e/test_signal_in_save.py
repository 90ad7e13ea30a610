"""A signal that arrives while a checkpoint is being written: the write is seen through, and the run stops as asked."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import Preempted
from paceline.run.checkpoint import store
from paceline.run.checkpoint.store import CheckpointStore
from paceline.verbs.train import resume, train
from tests.e2e.whole_runs import assert_same, outcome, recipe
from tests.testing.marks import slow_except


@pytest.mark.parametrize("times", slow_except([1, 3], 3))
@pytest.mark.parametrize("at", ["save_file", "digest", "write_atomically"], ids=["a tensor", "a sum", "the marker"])
def test_a_save_under_way_is_seen_through(
    at: str, times: int, pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(pretrained, reviews, loop={"checkpoint_every": 4})
    whole = outcome(train(chosen, out=tmp_path / "undisturbed"))
    call, saves = getattr(store, at), list[int]()

    def signalled(*arguments: Any, **named: Any) -> Any:
        saves.append(1)
        if len(saves) == 2:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGTERM)
        return call(*arguments, **named)

    with monkeypatch.context() as during:
        during.setattr(store, at, signalled)
        with pytest.raises(Preempted, match="a checkpoint is saved"):
            train(chosen, out=tmp_path / "run")
    found = CheckpointStore(tmp_path / "run" / "checkpoints", 1).newest()
    assert found.notices == ()
    assert 4 <= found.step < 12
    assert_same(outcome(resume(tmp_path / "run")), whole)
