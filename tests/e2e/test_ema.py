"""Runs that keep a moving average of the weights: what is measured, what is saved, and how they go on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.contract.errors import Preempted, RecipeError
from paceline.contract.records import RunRecord
from paceline.run.checkpoint.store import CheckpointStore
from paceline.verbs.evaluate import evaluate
from paceline.verbs.predict import predict
from paceline.verbs.train import resume, train
from tests.e2e.whole_runs import STEPS, Disturb, assert_same, lines, outcome, recipe

EMA: dict[str, Any] = {"decay": 0.8, "warmup": True}


def averaged(model: Path, data: Path, /, **changes: Any) -> Any:
    """``recipe`` with an average, so that trained weights and average differ."""
    optimizer = {"ema": EMA, **changes.pop("optimizer", {})}
    return recipe(model, data, optimizer=optimizer, **changes)


def stems(record: RunRecord, step: int | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and average in a checkpoint of the run: of a step, or the last one."""
    folder = Path(record.folder) / "checkpoints"
    chosen = CheckpointStore(folder, 1).newest()
    if step is not None and chosen.step != step:
        best = CheckpointStore(folder, 1).best()
        assert best is not None
        assert best.step == step
        chosen = best
    return {stem: chosen.tensors(stem) for stem in ("model", "ema")}


def saved(record: RunRecord) -> dict[str, torch.Tensor]:
    return load_file(Path(record.folder) / "model" / "model.safetensors")


def assert_is(record: RunRecord, stem: str, step: int | None = None) -> None:
    """That the saved model is made of the checkpoint's weights, or of their average, and of nothing else."""
    found = stems(record, step)
    model = saved(record)
    other = "ema" if stem == "model" else "model"
    differ = 0
    for name, average in found["ema"].items():
        assert torch.equal(model[name], found[stem][name]), name
        differ += not torch.equal(average, found["model"][name])
        assert torch.equal(model[name], found[other][name]) == torch.equal(average, found["model"][name]), name
    assert differ > 5, "weights and average are the same: this test saw nothing"


def test_the_average_is_measured_saved_and_used(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    record = train(averaged(pretrained, reviews, loop={"save_best": False}), out=tmp_path / "run")
    assert record.saved == "ema"
    assert_is(record, "ema")
    for found in record.evaluations:
        assert found.of == "ema"
        assert found.scores["ema"] == {"loss": found.loss, **found.metrics}
        assert found.scores["weights"]["loss"] != found.loss
    assert record.final_scores.keys() == {"validation", "test"}
    for split, scores in record.final_scores.items():
        assert scores["ema"] == record.final[split]
        again = evaluate(tmp_path / "run", split=split)
        assert again.loss == pytest.approx(record.final[split]["loss"], rel=1e-6)
        assert abs(again.loss - scores["weights"]["loss"]) > 1e-6
    predict(tmp_path / "run", reviews, out=tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().count("\n") > 60
    told = lines(tmp_path / "run", "evaluation")
    assert all(set(line["scores"]) == {"weights", "ema"} and line["of"] == "ema" for line in told)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["saved"] == "ema"


def test_the_trained_weights_are_those_of_a_run_without_an_average(
    pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    plain = train(recipe(pretrained, reviews, loop={"save_best": False}), out=tmp_path / "plain")
    with_it = train(
        averaged(pretrained, reviews, loop={"save_best": False, "save": "weights"}), out=tmp_path / "averaged"
    )
    assert with_it.saved == "weights"
    assert_is(with_it, "model")
    assert (tmp_path / "plain/model/model.safetensors").read_bytes() == (
        tmp_path / "averaged/model/model.safetensors"
    ).read_bytes()
    assert with_it.final == plain.final
    assert [{**found.metrics, "loss": found.loss} for found in plain.evaluations] == [
        found.scores["weights"] for found in with_it.evaluations
    ]
    assert lines(tmp_path / "plain", "step") == lines(tmp_path / "averaged", "step")


@pytest.mark.parametrize("save", ["ema", "weights"])
def test_the_best_step_and_its_weights_are_those_that_are_saved(
    save: str, pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    loop = {"evaluate_every": 2, "best_metric": "-loss", "save": save, "max_steps": STEPS}
    record = train(
        averaged(pretrained, reviews, optimizer={"lr": 5e-2}, schedule={"type": "constant"}, loop=loop),
        out=tmp_path / "run",
    )
    losses = {found.step: found.scores[save]["loss"] for found in record.evaluations}
    assert record.best_step == min(losses, key=lambda step: losses[step])
    assert record.final["validation"]["loss"] == losses[record.best_step]
    assert_is(record, "ema" if save == "ema" else "model", record.best_step)


def test_best_saves_whichever_scored_better(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    seen = set()
    # an average that is still the beginning is worse, one of weights that were thrown about is better
    for name, changes in {
        "late": {"optimizer": {"ema": 0.999}},
        "wild": {"optimizer": {"lr": 0.3, "ema": 0.9}, "schedule": {"type": "constant", "warmup": 0}},
    }.items():
        loop = {"save": "best", "best_metric": "-loss", "save_best": False}
        record = train(averaged(pretrained, reviews, loop=loop, **changes), out=tmp_path / name)
        scores = record.final_scores["validation"]
        better = min(scores, key=lambda of: scores[of]["loss"])
        assert record.saved == better
        assert record.final["test"] == record.final_scores["test"][better]
        assert_is(record, "ema" if better == "ema" else "model")
        for found in record.evaluations:
            assert found.loss == min(each["loss"] for each in found.scores.values())
        seen.add(better)
    assert seen == {"weights", "ema"}, "one of both was better each time: this test saw half"


def test_best_needs_something_to_compare_by(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    chosen = averaged(pretrained, reviews, loop={"save": "best"}, data={"splits": {"validation": 0, "test": 0.15}})
    with pytest.raises(RecipeError, match=r"loop.save = best(.|\n)*no validation split"):
        train(chosen, out=tmp_path / "run")


def test_a_run_without_evaluations_saves_the_average(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    chosen = averaged(
        pretrained,
        reviews,
        loop={"evaluate_every": "never"},
        data={"splits": {"validation": 0, "test": 0}},
    )
    record = train(chosen, out=tmp_path / "run")
    assert (record.saved, record.final) == ("ema", {})
    assert_is(record, "ema")


@pytest.mark.parametrize("precision", ["fp32", "pure_bf16"])
def test_a_resumed_run_goes_on_to_the_bit(
    precision: str, pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    chosen = averaged(
        pretrained,
        reviews,
        optimizer={"ema": {**EMA, "every": 2}},
        techniques={"precision": precision},
        loop={"evaluate_every": 3},
    )
    whole = outcome(train(chosen, out=tmp_path / "undisturbed"))
    assert whole.engine["ema"] == {"updates": STEPS}
    disturb.signals[5] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(chosen, out=tmp_path / "run")
    assert_same(outcome(resume(tmp_path / "run")), whole)


def test_an_average_may_begin_and_end_with_a_resume(
    pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    disturb.signals[4] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(recipe(pretrained, reviews), out=tmp_path / "run")
    disturb.signals[8] = signal.SIGTERM
    with pytest.raises(Preempted):
        resume(tmp_path / "run", settings=["optimizer.ema=0.8"])
    state = CheckpointStore(tmp_path / "run" / "checkpoints", 1).newest()
    assert state.state["engine"]["ema"] == {"updates": 4}, "counted from where it began"
    record = resume(tmp_path / "run", settings=["optimizer.ema=null"])
    assert record.saved == "weights"
    assert any("what is saved" in notice for notice in record.notices), record.notices


def test_both_are_told(pretrained: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = averaged(pretrained, reviews, observe={"console": "plain", "report": True}, loop={"save_best": False})
    record = train(chosen, out=tmp_path / "run")
    said = capsys.readouterr()
    text = said.out + said.err
    scores = record.evaluations[-1].scores
    line = next(line for line in text.splitlines() if line.startswith("validation ") and f"step {STEPS}" in line)
    for of in ("ema", "weights"):
        assert f"{scores[of]['loss']:.4f}" in line
        assert of in line
    assert "saved       the average of the weights (ema)" in text
    assert "not saved   weights, test: loss" in text
    page = (tmp_path / "run" / "report.html").read_text()
    for words in ("validation, ema", "validation, weights", "test, weights: not saved"):
        assert words in page, words


def test_a_run_too_short_for_its_average_says_so(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    short = train(averaged(pretrained, reviews, optimizer={"ema": {"decay": 0.999}}), out=tmp_path / "short")
    assert any("still the weights of the first" in notice for notice in short.notices), short.notices
    warmed = train(averaged(pretrained, reviews), out=tmp_path / "warmed")
    assert not any("still the weights" in notice for notice in warmed.notices)
