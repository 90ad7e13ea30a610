"""A loss or gradient that is no number: the step is not made, and the row is found."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.errors import NonFiniteError
from paceline.run.checkpoint.store import CheckpointStore
from paceline.run.step_records import MOST_SKIPPED
from paceline.techniques import precision
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


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss scaling as in fp16, which GPUs alone are given: whoever runs under it is the same on a CPU."""
    apply = precision.apply
    monkeypatch.setattr(precision, "apply", lambda build, mode: replace(apply(build, mode), loss_scaling=True))


@pytest.mark.usefixtures("scaled")
def test_under_loss_scaling_a_step_is_skipped_and_its_loss_left_out(
    pretrained: Path, scores: Path, tmp_path: Path, taken: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(pretrained, scores, task={"type": "regression", "loss": "tests.e2e.losses:cornered"})
    train(chosen, out=tmp_path / "good")
    sample = taken[2][2][5]  # of the third step, and of one in each epoch
    bad = [number for number, (_, _, samples) in enumerate(taken, 1) if sample in samples]
    monkeypatch.setattr(losses, "bad_target", sample / 64)
    record = train(chosen, out=tmp_path / "run")
    steps = lines(tmp_path / "run", "step")
    assert [step["step"] for step in steps if step["skipped"]] == bad
    assert record.applied_steps == len(steps) - len(bad)
    first = next(found for found in record.evaluations if found.step == 5)
    counted = [step for step in steps[:5] if not step["skipped"]]
    mean = sum(step["loss"] * step["counted"] for step in counted) / sum(step["counted"] for step in counted)
    assert first.train_metrics["loss"] == pytest.approx(mean, rel=1e-6)
    rates = [step["learning_rates"] for step in steps]
    assert rates[2] == rates[3], "the skipped step used up a learning rate"


@pytest.mark.usefixtures("scaled")
def test_a_loss_that_is_no_number_is_told_under_loss_scaling_too(
    pretrained: Path, scores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is finite: no scale has anything to do with it, and no step is skipped."""
    monkeypatch.setattr(losses, "bad_target", 7 / 64)
    chosen = recipe(pretrained, scores, task={"type": "regression", "loss": "tests.e2e.losses:undefined"})
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        train(chosen, out=tmp_path / "run")


@pytest.mark.usefixtures("scaled")
def test_under_loss_scaling_an_endless_overflow_ends_the_run(
    pretrained: Path, scores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_is_bad", lambda labels: torch.ones_like(labels, dtype=torch.bool))
    chosen = recipe(
        pretrained,
        scores,
        task={"type": "regression", "loss": "tests.e2e.losses:cornered"},
        loop={"epochs": 99, "max_steps": MOST_SKIPPED + 9, "evaluate_every": "never"},
    )
    with pytest.raises(NonFiniteError, match="training has diverged") as error:
        train(chosen, out=tmp_path / "run")
    assert error.value.step == MOST_SKIPPED + 1
    steps = lines(tmp_path / "run", "step")
    assert [step["skipped"] for step in steps] == [True] * MOST_SKIPPED


def test_a_run_that_diverges_is_called_so(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    chosen = recipe(pretrained, reviews, optimizer={"lr": 1e30, "clip_norm": None}, schedule={"warmup": 0})
    with pytest.raises(NonFiniteError, match="training has diverged") as error:
        train(chosen, out=tmp_path / "run")
    assert 'settings=["optimizer.lr=1e+29"]' in str(error.value)
