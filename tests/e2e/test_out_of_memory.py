"""A device that is full: the run ends with what would fit, or goes on in smaller micro-batches, and nothing is lost."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import transformers.models.bert.modeling_bert  # noqa: F401
import yaml

# this one and those above are loaded so that the server from which ranks are forked loads them, once
import paceline.run.run  # noqa: F401
from paceline.contract.errors import MemoryFullError, Preempted, RecipeError
from paceline.engine.step import Step
from paceline.engine.torch_engine import TorchEngine
from paceline.recipe import Recipe
from paceline.run.checkpoint.store import CheckpointStore
from paceline.seams import StepInput
from paceline.strategies.deepspeed.engine import DeepSpeedEngine
from paceline.strategies.pipeline.passes import PipelinePasses
from paceline.verbs.train import resume, train
from tests.e2e.commands import in_process
from tests.e2e.ranks import Ended, Trouble, on_ranks, one_rank
from tests.e2e.whole_runs import Disturb, outcome, recipe
from tests.testing.distributed import run_processes
from tests.testing.marks import slow_except
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config, write_tiny_model

pytestmark = pytest.mark.timeout(120)

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.73 GiB of which 1.25 GiB is free."
    " Process 7 has 30.48 GiB memory in use. Of the allocated memory 28.50 GiB is allocated by PyTorch, and 1.00 GiB is"
    " reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
)

SGD = {"type": "sgd", "lr": 0.05}


@dataclass(frozen=True, kw_only=True)
class Full:
    """Memory for so many samples of a micro-batch, and no more."""

    most: int
    from_step: int = 1
    in_backward: bool = False
    """Else at the end of the forward pass, when running statistics have changed already."""
    evaluations: bool = False
    """Of an evaluation's batch, instead."""
    rank: int = 0
    """Whose memory it is."""


def fill(full: Full, patch: pytest.MonkeyPatch) -> None:
    """Plant the error in this process."""
    micro, accumulate, infer = Step.micro, TorchEngine.accumulate, TorchEngine.infer
    passes, theirs = PipelinePasses.__call__, DeepSpeedEngine.accumulate
    at = {"step": 0}

    def noted(engine: Any, given: StepInput) -> Any:
        at["step"] = given.step + 1
        return accumulate(engine, given)

    def filled(step: Any, batch: Any, denominator: Any, first: bool, last: bool) -> Any:
        return micro(replace(step, objective=partial(full_objective, step.objective)), batch, denominator, first, last)

    def staged(given: Any, step: Any, *others: Any) -> Any:
        return passes(given, replace(step, objective=partial(full_objective, step.objective)), *others)

    def sharded(engine: Any, given: StepInput) -> Any:
        at["step"] = given.step + 1
        with pytest.MonkeyPatch.context() as within:
            within.setattr(engine, "_objective", partial(full_objective, engine._objective))
            return theirs(engine, given)

    def full_objective(objective: Any, batch: Any) -> Any:
        loss, extra = objective(batch)
        if len(batch.labels) <= full.most or max(1, at["step"]) < full.from_step or full.evaluations:
            return loss, extra
        if not full.in_backward:
            _raise(loss)
        loss.register_hook(_raise)
        return loss, extra

    def inferred(engine: Any, batch: Any) -> Any:
        if full.evaluations and len(batch.labels) > full.most:
            raise torch.OutOfMemoryError(MESSAGE)
        return infer(engine, batch)

    patch.setattr(TorchEngine, "accumulate", noted)
    patch.setattr(Step, "micro", filled)
    patch.setattr(PipelinePasses, "__call__", staged)
    patch.setattr(DeepSpeedEngine, "accumulate", sharded)
    patch.setattr(TorchEngine, "infer", inferred)


def _raise(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


@pytest.fixture(scope="session")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "steady", tiny_bert_config())


@pytest.fixture
def meeting(tmp_path: Path) -> Callable[[], str]:
    """Where ranks meet; a new file at each call."""
    return (f"file://{tmp_path}/meeting-{number}" for number in itertools.count()).__next__


def kept(folder: Path) -> Recipe:
    return Recipe.load(folder / "recipe.yaml")


# one process


def test_the_error_says_where_what_was_held_and_what_would_fit(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    chosen = recipe(pretrained, reviews, loop={"checkpoint_every": 1})
    fill(Full(most=3, from_step=4), monkeypatch)
    with pytest.raises(MemoryFullError) as error:
        train(chosen, out=folder)
    assert error.value.exit_code == 2
    assert error.value.phase == "in the forward pass of step 4 of 12"
    assert error.value.settings == ("loop.micro_batch_size=2", "techniques.recompute=true")
    what, why, fix = error.value.what, error.value.why, error.value.fix
    assert what == "out of memory in the forward pass of step 4 of 12: loop.micro_batch_size = 4"
    assert "2 GiB more were asked for, and 1.25 GiB of 31.7 GiB were free; tensors took 28.5 GiB (parameters " in why
    for kind in ("gradients", "optimizer states", "activations and all else"):
        assert kind in why
    assert fix.startswith('settings=["loop.micro_batch_size=2"], or settings=["techniques.recompute=true"]; ')
    assert 'settings=["loop.on_oom=split"]' in fix
    assert f"then with one of them paceline train {folder} --resume goes on" in fix
    # nothing is lost, and what was advised is possible
    assert CheckpointStore(folder / "checkpoints", 1).newest().step == 3
    assert resume(folder, ["loop.micro_batch_size=2"]).steps == 12


def test_the_command_ends_with_2_and_no_traceback(
    steady: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(Full(most=3, in_backward=True), monkeypatch)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(steady, reviews).plain()))
    done = in_process(monkeypatch, capsys)("train", tmp_path / "recipe.yaml", "--out", tmp_path / "run")
    assert done.code == 2
    assert "out of memory in the backward pass of step 1 of 12: loop.micro_batch_size = 4" in done.err
    assert "start it again: no step was saved" in done.err
    assert "Traceback" not in done.err


def test_a_full_evaluation_names_its_own_setting(
    steady: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps before it are saved, though no checkpoint was due."""
    fill(Full(most=4, evaluations=True), monkeypatch)
    chosen = recipe(steady, reviews, loop={"evaluation_batch_size": 7})
    with pytest.raises(MemoryFullError) as error:
        train(chosen, out=tmp_path / "run")
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 1).newest().step == 5
    assert "then with one of them paceline train" in error.value.fix
    assert error.value.what.endswith("out of memory in an evaluation: loop.evaluation_batch_size = 7")
    assert error.value.settings == ("loop.evaluation_batch_size=4",)
    again = resume(tmp_path / "run", ["loop.evaluation_batch_size=4"])
    plain = train(recipe(steady, reviews, loop={"evaluation_batch_size": 4}), out=tmp_path / "plain")
    assert_same_training(again, plain)


def test_a_full_evaluation_is_made_again_in_smaller_batches(
    steady: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the run as at its end, of which the second knows what the first found out; and the folder keeps it."""
    loop = {"on_oom": "split"}
    with monkeypatch.context() as patch:
        fill(Full(most=2, evaluations=True), patch)
        found = train(recipe(steady, reviews, loop={**loop, "evaluation_batch_size": 7}), out=tmp_path / "run")
    plain = train(recipe(steady, reviews, loop={"evaluation_batch_size": 2}), out=tmp_path / "plain")
    assert_same_training(found, plain)
    warned = [notice for notice in found.notices if "out of memory" in notice]
    assert [notice.partition(", and it")[0] for notice in warned] == [
        f"out of memory in an evaluation: loop.evaluation_batch_size {sizes}" for sizes in ("7 -> 4", "4 -> 2")
    ]
    assert kept(tmp_path / "run").loop.evaluation_batch_size == 2
    (told,) = [d for d in found.decisions if d.setting == "loop.evaluation_batch_size"]
    assert told.value == "2"


def test_an_evaluation_that_cannot_be_smaller_is_given_up(
    steady: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(Full(most=0, evaluations=True), monkeypatch)
    chosen = recipe(steady, reviews, loop={"evaluation_batch_size": 2, "on_oom": "split"})
    with pytest.raises(MemoryFullError) as error:
        train(chosen, out=tmp_path / "run")
    assert error.value.what.endswith("out of memory in an evaluation: loop.evaluation_batch_size = 1")
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 1).newest().step == 5


@pytest.mark.slow
def test_a_run_split_from_the_start_is_the_run_of_small_micro_batches_bit_for_bit(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up, of the largest micro-batch, finds out before the first step; dropout has drawn nothing yet."""
    loop = {"evaluation_batch_size": 8}
    with monkeypatch.context() as patch:
        fill(Full(most=1), patch)
        split = train(recipe(pretrained, reviews, loop={**loop, "on_oom": "split"}), out=tmp_path / "split")
    plain = train(recipe(pretrained, reviews, loop={**loop, "micro_batch_size": 1}), out=tmp_path / "plain")
    assert_same_training(split, plain)
    warned = [notice for notice in split.notices if "out of memory" in notice]
    assert len(warned) == 2
    assert "out of memory in the forward pass of the warm-up: loop.micro_batch_size 4 -> 2" in warned[0]
    assert "loop.micro_batch_size 2 -> 1" in warned[1]
    assert kept(tmp_path / "split").loop.micro_batch_size == 1
    told = [d for d in split.decisions if d.setting == "loop.micro_batch_size"]
    assert told[-1].value == "1"
    assert "out of memory" in told[-1].reason


@pytest.mark.parametrize("in_backward", slow_except([False, True], True))
def test_a_run_split_at_a_step_is_the_run_resumed_there_with_small_micro_batches_bit_for_bit(
    in_backward: bool,
    pretrained: Path,
    reviews: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disturb: Disturb,
) -> None:
    """With dropout, which follows from seed, step and micro-batch alone."""
    with monkeypatch.context() as patch:
        fill(Full(most=2, from_step=4, in_backward=in_backward), patch)
        split = train(recipe(pretrained, reviews, loop={"on_oom": "split"}), out=tmp_path / "split")
    assert any("pass of step 4 of 12: loop.micro_batch_size 4 -> 2" in notice for notice in split.notices)
    disturb.signals[3] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(recipe(pretrained, reviews), out=tmp_path / "resumed")
    assert_same_training(split, resume(tmp_path / "resumed", ["loop.micro_batch_size=2"]))


def assert_same_training(one: Any, other: Any) -> None:
    found, expected = outcome(one), outcome(other)
    differing = [name for name, tensor in expected.tensors.items() if not torch.equal(tensor, found.tensors[name])]
    assert not differing, f"{len(differing)} tensors differ, such as {differing[:3]}"
    assert found.model == expected.model, "the saved model differs"
    losses = [[line["loss"] for line in run.lines] for run in (found, expected)]
    assert losses[0] == losses[1], "a loss differs"


def test_running_statistics_know_nothing_of_the_step_that_was_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturb: Disturb
) -> None:
    def images(**loop: Any) -> Recipe:
        return Recipe.parse(
            {
                "model": {"config": tiny_resnet_config()},
                "data": {"source": "builtin:random", "random": {"samples": 32, "image": (8, 8, 1)}},
                "loop": {"max_steps": 4, "batch_size": 8, **loop},
                "device": "cpu",
                "observe": {"console": "off", "report": False},
            }
        )

    with monkeypatch.context() as patch:
        fill(Full(most=3, from_step=3), patch)
        split = train(images(on_oom="split"), out=tmp_path / "split")
    assert [d.value for d in split.decisions if d.setting == "loop.micro_batch_size"] == ["2"]
    disturb.signals[2] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(images(), out=tmp_path / "resumed")
    assert_same_training(split, resume(tmp_path / "resumed", ["loop.micro_batch_size=2"]))


def test_a_run_that_was_split_is_stopped_and_resumed_as_any(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturb: Disturb
) -> None:
    chosen = recipe(pretrained, reviews, loop={"on_oom": "split"})
    with monkeypatch.context() as patch:
        fill(Full(most=2, from_step=4), patch)
        whole = train(chosen, out=tmp_path / "whole")
    fill(Full(most=2, from_step=4), monkeypatch)
    disturb.signals[7] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(chosen, out=tmp_path / "run")
    again = resume(tmp_path / "run")
    assert not [notice for notice in again.notices if "out of memory" in notice], "the size was forgotten"
    assert_same_training(again, whole)


# several ranks


def full_rank(rank: int, size: int, full: Full, *others: Any) -> Ended:
    """A rank of a run, in a process of its own; the memory of one of them is full."""
    if rank == full.rank:
        fill(full, pytest.MonkeyPatch())
    return one_rank(rank, size, *others)


def on_full_ranks(full: Full, meeting: str, asked: Recipe, folder: Path, size: int = 2) -> list[Ended]:
    return run_processes(full_rank, size, size, full, meeting, asked.plain(), folder, None, 30, timeout_seconds=60)


@pytest.mark.slow
def test_all_ranks_split_where_the_memory_of_one_is_full_at_the_start(
    pretrained: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    """With dropout: the same bits as small micro-batches from the start."""
    loop = {"max_steps": 4, "evaluation_batch_size": 8}
    chosen = recipe(pretrained, reviews, loop={**loop, "micro_batch_size": None, "on_oom": "split"})
    ended = on_full_ranks(Full(most=3, rank=1), meeting(), chosen, tmp_path / "split")
    assert [rank.error for rank in ended] == [None, None]
    assert ended[0].record is not None
    (warned,) = [notice for notice in ended[0].record.notices if "out of memory" in notice]
    told = "rank 1 ran out of memory in the forward pass of the warm-up: loop.micro_batch_size 5 -> 3 on every rank"
    assert warned.startswith(told)
    assert kept(tmp_path / "split").loop.micro_batch_size == 3
    plain = recipe(pretrained, reviews, loop={**loop, "micro_batch_size": 3})
    assert_same_training(ended[0].record, on_ranks(2, meeting(), plain, tmp_path / "plain")[0].record)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_all_ranks_evaluate_again_where_the_memory_of_one_is_full(
    rank: int, steady: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    loop = {"max_steps": 4, "micro_batch_size": 2}
    chosen = recipe(steady, reviews, loop={**loop, "evaluation_batch_size": 4, "on_oom": "split"})
    ended = on_full_ranks(Full(most=2, evaluations=True, rank=rank), meeting(), chosen, tmp_path / "split")
    assert [each.error for each in ended] == [None, None]
    assert ended[0].record is not None
    (warned,) = [notice for notice in ended[0].record.notices if "out of memory" in notice]
    told = f"rank {rank} ran out of memory in an evaluation: loop.evaluation_batch_size 4 -> 2 on every rank"
    assert warned.startswith(told)
    plain = recipe(steady, reviews, loop={**loop, "evaluation_batch_size": 2})
    assert_same_training(ended[0].record, on_ranks(2, meeting(), plain, tmp_path / "plain")[0].record)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_all_ranks_make_a_step_again_in_which_the_memory_of_one_is_full(
    rank: int, pretrained: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    """The other is adding up its gradients already, in the step's only micro-batch; that sum is thrown away."""
    loop = {"max_steps": 4, "evaluation_batch_size": 8, "micro_batch_size": None}
    chosen = recipe(pretrained, reviews, loop={**loop, "on_oom": "split"})
    ended = on_full_ranks(Full(most=3, rank=rank, from_step=3), meeting(), chosen, tmp_path / "split")
    assert [each.error for each in ended] == [None, None]
    assert ended[0].record is not None
    (warned,) = [notice for notice in ended[0].record.notices if "out of memory" in notice]
    assert warned.startswith(f"rank {rank} ran out of memory in the forward pass of step 3 of 4: ")
    stopped = Trouble(rank=1, signals={2: signal.SIGTERM})
    on_ranks(2, meeting(), recipe(pretrained, reviews, loop=loop), tmp_path / "resumed", trouble=stopped)
    resumed = on_ranks(2, meeting(), ["loop.micro_batch_size=3"], tmp_path / "resumed")
    assert_same_training(ended[0].record, resumed[0].record)


@pytest.mark.slow
def test_a_rank_that_is_full_amid_the_sums_ends_the_run_and_says_what_to_set(
    steady: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    loop = {"micro_batch_size": None, "on_oom": "split", "checkpoint_every": 1}
    chosen = recipe(steady, reviews, loop=loop)
    full = Full(most=3, rank=1, from_step=3, in_backward=True)
    other, failed = on_full_ranks(full, meeting(), chosen, tmp_path / "run")
    assert_told(other, failed, "out of memory in the backward pass of step 3 of 12: loop.micro_batch_size = 5")
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 1).newest().step == 2
    again = on_ranks(2, meeting(), ["loop.micro_batch_size=3"], tmp_path / "run")
    assert [rank.error for rank in again] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("on_oom", ["fail", "split"])
def test_where_not_even_one_sample_fits_the_full_rank_is_the_cause(
    on_oom: str, steady: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    chosen = recipe(steady, reviews, loop={"on_oom": on_oom})
    other, failed = on_full_ranks(Full(most=0, rank=1), meeting(), chosen, tmp_path / "run")
    place, size = ("step 1 of 12", 4) if on_oom == "fail" else ("the warm-up", 1)
    assert_told(other, failed, f"out of memory in the forward pass of {place}: loop.micro_batch_size = {size}")


def assert_told(other: Ended, failed: Ended, what: str, rank: int = 1) -> None:
    assert failed.error is not None
    assert other.error is not None
    assert (failed.error.exit_code, failed.error.kind) == (2, "MemoryFullError")
    assert str(failed.error).startswith(what)
    assert "techniques.recompute=true" in str(failed.error)
    assert (other.error.exit_code, other.error.kind) == (2, "LostRank")
    assert str(other.error).startswith(f"rank {rank} failed: {what}")


def test_split_is_refused_where_ranks_meet_in_every_block(
    steady: Path, reviews: Path, tmp_path: Path, meeting: Callable[[], str]
) -> None:
    chosen = recipe(steady, reviews, loop={"on_oom": "split"}, parallel={"strategy": "fsdp"})
    for rank in on_ranks(2, meeting(), chosen, tmp_path / "run"):
        assert rank.error is not None
        assert rank.error.exit_code == 2
        assert "loop.on_oom = split: has no effect" in str(rank.error)


def test_split_is_refused_where_no_step_is_made(steady: Path, reviews: Path, tmp_path: Path) -> None:
    chosen = recipe(steady, reviews, model={"train": "features"}, loop={"on_oom": "split"})
    with pytest.raises(RecipeError, match=r"model\.train = features makes no step"):
        train(chosen, out=tmp_path / "run")
