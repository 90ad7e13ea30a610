"""Ranks that share one model, one of which is full: it ends the run, the others name it, and what is advised works."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.run.checkpoint.store import CheckpointStore
from tests.e2e.full_ranks import Done, by_hand, launched
from tests.e2e.test_out_of_memory import Full
from tests.e2e.whole_runs import recipe
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = pytest.mark.timeout(400)

SECONDS = 30
"""In which the others have ended too: far less than a rank waits for one that says nothing."""

WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "fsdp": {"strategy": "fsdp"},
}


@pytest.fixture
def place(reviews: Path, tmp_path: Path) -> Path:
    """A folder with a model without dropout."""
    write_tiny_model(tmp_path / "steady", tiny_bert_config())
    return tmp_path


def begun(place: Path, reviews: Path, **parallel: Any) -> Sequence[str]:
    """The words of a command that trains."""
    chosen = recipe(place / "steady", reviews, loop={"checkpoint_every": 1}, parallel=parallel)
    (place / "recipe.yaml").write_text(yaml.safe_dump(chosen.plain()))
    return ["train", "recipe.yaml", "--out", "run"]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "in_backward"), [("tensor", False), ("pipeline", True), ("fsdp", False)])
def test_ranks_started_by_hand_end_at_once_and_name_the_full_one(
    way: str, in_backward: bool, place: Path, reviews: Path
) -> None:
    full = Full(most=2, rank=1, from_step=3, in_backward=in_backward)
    failed, other = by_hand(place, full, begun(place, reviews, **WAYS[way]))
    what = f"out of memory in the {'back' if in_backward else 'for'}ward pass of step 3 of 12: loop.micro_batch_size = "
    for told in (failed, other):
        assert_told(told)
    assert what in failed.errors
    assert f"paceline: rank 1 failed: {what}" in other.errors
    assert other.ended - failed.ended < SECONDS


@pytest.mark.slow
def test_our_launcher_names_the_full_rank_and_what_it_advises_goes_on(place: Path, reviews: Path) -> None:
    full = Full(most=2, from_step=3, in_backward=True)
    done = launched(place, full, begun(place, reviews, **WAYS["pipeline"]))
    assert_told(done)
    assert "paceline: rank 0: out of memory in the backward pass of step 3 of 12: " in done.errors
    assert CheckpointStore(place / "run" / "checkpoints", 1).newest().step == 2
    again = launched(place, full, ["train", "run", "--resume", "--set", "loop.micro_batch_size=2"])
    assert again.code == 0, again.errors


def assert_told(done: Done) -> None:
    assert done.code == 2, done.errors
    assert "Traceback" not in done.errors
    assert "fix: --set loop.micro_batch_size=" in done.errors
    assert "on_oom" not in done.errors, "a change is advised that is refused here"
