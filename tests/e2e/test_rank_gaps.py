"""Statements about runs on several ranks that no other test holds: however they meet, and whatever is combined."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401
import transformers.models.bert.modeling_bert  # noqa: F401
import yaml

# this one and those above are loaded so that the server from which ranks are forked loads them, once
import paceline.run.run  # noqa: F401
from paceline.run.checkpoint.store import CheckpointStore
from tests.e2e.ranks import Ended, Trouble, alike, on_ranks
from tests.e2e.test_ranks_processes import PACELINE, started
from tests.e2e.whole_runs import Outcome, assert_same, outcome, recipe
from tests.testing.ports import free_port
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("forked_interpreters")]

SGD = {"type": "sgd", "lr": 0.05}


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout, of which every rank would draw its own."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "steady", tiny_bert_config())


@pytest.fixture
def meeting(tmp_path: Path) -> Callable[[], str]:
    """Where ranks meet; a new file at each call."""
    return (f"file://{tmp_path}/meeting-{number}" for number in itertools.count()).__next__


def finished(ended: list[Ended]) -> Outcome:
    """What a run left that ended well on every rank."""
    assert [rank.error for rank in ended] == [None] * len(ended)
    assert ended[0].record is not None
    return outcome(ended[0].record)


@pytest.mark.slow
def test_wherever_ranks_meet_the_result_has_the_same_bits(
    pretrained: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, which follows from seed, step and rank alone."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    chosen = recipe(pretrained, reviews, loop={"max_steps": 6})
    found = [
        finished(on_ranks(2, where, chosen, tmp_path / f"run-{number}"))
        for number, where in enumerate([meeting(), f"tcp://127.0.0.1:{free_port()}", "env://"])
    ]
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_splits_of_fewer_samples_than_ranks_are_measured_as_by_one(
    strategy: str, steady: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    """One batch to be evaluated, by four ranks; with shards all of them have to run it."""
    for name, rows in (("one", slice(1, 2)), ("seven", slice(2, 9))):
        header, *lines = reviews.read_text().splitlines()
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *lines[rows]]) + "\n")
    data = {"validation": str(tmp_path / "one.csv"), "test": str(tmp_path / "seven.csv"), "splits": {}}
    chosen = recipe(
        steady,
        reviews,
        data=data,
        optimizer=SGD,
        loop={"max_steps": 4, "evaluate_every": 2, "evaluation_batch_size": 3},
        task={"metrics": ["accuracy"]},
    )
    alone = finished(on_ranks(1, "", chosen, tmp_path / "alone"))
    sharing = chosen.with_settings([f"parallel.strategy={strategy}"])
    four = finished(on_ranks(4, meeting(), sharing, tmp_path / "four"))
    assert [e["samples"] for e in four.progress["evaluations"]] == [1, 1]
    alike(four, alone)


@pytest.mark.slow
def test_shards_of_a_number_that_the_ranks_do_not_divide_are_refused_and_nothing_is_lost(
    steady: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    """Saved by two groups of two; three ranks are no whole number of groups."""
    chosen = recipe(steady, reviews, optimizer=SGD, parallel={"strategy": "fsdp", "shard_size": 2})
    on_ranks(4, meeting(), chosen, tmp_path / "run", trouble=Trouble(rank=3, signals={5: signal.SIGTERM}))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refused = on_ranks(3, meeting(), [], tmp_path / "run")
    for rank in refused:
        assert rank.error is not None
        assert rank.error.exit_code == 2
        assert "parallel.shard_size = 2" in str(rank.error)
        assert "parallel.shard_size=null" in str(rank.error)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    mended = finished(on_ranks(3, meeting(), ["parallel.shard_size=null"], tmp_path / "run"))
    alike(mended, finished(on_ranks(1, "", chosen, tmp_path / "alone")))


@pytest.mark.slow
def test_a_signal_to_a_rank_of_shards_stops_all_and_no_bit_is_lost(
    pretrained: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    """Between the micro-batches of a step, whose gradients are whole on each rank; with dropout."""
    chosen, folder = recipe(pretrained, reviews, parallel={"strategy": "fsdp"}), tmp_path / "run"
    ended = on_ranks(2, meeting(), chosen, folder, trouble=Trouble(rank=1, signals={7: signal.SIGUSR1}))
    for rank in ended:
        assert rank.error is not None
        assert rank.error.exit_code == 75
        assert str(rank.error).startswith("stopped by SIGUSR1 to rank 1 after step 7 of 12")
    assert CheckpointStore(folder / "checkpoints", 1).steps()[-1] == 7
    again = finished(on_ranks(2, meeting(), [], folder))
    assert_same(again, finished(on_ranks(2, meeting(), chosen, tmp_path / "undisturbed")))


@pytest.mark.slow
def test_sums_are_taken_in_the_number_format_of_the_recipe(
    steady: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    plain = recipe(steady, reviews, optimizer=SGD, parallel={"strategy": "ddp"})
    narrow = plain.with_settings(["parallel.reduce_dtype=bf16"])
    found, whole = (
        finished(on_ranks(2, meeting(), chosen, tmp_path / name))
        for name, chosen in (("narrow", narrow), ("plain", plain))
    )
    assert found.model != whole.model, "nothing was rounded"
    for split, metrics in whole.final.items():
        assert found.final[split]["loss"] == pytest.approx(metrics["loss"], rel=0.05), split


@pytest.mark.slow
def test_a_scaled_learning_rate_follows_the_global_batch_not_the_ranks(
    steady: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    # a third of the others' rate: scaled by 3 it enlarges rounding no more than theirs
    plain = recipe(steady, reviews, optimizer={"type": "sgd", "lr": 0.05 / 3})
    scaled = plain.with_settings(["optimizer.lr_scaling=linear", "optimizer.lr_scaling_base=3"])
    alone = on_ranks(1, "", scaled, tmp_path / "alone")
    two = on_ranks(2, meeting(), scaled, tmp_path / "two")
    alike(finished(two), finished(alone))
    assert finished(alone).model != finished(on_ranks(1, "", plain, tmp_path / "plain")).model, "nothing was scaled"
    for ended in (alone, two):
        assert ended[0].record is not None
        told = [str(d.reason) for d in ended[0].record.decisions if d.setting == "optimizer.lr_scaling"]
        assert len(told) == 1, "scaled in silence"
        assert "x 3" in told[0]


@pytest.mark.slow
def test_rows_that_cannot_be_used_are_put_aside_once(
    steady: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.csv"
    data.write_text(reviews.read_text() + ",good\nfine,\n")
    chosen = recipe(steady, data, data={"on_bad_row": "skip", "bad_rows_allowed": 0.2}, optimizer=SGD)
    four = finished(on_ranks(4, meeting(), chosen, tmp_path / "four"))
    # what was encoded before is taken as it is, and its rows are not looked at again
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache of one"))
    alone = finished(on_ranks(1, "", chosen, tmp_path / "alone"))
    alike(four, alone)
    aside = [(tmp_path / run / "quarantine.jsonl").read_text() for run in ("four", "alone")]
    assert aside[0] == aside[1]
    assert [json.loads(line)["line"] for line in aside[0].splitlines()] == [62, 63]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for ranks in /proc")
def test_variables_set_by_hand_and_the_old_name_of_torchrun_give_the_same_bits(
    pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    chosen = recipe(pretrained, reviews, loop={"max_steps": 4})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(chosen.plain()))
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with ExitStack() as both:
        command = [*PACELINE, "recipe.yaml", "--out", "by-hand", "--timeout", "60"]
        ranks = [
            both.enter_context(started(tmp_path, *command, variables={**meeting, "RANK": str(rank)}))
            for rank in range(2)
        ]
        for rank in ranks:
            _, errors = rank.communicate(timeout=60)
            assert (rank.returncode, errors) == (0, "")
    agent: list[Any] = ["-W", "ignore", "-m", "torch.distributed.launch", "--nproc-per-node", "2"]
    agent += ["--master-port", str(free_port()), *PACELINE, "recipe.yaml", "--out", "launch"]
    with started(tmp_path, *agent) as launch:
        _, errors = launch.communicate(timeout=60)
        assert launch.returncode == 0, errors
    one, other = ((tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("by-hand", "launch"))
    assert one == other
