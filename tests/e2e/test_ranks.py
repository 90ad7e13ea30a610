"""A whole run on any number of ranks is the run of one: same order, same result, same files, stopped and resumed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401
import transformers.models.bert.modeling_bert  # noqa: F401

# this one and those above are loaded so that the server from which ranks are forked loads them, once
import paceline.run.run  # noqa: F401
from paceline.contract.errors import Preempted
from paceline.machine.facts import Gpu, this_machine
from paceline.recipe import Recipe
from paceline.run.checkpoint.store import CheckpointStore
from paceline.run.run import shared_facts
from paceline.run_folder import RunFolder
from paceline.seams import World
from paceline.verbs import train as verb
from paceline.verbs.evaluate import evaluate
from tests.e2e.ranks import Ended, Trouble, alike, on_ranks, one_rank
from tests.e2e.whole_runs import STEPS, Outcome, assert_same, outcome, recipe
from tests.testing.distributed import run_distributed
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config, write_tiny_model

pytestmark = pytest.mark.timeout(120)

# an optimizer that divides by the size of a gradient blows up the rounding of those that are nothing but rounding
SGD = {"type": "sgd", "lr": 0.05}
VARIANTS: dict[str, dict[str, Any]] = {
    "packed, accumulated": {"optimizer": SGD, "loop": {"micro_batch_size": 2}},
    # the last batch of an epoch has 2 samples, fewer than there are ranks
    "padded": {
        "optimizer": SGD,
        "loop": {"batch_size": 8, "micro_batch_size": None},
        "techniques": {"packing": False},
    },
    "packed, sharded": {"optimizer": SGD, "parallel": {"strategy": "fsdp"}},
}


@pytest.fixture(scope="session")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout, of which every rank would draw its own."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "steady", tiny_bert_config())


@pytest.fixture
def meeting(tmp_path: Path) -> Any:
    """Where ranks meet; a new file at each call."""
    return (f"file://{tmp_path}/meeting-{number}" for number in itertools.count()).__next__


@pytest.fixture(scope="module")
def runs(steady: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What an undisturbed run leaves: (variant, ranks) -> folder and how its ranks ended; each is run once."""
    place = tmp_path_factory.mktemp("undisturbed")
    done: dict[tuple[str, int], tuple[Path, list[Ended]]] = {}

    def of(variant: str, size: int) -> tuple[Path, list[Ended]]:
        if (variant, size) not in done:
            folder = place / f"run-{len(done)}"
            chosen = recipe(steady, reviews, **VARIANTS[variant])
            with pytest.MonkeyPatch.context() as environment:
                # or a run would find what another one of the same test has encoded
                environment.setenv("PACELINE_CACHE", f"{folder}-cache")
                done[variant, size] = folder, on_ranks(size, f"file://{folder}-meeting", chosen, folder)
        return done[variant, size]

    return of


def finished(ended: list[Ended]) -> Outcome:
    """What the run left, of which all ranks tell the same."""
    assert [rank.error for rank in ended] == [None] * len(ended)
    records = [rank.record for rank in ended]
    told = [json.dumps([r.final, r.status, r.steps, r.best_step], default=dict) if r else "nothing" for r in records]
    assert told == told[:1] * len(ended)
    assert records[0] is not None
    assert records[0].final, "nothing was measured"
    return outcome(records[0])


def said(ended: list[Ended]) -> list[str]:
    """What all ranks failed of: they are users' errors."""
    assert {rank.error and rank.error.exit_code for rank in ended} == {2}, [rank.error for rank in ended]
    return [str(rank.error) for rank in ended]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_as_many_ranks_as_you_like(variant: str, size: int, runs: Any) -> None:
    alone, ended = runs(variant, 1)[1], runs(variant, size)[1]
    whole = finished(ended)
    alike(whole, finished(alone))
    assert whole.progress["samples"] == sum(len(samples) for _, _, samples in alone[0].samples)
    if variant != "padded":
        assert whole.progress["best_step"] not in (None, STEPS), "the best weights were the last: nothing was handed on"
    assert whole.summary["execution"]["layout"] == variant.partition(",")[0]
    assert whole.summary["execution"].get("parallel", "").startswith("fsdp") == variant.endswith("sharded")
    for step, (epoch, at, samples) in enumerate(alone[0].samples):
        for rank in ended:
            assert rank.samples[step] == (epoch, at, samples), "another batch"
        shares = [rank.shares[step] for rank in ended]
        assert sorted(itertools.chain(*shares)) == sorted(samples), "not each sample once"
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.slow
def test_only_the_first_rank_writes(runs: Any) -> None:
    def left(folder: Path) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))

    def kinds(folder: Path) -> list[tuple[str, int | None]]:
        read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return sorted((line["kind"], line.get("step")) for line in read)

    one, four = (runs("padded", size)[0] for size in (1, 4))
    assert left(four) == left(one)
    assert kinds(four) == kinds(one), "told twice, or not at all"
    (start,) = json.loads((four / "manifest.json").read_text())["starts"]
    assert (start["first_step"], start["num_ranks"]) == (0, 4)


@pytest.mark.slow
def test_texts_are_encoded_once_a_machine(runs: Any) -> None:
    _, ended = runs("packed, accumulated", 4)
    assert [rank.encodings > 0 for rank in ended] == [True, False, False, False]


@pytest.mark.parametrize("variant", ["packed, accumulated", pytest.param("packed, sharded", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(1, 2, marks=pytest.mark.slow), (4, 2)],
)
def test_resumed_on_another_number_of_ranks(
    variant: str, before: int, after: int, runs: Any, steady: Path, reviews: Path, tmp_path: Path, meeting: Any
) -> None:
    """Stopped at step 7, the second of an epoch's five."""
    chosen = recipe(steady, reviews, **VARIANTS[variant])
    stopped = on_ranks(
        before, meeting(), chosen, tmp_path / "run", trouble=Trouble(rank=before - 1, signals={7: signal.SIGTERM})
    )
    assert {rank.error and rank.error.exit_code for rank in stopped} == {75}, [rank.error for rank in stopped]
    resumed = on_ranks(after, meeting(), [], tmp_path / "run")
    _, undisturbed = runs(variant, 1)
    assert stopped[0].samples + resumed[0].samples == undisturbed[0].samples, "another order"
    for epoch in (0, 1):
        taken = [
            s for ranks in (stopped, resumed) for r in ranks for (e, *_), share in _zip(r) if e == epoch for s in share
        ]
        assert len(taken) == len(set(taken)) == 42, "not each sample once an epoch"
    alike(finished(resumed), finished(undisturbed))


def _zip(ended: Ended) -> Any:
    return zip(ended.samples, ended.shares, strict=True)


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        pytest.param(0, signal.SIGTERM, id="0-SIGTERM", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGUSR1, id="0-SIGUSR1", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGTERM, id="1-SIGTERM"),
        pytest.param(1, signal.SIGUSR1, id="1-SIGUSR1", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    number: signal.Signals, rank: int, pretrained: Path, reviews: Path, tmp_path: Path, meeting: Any
) -> None:
    """With dropout, of which each rank draws its own: on as many ranks as before the result has the same bits."""
    chosen, folder = recipe(pretrained, reviews), tmp_path / "run"
    ended = on_ranks(2, meeting(), chosen, folder, trouble=Trouble(rank=rank, signals={4: number}))
    stop = f"stopped by {number.name} to rank {rank} after step 4 of 12; a checkpoint is saved: "
    for each in ended:
        assert each.error is not None
        assert each.error.exit_code == 75
        assert str(each.error).startswith(stop)
        assert len(each.samples) == 4
    assert CheckpointStore(folder / "checkpoints", 1).steps() == (4,)
    assert (folder / "preempted").read_text() == f"{ended[0].error}\n"
    again = on_ranks(2, meeting(), [], folder)
    assert not (folder / "preempted").exists(), "the run was not preempted again"
    assert_same(finished(again), finished(on_ranks(2, meeting(), chosen, tmp_path / "undisturbed")))


@pytest.mark.slow
def test_a_stop_after_the_last_step_is_marked_too(steady: Path, reviews: Path, tmp_path: Path, meeting: Any) -> None:
    """All steps are on the disk by then, so that the measurement of the test split is interrupted at once."""
    # after one in each of three evaluations
    trouble = Trouble(rank=1, stop_in="paceline.engine.torch_engine.TorchEngine.infer", call=4)
    ended = on_ranks(2, meeting(), recipe(steady, reviews), tmp_path / "run", trouble=trouble)
    assert {rank.error and rank.error.exit_code for rank in ended} == {75}, [rank.error for rank in ended]
    assert str(ended[0].error).startswith("rank 1 was stopped"), ended[0].error
    assert (tmp_path / "run" / "preempted").read_text() == f"{ended[0].error}\n"
    resumed = on_ranks(2, meeting(), [], tmp_path / "run")
    assert finished(resumed).progress["step"] == STEPS
    assert resumed[0].samples == [], "steps were done again"
    assert not (tmp_path / "run" / "preempted").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "where",
    ["distributed.agree.agree", "prepare.preparation.outline", "prepare.preparation.import_class", "run.job.assemble"],
)
def test_a_stop_before_the_first_step_ends_all_ranks(
    rank: int, where: str, steady: Path, reviews: Path, tmp_path: Path, meeting: Any
) -> None:
    trouble = Trouble(rank=rank, stop_in=f"paceline.{where}")
    ended = on_ranks(2, meeting(), recipe(steady, reviews), tmp_path / "run", trouble=trouble)
    assert {rank.error and rank.error.exit_code for rank in ended} == {75}, [rank.error for rank in ended]
    assert "no step was made, so nothing is lost" in str(ended[rank].error)
    assert not (tmp_path / "run").exists(), "a run that never began left its folder"


@pytest.mark.parametrize("where", ["_facts_beside_imports", "choose"])
def test_a_stop_while_libraries_are_loaded(
    where: str, steady: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(verb, where)

    def signalled(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(verb, where, signalled)
    with pytest.raises(Preempted, match="stopped by SIGTERM; no step was made, so nothing is lost"):
        verb.train(recipe(steady, reviews), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_a_finished_run_is_made_longer_on_more_ranks(steady: Path, reviews: Path, tmp_path: Path, meeting: Any) -> None:
    """The change is put down at once: the checkpoint that all ranks read is replaced before the next step."""
    chosen = recipe(steady, reviews, optimizer=SGD)
    for size, name in ((2, "run"), (1, "alone")):
        finished(on_ranks(size, meeting(), chosen, tmp_path / name))
    longer = ["loop.epochs=4", "loop.max_steps=17"]
    four, alone = on_ranks(4, meeting(), longer, tmp_path / "run"), on_ranks(1, meeting(), longer, tmp_path / "alone")
    alike(finished(four), finished(alone))


@pytest.mark.slow
def test_running_statistics_are_the_same_on_all_ranks(tmp_path: Path, meeting: Any) -> None:
    """Each rank keeps those of its share; evaluated, and saved, are the weights with the mean of all."""
    chosen = Recipe.parse(
        {
            "model": {"config": tiny_resnet_config()},
            "data": {"source": "builtin:digits"},
            "loop": {"batch_size": 50, "max_steps": 8, "evaluate_every": 3, "save_best": False},
            "device": "cpu",
            "observe": {"console": "off", "report": False},
        }
    )
    ended = on_ranks(2, meeting(), chosen, tmp_path / "run")
    finished(ended)
    assert ended[0].record is not None
    found = evaluate(tmp_path / "run", split="test")
    assert ended[0].record.final["test"] == pytest.approx({"loss": found.loss, **found.metrics}, rel=1e-5)


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_all_ranks(steady: Path, reviews: Path, tmp_path: Path, meeting: Any) -> None:
    chosen = recipe(steady, reviews, loop={"checkpoint_every": 2})
    trouble = Trouble(rank=0, disk_full_at="a checkpoint of step 6")
    ended = on_ranks(2, meeting(), chosen, tmp_path / "run", trouble=trouble)
    messages = said(ended)
    assert "5 bytes free" in messages[0]
    assert messages[1].startswith("rank 0 failed: "), messages[1]
    assert "no room for a checkpoint of step 6" in messages[1]
    assert all(len(rank.samples) <= 8 for rank in ended), "it surfaced later than with the next checkpoint"
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 1).newest().step in (4, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "why"), [("ddp", "training has diverged"), ("fsdp", "cannot be tried where ranks meet")]
)
def test_training_that_diverges_is_told_alike_by_all(
    strategy: str, why: str, steady: Path, reviews: Path, tmp_path: Path, meeting: Any
) -> None:
    changes: dict[str, Any] = {
        "optimizer": {"type": "sgd", "lr": 1e30, "clip_norm": None},
        "schedule": {"warmup": 0},
        "parallel": {"strategy": strategy},
    }
    messages = said(on_ranks(2, meeting(), recipe(steady, reviews, **changes), tmp_path / "run"))
    assert all(why in message for message in messages), messages


@pytest.mark.slow
def test_early_stopping_ends_all_ranks_at_once(steady: Path, reviews: Path, tmp_path: Path, meeting: Any) -> None:
    changes: dict[str, Any] = {
        "optimizer": {"lr": 1e-12},
        "loop": {"evaluate_every": 2, "early_stopping": {"patience": 2}, "best_metric": "accuracy"},
    }
    ended = on_ranks(2, meeting(), recipe(steady, reviews, **changes), tmp_path / "run")
    finished(ended)
    assert [(r.record.status, r.record.steps) for r in ended if r.record] == [("stopped early", 6)] * 2


@pytest.mark.slow
def test_features_are_shared_out(steady: Path, reviews: Path, tmp_path: Path, meeting: Any) -> None:
    """The layer that is fitted, and what it is fitted on, have the bits of one process."""
    chosen = recipe(steady, reviews, model={"train": "features"}, loop={"max_steps": None, "epochs": 1})
    ended = [on_ranks(size, meeting(), chosen, tmp_path / f"run-{size}") for size in (1, 4)]
    one, four = ((tmp_path / f"run-{size}" / "model" / "model.safetensors").read_bytes() for size in (1, 4))
    assert one == four
    finals = [rank.record and rank.record.final for ranks in ended for rank in ranks]
    assert finals[0]
    assert finals == finals[:1] * 5


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_and_loses_nothing(
    runs: Any, steady: Path, reviews: Path, tmp_path: Path, meeting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the process that is left is given the time to find out by itself
    monkeypatch.setattr("tests.testing.distributed.GRACE_SECONDS", 20.0)
    chosen = recipe(steady, reviews, **VARIANTS["padded"]).with_settings(["loop.checkpoint_every=1"])
    trouble = Trouble(rank=1, signals={8: signal.SIGKILL}, report=tmp_path)
    with pytest.raises(Exception, match=r"rank 1 of 2 was killed by SIGKILL"):
        on_ranks(2, meeting(), chosen, tmp_path / "run", trouble=trouble)
    assert (tmp_path / "rank-0").read_text().startswith("rank 1 of 2 has not reached"), "it was ended, and did not end"
    newest = CheckpointStore(tmp_path / "run" / "checkpoints", 1).newest()
    assert newest.step in (6, 7), "of the step under way nothing is kept, of those before it all but one at most"
    assert not (tmp_path / "run" / "preempted").exists()
    alike(finished(on_ranks(2, meeting(), [], tmp_path / "run")), finished(runs("padded", 1)[1]))


def memory_of_gpus(world: World, device: str) -> list[int | None]:
    """In gibibytes, as a rank chooses by them; the machines' own are 80 and 24."""
    sizes = ((80, 80), (24,))[world.rank]
    gpus = tuple(Gpu(name="any", memory_bytes=size * 2**30) for size in sizes)
    chosen = Recipe.parse({"model": {"source": "m"}, "data": {"source": "d.csv"}, "device": device})
    found = shared_facts(chosen, replace(this_machine(), gpus=gpus), world)
    return [gpu.memory_bytes and gpu.memory_bytes // 2**30 for gpu in found.gpus]


def test_all_machines_choose_by_the_smallest_gpu() -> None:
    assert run_distributed(memory_of_gpus, 2, "cuda") == [[24, 24], [24]]
    assert run_distributed(memory_of_gpus, 2, "cpu") == [[80, 80], [24]]


# ---- bad input: every rank ends, by itself and soon, with the same thing to say


@pytest.mark.parametrize(
    ("rows", "settings", "parts"),
    [
        (5, [], ("4 processes, 3 training samples", "start 3 processes or fewer")),
        (60, ["loop.batch_size=3", "loop.micro_batch_size=3"], ("loop.batch_size = 3: 4 processes", "batch_size=4")),
    ],
    ids=["fewer samples", "smaller batch"],
)
def test_more_ranks_than_work(
    rows: int, settings: list[str], parts: tuple[str, ...], steady: Path, reviews: Path, tmp_path: Path, meeting: Any
) -> None:
    data = tmp_path / "few.csv"
    data.write_text("\n".join(reviews.read_text().splitlines()[: rows + 1]) + "\n")
    messages = said(on_ranks(4, meeting(), recipe(steady, data).with_settings(settings), tmp_path / "run"))
    for part in parts:
        assert all(part in message for message in messages), messages
    assert not (tmp_path / "run").exists(), "a run that never began left its folder"


def test_different_recipes(steady: Path, reviews: Path, tmp_path: Path, meeting: Any) -> None:
    trouble = Trouble(rank=1, settings=["optimizer.lr=0.5"])
    messages = said(on_ranks(2, meeting(), recipe(steady, reviews), tmp_path / "run", trouble=trouble))
    for message in messages:
        assert "the recipe: not the same on all ranks" in message
        assert "optimizer.lr is 0.01 on rank 0 and 0.5 on rank 1" in message
    assert not (tmp_path / "run").exists()


def test_different_folders(steady: Path, reviews: Path, tmp_path: Path, meeting: Any) -> None:
    trouble = Trouble(rank=1, out="elsewhere")
    messages = said(on_ranks(2, meeting(), recipe(steady, reviews), tmp_path / "run", trouble=trouble))
    for message in messages:
        assert "the command: not the same on all ranks" in message
        assert f'the run folder is "{tmp_path}/run" on rank 0 and "elsewhere" on rank 1' in message
    assert not (tmp_path / "run").exists()


def test_one_rank_resumes_and_the_other_begins(steady: Path, reviews: Path, tmp_path: Path, meeting: Any) -> None:
    chosen, folder = recipe(steady, reviews), tmp_path / "run"
    on_ranks(2, meeting(), chosen, folder, trouble=Trouble(rank=0, signals={4: signal.SIGTERM}))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    anew = Trouble(rank=1, out=str(tmp_path / "other"), begins=chosen.plain())
    for message in said(on_ranks(2, meeting(), [], folder, trouble=anew)):
        assert "--resume is true on rank 0 and false on rank 1" in message, message
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "other").exists()


@pytest.fixture
def two_places(reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with data.csv, and another one, ``elsewhere``, where a row of it differs."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data.csv").write_bytes(reviews.read_bytes())
    changed = reviews.read_text().replace("film 7:", "film seven:")
    (tmp_path / "elsewhere" / "data.csv").write_text(changed)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_different_data(steady: Path, two_places: Path, meeting: Any) -> None:
    trouble = Trouble(rank=1, folder="elsewhere")
    messages = said(on_ranks(2, meeting(), recipe(steady, Path("data.csv")), two_places / "run", trouble=trouble))
    for message in messages:
        assert "the data: not the same on all ranks" in message
        assert "fingerprint is" in message
    assert not (two_places / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seen", ["nothing", "no checkpoint", "an older checkpoint"])
def test_a_checkpoint_that_only_one_rank_sees(seen: str, steady: Path, two_places: Path, meeting: Any) -> None:
    chosen = recipe(steady, two_places / "data.csv", loop={"checkpoint_every": 2, "keep_last": 2})
    stopping = Trouble(rank=0, signals={5: signal.SIGTERM})
    on_ranks(2, meeting(), chosen, "run", trouble=stopping)
    before = sorted((two_places / "run").rglob("*"))
    there = two_places / "elsewhere" / "run"
    if seen != "nothing":
        shutil.copytree(two_places / "run", there)
        for path in (there / "checkpoints").glob("*5" if seen == "an older checkpoint" else "*"):
            shutil.rmtree(path)
    messages = said(on_ranks(2, meeting(), [], "run", trouble=Trouble(rank=1, folder="elsewhere"), timeout_seconds=5))
    expected = {
        "nothing": ("rank 1 of 2 has not reached", "run: not a run folder"),
        "no checkpoint": ("rank 1 failed: ", "no checkpoint"),
        "an older checkpoint": ("the checkpoint: not the same on all ranks", "step is 5 on rank 0 and 4 on rank 1"),
    }[seen]
    assert expected[0] in messages[0]
    assert expected[1] in messages[1]
    assert sorted((two_places / "run").rglob("*")) == before, "something was lost, or written"


def test_a_folder_in_use(steady: Path, reviews: Path, tmp_path: Path, meeting: Any) -> None:
    trouble = Trouble(rank=0, signals={4: signal.SIGTERM})
    on_ranks(2, meeting(), recipe(steady, reviews), tmp_path / "run", trouble=trouble)
    with RunFolder.open(tmp_path / "run"):
        messages = said(on_ranks(2, meeting(), [], tmp_path / "run"))
    assert "in use by another run" in messages[0]
    assert messages[1].startswith("rank 0 failed: ")
    assert "in use by another run" in messages[1]


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named(steady: Path, reviews: Path, tmp_path: Path, meeting: Any) -> None:
    chosen = recipe(steady, reviews).plain()
    ended = one_rank(0, 2, meeting(), chosen, tmp_path / "run", None, 2.0)
    assert "rank 1 of 2 has not reached 'joining' within 2 s" in said([ended])[0]
    assert not (tmp_path / "run").exists()


def test_a_settled_recipe_is_the_same_for_all(runs: Any) -> None:
    """What is written down is what one process would have written, but for how ranks share the work."""
    one, four = (Recipe.load(runs("padded", size)[0] / "recipe.yaml").resolved() for size in (1, 4))
    alone, shared = one.pop("parallel"), four.pop("parallel")
    assert (alone["strategy"], shared["strategy"]) == ("auto", "ddp")
    assert (alone["bucket_mib"], shared["bucket_mib"]) == (None, None), "the links of one machine are not a recipe's"
    assert one == four
    again = Recipe.load(runs("padded", 4)[0] / "recipe.yaml").with_settings(["parallel.strategy=fsdp"])
    assert again.parallel.strategy == "fsdp", "it may go on as shards"
