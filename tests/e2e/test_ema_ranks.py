"""The moving average of the weights on two ranks: each has it whole, or that of its shards, and it is one rank's."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401
import transformers.models.bert.modeling_bert  # noqa: F401

# this one and those above are loaded so that the server from which ranks are forked loads them, once
import paceline.run.run  # noqa: F401
from tests.e2e.ranks import Ended, Trouble, alike, on_ranks
from tests.e2e.whole_runs import STEPS, Outcome, outcome, recipe
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = pytest.mark.timeout(120)

# an optimizer that divides by the size of a gradient blows up the rounding of those that are nothing but rounding
SGD: dict[str, Any] = {"type": "sgd", "lr": 0.05, "ema": {"decay": 0.8, "warmup": True, "every": 2}}


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout, of which every rank would draw its own."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "steady", tiny_bert_config())


def finished(ended: list[Ended]) -> Outcome:
    assert [rank.error for rank in ended] == [None] * len(ended)
    records = [rank.record for rank in ended]
    assert records[0] is not None
    for other in records[1:]:
        assert other is not None
        assert (other.saved, other.final, other.final_scores) == (
            records[0].saved,
            records[0].final,
            records[0].final_scores,
        )
    assert records[0].saved == "ema"
    return outcome(records[0])


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_ranks_keep_the_average_of_one(strategy: str, steady: Path, reviews: Path, tmp_path: Path) -> None:
    """The two are stopped at step 7, and one goes on: shards are saved whole."""
    loop = {"micro_batch_size": 2, "save_best": True, "best_metric": "-loss", "evaluate_every": 3}
    chosen = recipe(steady, reviews, optimizer=SGD, loop=loop, parallel={"strategy": strategy})
    meetings = (f"file://{tmp_path}/meeting-{number}" for number in range(9))
    alone = finished(on_ranks(1, next(meetings), chosen, tmp_path / "one"))
    two = finished(on_ranks(2, next(meetings), chosen, tmp_path / "two"))
    assert two.engine["ema"] == {"updates": STEPS}
    assert any(name.startswith("ema/") for name in two.tensors)
    alike(two, alone)
    trouble = Trouble(rank=1, signals={7: signal.SIGTERM})
    stopped = on_ranks(2, next(meetings), chosen, tmp_path / "stopped", trouble=trouble)
    assert {rank.error and rank.error.exit_code for rank in stopped} == {75}, [rank.error for rank in stopped]
    alike(finished(on_ranks(1, next(meetings), [], tmp_path / "stopped")), alone)
    stopped = on_ranks(
        1, next(meetings), chosen, tmp_path / "other", trouble=Trouble(rank=0, signals={7: signal.SIGTERM})
    )
    assert stopped[0].error is not None
    alike(finished(on_ranks(2, next(meetings), [], tmp_path / "other")), alone)
