"""``paceline.train(..., processes=2)``: the ranks are the launcher's, and the run is that of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.contract.errors import UserError
from tests.e2e.whole_runs import recipe
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("forked_interpreters")]


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout, of which every rank would draw its own."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "steady", tiny_bert_config())


def test_ranks_started_from_python_train_as_one_process_does(steady: Path, reviews: Path, tmp_path: Path) -> None:
    chosen = recipe(steady, reviews, optimizer={"type": "sgd", "lr": 0.05}, loop={"max_steps": 4})
    record = paceline.train(chosen, out=tmp_path / "two", processes=2)
    alone = paceline.train(chosen, out=tmp_path / "one")
    assert (record.status, record.steps, Path(record.folder)) == ("finished", 4, tmp_path / "two")
    assert record.final["test"]["loss"] == pytest.approx(alone.final["test"]["loss"], rel=1e-4)
    assert '"num_ranks": 2' in (tmp_path / "two" / "manifest.json").read_text()
    with pytest.raises(UserError, match="the ranks ended with exit code 2"):
        paceline.train(chosen, out=tmp_path / "two", processes=2)  # a run is there


def test_what_ranks_cannot_have_is_refused_before_any_starts(steady: Path, reviews: Path) -> None:
    chosen = recipe(steady, reviews, device="auto")
    with pytest.raises(UserError, match="rows in memory are of this process"):
        paceline.train(chosen, {"text": ["a", "b"], "label": [0, 1]}, processes=2)
    with pytest.raises(UserError, match=r"--gpus '0'(.|\n)*from 1, or all"):
        paceline.train(chosen, gpus=0)
    with pytest.raises(UserError, match="--gpus 2 with --processes 2"):
        paceline.train(chosen, gpus=2, processes=2)
