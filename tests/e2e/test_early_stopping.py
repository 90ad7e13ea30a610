"""The run that ends by itself, and the model that it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.verbs.evaluate import evaluate
from paceline.verbs.train import train
from tests.e2e.whole_runs import recipe


@pytest.mark.parametrize(("min_delta", "steps"), [(0.0, 8), (100.0, 6)], ids=["any gain", "too small a gain"])
def test_a_gain_that_is_too_small_is_none_but_its_model_is_the_best(
    min_delta: float, steps: int, pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    """A loss that falls from evaluation to evaluation, never by 100."""
    chosen = recipe(
        pretrained,
        reviews,
        schedule={"type": "constant", "warmup": 0},
        loop={
            "max_steps": 8,
            "evaluate_every": 2,
            "best_metric": "-loss",
            "early_stopping": {"patience": 2, "min_delta": min_delta},
        },
    )
    record = train(chosen, out=tmp_path / "run")
    losses = [found.loss for found in record.evaluations if found.split == "validation"]
    assert losses == sorted(losses, reverse=True), "the loss did not fall, so that this test saw nothing"
    assert (record.steps, record.best_step) == (steps, steps)


def test_the_saved_model_is_the_best_one(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    """Validation loss, which gets worse when the model has learned sixty texts by heart."""
    chosen = recipe(
        pretrained,
        reviews,
        optimizer={"lr": 0.02},
        schedule={"type": "constant", "warmup": 0},
        loop={
            "epochs": 40,
            "max_steps": None,
            "evaluate_every": 3,
            "best_metric": "-loss",
            "early_stopping": {"patience": 4},
        },
    )
    record = train(chosen, out=tmp_path / "run")
    losses = {found.step: found.loss for found in record.evaluations}
    assert record.status == "stopped early"
    assert record.steps < 200, "it went on to its end"
    assert record.best_step == min(losses, key=lambda step: losses[step])
    assert record.steps == record.best_step + 4 * 3, "patience is counted from the best evaluation"
    assert record.final["validation"]["loss"] == losses[record.best_step]
    last = max(losses)
    assert losses[last] != losses[record.best_step], "last and best are the same: this test saw nothing"
    for split in ("validation", "test"):
        found = evaluate(tmp_path / "run", split=split)
        assert {"loss": found.loss, **found.metrics} == pytest.approx(dict(record.final[split]), rel=1e-6)


def test_a_best_metric_that_is_undefined_chooses_no_step_and_stops_nothing(
    pretrained: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Validation has one class, so that there is no ROC curve: counted as 0, it ended the run after its patience."""
    lines = reviews.read_text(encoding="utf-8").splitlines()
    one_class = [line for line in lines[1:] if line.rsplit(",", 1)[1] == lines[1].rsplit(",", 1)[1]]
    validation = tmp_path / "validation.csv"
    validation.write_text("\n".join([lines[0], *one_class]) + "\n", encoding="utf-8")
    chosen = recipe(
        pretrained,
        reviews,
        data={"validation": str(validation), "splits": {"test": 0.15}},
        task={"metrics": ["accuracy", "auroc"]},
        loop={"max_steps": 8, "evaluate_every": 2, "best_metric": "auroc", "early_stopping": {"patience": 1}},
        observe={"console": "plain"},
    )
    record = train(chosen, out=tmp_path / "run")
    assert (record.status, record.steps, record.best_step) == ("finished", 8, None)
    notices = [notice for notice in record.notices if "auroc" in notice]
    assert notices == [
        "validation: auroc: undefined (NaN): all samples are of one class",
        "validation: loop.best_metric = auroc is NaN: no such evaluation is the best, and early stopping does not"
        " count it",
    ]
    printed = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines() if line.startswith("validation")]
    assert [line.count("auroc NaN") for line in lines] == [1] * 4
    assert "warning: validation: auroc: undefined (NaN)" in printed
    assert '"auroc": "NaN"' in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
