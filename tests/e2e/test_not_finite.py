"""A loss or gradient that is no number: the step is not made, and the row is found."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import NonFiniteError
from paceline.run.checkpoint.store import CheckpointStore
from paceline.verbs.train import resume, train
from tests.e2e import losses
from tests.e2e.conftest import rows
from tests.e2e.whole_runs import Steps, lines, recipe


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    """Row i, on line i + 2, has the target i / 64."""
    path = tmp_path / "scores.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([row["text"], index / 64] for index, row in enumerate(rows()))
    return path


@pytest.mark.parametrize("loss", ["undefined", "cornered"])
def test_the_row_is_named_and_nothing_lost(
    loss: str, pretrained: Path, scores: Path, tmp_path: Path, taken: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(**changes: Any) -> Any:
        return recipe(pretrained, scores, task={"type": "regression", "loss": f"tests.e2e.losses:{loss}"}, **changes)

    train(chosen(), out=tmp_path / "good")
    sample = taken[2][2][5]  # of the third step, in its second micro-batch
    monkeypatch.setattr(losses, "bad_target", sample / 64)
    with pytest.raises(NonFiniteError) as error:
        train(chosen(loop={"checkpoint_every": 1}), out=tmp_path / "run")
    what = "the loss is nan" if loss == "undefined" else "the gradient norm is nan"
    assert f"step 3 (epoch 1): {what}" in str(error.value)
    assert "1 of its 9 samples" in str(error.value)
    assert f"scores.csv:{sample + 2}\n" in str(error.value)
    assert (error.value.exit_code, error.value.step, error.value.sample_ids) == (2, 3, (sample,))
    assert [line["step"] for line in lines(tmp_path / "run", "step")] == [1, 2]
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 1)
    assert store.newest().step == 2
    assert all(bool(tensor.isfinite().all()) for tensor in store.newest().tensors("model").values())
    monkeypatch.setattr(losses, "bad_target", None)
    assert resume(tmp_path / "run", trust_references=True).status == "finished"


def test_a_run_that_diverges_is_called_so(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    chosen = recipe(pretrained, reviews, optimizer={"lr": 1e30, "clip_norm": None}, schedule={"warmup": 0})
    with pytest.raises(NonFiniteError, match="training has diverged") as error:
        train(chosen, out=tmp_path / "run")
    assert "--set optimizer.lr=1e+29" in str(error.value)
