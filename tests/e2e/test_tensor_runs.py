"""Whole runs whose ranks share each block: their results are one process's, whatever the mesh is when they go on."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo
import transformers.models.bert.modeling_bert

# this one and those above are loaded so that the server from which ranks are forked loads them, once
import paceline.run.run  # noqa: F401
from paceline.verbs.evaluate import evaluate
from tests.e2e.ranks import Ended, Trouble, alike, on_ranks
from tests.e2e.whole_runs import Outcome, assert_same, outcome, recipe
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = pytest.mark.timeout(120)

SGD = {"type": "sgd", "lr": 0.05}
CHANGES: dict[str, Any] = {"optimizer": SGD, "techniques": {"early_pooling": False}}


@pytest.fixture(scope="session")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout, of which every rank would draw its own."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "steady", tiny_bert_config())


@pytest.fixture
def meeting(tmp_path: Path) -> Any:
    """Where ranks meet; a new file at each call."""
    return (f"file://{tmp_path}/meeting-{number}" for number in itertools.count()).__next__


def finished(ended: list[Ended]) -> Outcome:
    assert [rank.error for rank in ended] == [None] * len(ended)
    assert ended[0].record is not None
    return outcome(ended[0].record)


def test_four_ranks_share_batch_and_blocks_and_leave_what_one_process_leaves(
    steady: Path, reviews: Path, tmp_path: Path, meeting: Any
) -> None:
    alone = on_ranks(1, meeting(), recipe(steady, reviews, **CHANGES), tmp_path / "alone")
    ended = on_ranks(4, meeting(), recipe(steady, reviews, **CHANGES, parallel={"tensor": 2}), tmp_path / "run")
    whole = finished(ended)
    alike(whole, finished(alone))
    assert whole.summary["execution"]["tensor"] == "2 shards of each block"
    assert whole.summary["execution"]["layout"] == "packed"
    for step, (_, _, samples) in enumerate(alone[0].samples):
        shares = [rank.shares[step] for rank in ended]
        assert shares[0] == shares[1], "ranks of one share of the batch have other samples"
        assert sorted(shares[0] + shares[2]) == sorted(samples), "not each sample once"
    # the saved model is plain
    kind = transformers.models.bert.modeling_bert.BertForSequenceClassification
    loaded = kind.from_pretrained(tmp_path / "run" / "model").state_dict()
    for name, tensor in kind.from_pretrained(tmp_path / "alone" / "model").state_dict().items():
        assert torch.allclose(loaded[name], tensor, atol=1e-5), name
    found = evaluate(tmp_path / "run")
    assert found.loss == pytest.approx(whole.final["test"]["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "settings"),
    [
        pytest.param(2, 1, (), id="alone", marks=pytest.mark.slow),
        pytest.param(2, 2, ("parallel.tensor=1",), id="ddp", marks=pytest.mark.slow),
        pytest.param(2, 4, (), id="two by two", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_goes_on_over_another_mesh(
    before: int, after: int, settings: Any, steady: Path, reviews: Path, tmp_path: Path, meeting: Any
) -> None:
    chosen = recipe(steady, reviews, **CHANGES, parallel={"tensor": 2})
    stopped = on_ranks(
        before, meeting(), chosen, tmp_path / "run", trouble=Trouble(rank=1, signals={7: signal.SIGTERM})
    )
    assert {rank.error and rank.error.exit_code for rank in stopped} == {75}, [rank.error for rank in stopped]
    resumed = finished(on_ranks(after, meeting(), list(settings), tmp_path / "run"))
    alike(resumed, finished(on_ranks(1, meeting(), recipe(steady, reviews, **CHANGES), tmp_path / "alone")))


@pytest.mark.slow
def test_a_stopped_run_goes_on_over_the_same_mesh_to_the_same_bits(
    pretrained: Path, reviews: Path, tmp_path: Path, meeting: Any
) -> None:
    """With dropout, of which each rank draws its own inside of blocks."""
    chosen = recipe(pretrained, reviews, parallel={"tensor": 2})
    undisturbed = finished(on_ranks(2, meeting(), chosen, tmp_path / "whole"))
    on_ranks(2, meeting(), chosen, tmp_path / "run", trouble=Trouble(rank=0, signals={5: signal.SIGTERM}))
    assert_same(finished(on_ranks(2, meeting(), [], tmp_path / "run")), undisturbed)


def test_ranks_that_are_no_multiple_are_refused_before_a_model_is_read(tmp_path: Path, meeting: Any) -> None:
    chosen = recipe(tmp_path / "no-model", tmp_path / "no-data", parallel={"tensor": 2})
    for rank in on_ranks(3, meeting(), chosen, tmp_path / "run"):
        assert rank.error is not None
        assert rank.error.exit_code == 2
        assert "3 processes, which are no whole number of groups of 2" in str(rank.error)
