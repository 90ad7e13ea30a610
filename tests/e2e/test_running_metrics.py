"""Running metrics and the losses of ranks: what is told is what the steps came to, and nothing else changes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.verbs.train import train
from tests.e2e.ranks import on_ranks
from tests.e2e.whole_runs import STEPS, recipe
from tests.testing.tiny import tiny_bert_config, write_tiny_model

EVERY = 5
# an optimizer that divides by the size of a gradient blows up the rounding of those that are nothing but rounding
SGD = {"type": "sgd", "lr": 0.05}


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout, of which every rank would draw its own."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "steady", tiny_bert_config())


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def test_running_means_are_those_of_the_steps(
    steady: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observe = {"metrics_every": EVERY, "console": "plain", "report": False}
    train(recipe(steady, reviews, observe=observe), out=tmp_path / "run")
    steps, means = lines(tmp_path / "run", "step"), lines(tmp_path / "run", "metrics")
    assert [(mean["step"], mean["steps"]) for mean in means] == [(5, EVERY), (10, EVERY)]
    for mean in means:
        over = steps[mean["step"] - EVERY : mean["step"]]
        counted = sum(step["counted"] for step in over)
        loss = sum(step["loss"] * step["counted"] for step in over) / counted
        assert mean["metrics"] == pytest.approx({"loss": loss, "accuracy": sum(s["correct"] for s in over) / counted})
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in told] == [f" 5/{STEPS}".strip(), f"10/{STEPS}"]
    assert all("  accuracy " in line for line in told)


def test_each_ranks_loss_makes_up_the_loss_of_all(steady: Path, reviews: Path, tmp_path: Path) -> None:
    """Of nine samples over two ranks, as many as each has; the training is the same to the bit."""
    folders = {}
    for is_asked in (False, True):
        folder = folders[is_asked] = tmp_path / f"run-{is_asked}"
        chosen = recipe(
            steady, reviews, optimizer=SGD, observe={"rank_losses": is_asked, "console": "off", "report": False}
        )
        ended = on_ranks(2, f"file://{tmp_path}/meeting-{is_asked}", chosen, folder)
        assert [rank.error for rank in ended] == [None, None]
    plain, told = (lines(folder, "step") for folder in folders.values())
    assert {step["rank_losses"] for step in plain} == {None}
    assert [step["loss"] for step in plain] == [step["loss"] for step in told]
    differing = 0
    for step in told:
        first, second = step["rank_losses"]
        # some split of the samples makes the loss of all of the two
        splits = [(first * n + second * (step["counted"] - n)) / step["counted"] for n in range(1, step["counted"])]
        assert any(math.isclose(split, step["loss"], rel_tol=1e-5) for split in splits), step
        differing += first != second
    assert differing == len(told)


def test_one_process_has_no_ranks_to_tell_of(steady: Path, reviews: Path, tmp_path: Path) -> None:
    observe = {"rank_losses": True, "console": "off", "report": False}
    train(recipe(steady, reviews, loop={"max_steps": 4}, observe=observe), out=tmp_path / "run")
    assert lines(tmp_path / "run", "step")[0]["rank_losses"] is None
