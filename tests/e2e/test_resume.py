"""A run that was stopped and resumed, anywhere, leaves what an undisturbed one leaves, bit for bit."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.contract.errors import CheckpointError, DiskFullError, Preempted, RecipeError
from paceline.recipe import Recipe
from paceline.run.checkpoint.store import CheckpointStore
from paceline.verbs.train import resume, train
from tests.e2e.whole_runs import (
    STEPS,
    Crashed,
    Disturb,
    Outcome,
    Steps,
    assert_same,
    lines,
    outcome,
    recipe,
)
from tests.testing.marks import slow_except
from tests.testing.tiny import tiny_bert_config

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sgd": {"optimizer": {"type": "sgd", "lr": 0.05}},
    "sgd without momentum": {"optimizer": {"type": "sgd", "lr": 0.05, "momentum": 0.0, "nesterov": False}},
    "bf16": {"techniques": {"precision": "bf16"}},
    "pure bf16": {"techniques": {"precision": "pure_bf16"}},
    "groups": {"optimizer": {"lr": 1e-3, "groups": [{"match": "*classifier*", "lr": 1e-2}]}},
    "head": {"model": {"train": "head"}},
    "lora": {"model": {"train": "lora", "lora": {"dropout": 0.1}}},
    "windows": {"data": {"max_length": 10, "overflow": "windows"}},
    "deterministic": {"deterministic": True},
    "evaluation every two steps": {"loop": {"evaluate_every": 2, "best_metric": "-loss"}},
    "no evaluation": {"loop": {"evaluate_every": "never"}},
    "focal loss of weighted classes": {"task": {"loss": "focal", "class_weights": "balanced", "threshold": "tuned"}},
    "balanced sampler": {"loop": {"sampler": "balanced"}, "task": {"label_smoothing": 0.1}},
}


@pytest.fixture(scope="module")
def undisturbed(pretrained: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What the run of each variant leaves; filled as asked for."""
    return {}


@pytest.fixture
def expected(undisturbed: dict[str, Outcome], pretrained: Path, reviews: Path, tmp_path: Path) -> Any:
    """The outcome of a variant's undisturbed run."""

    def of(variant: str) -> Outcome:
        if variant not in undisturbed:
            chosen = recipe(pretrained, reviews, **VARIANTS[variant])
            undisturbed[variant] = outcome(train(chosen, out=tmp_path / "undisturbed"))
        return undisturbed[variant]

    return of


def stopped(chosen: Recipe, folder: Path, disturb: Disturb, at: int) -> None:
    """Starts a run that SIGTERM reaches in the middle of a step."""
    disturb.signals[at] = signal.SIGTERM
    with pytest.raises(Preempted, match=f"after step {at} of {STEPS}"):
        train(chosen, out=folder)


EACH_STEP = slow_except(range(1, STEPS + 1), 1, STEPS // 2, STEPS)
"""The first, the last, and the end of an epoch; `make test-full` stops at all."""


@pytest.mark.parametrize("at", EACH_STEP)
def test_stopped_at_any_step(
    at: int, expected: Any, pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb, taken: Steps
) -> None:
    whole = expected("plain")
    straight, taken[:] = list(taken), []
    stopped(recipe(pretrained, reviews), tmp_path / "run", disturb, at)
    assert len(taken) == at, "the step under way was not finished, or another one begun"
    assert_same(outcome(resume(tmp_path / "run")), whole)
    assert not straight or taken == straight, "the samples came in another order"


@pytest.mark.parametrize("at", EACH_STEP)
def test_crashed_in_the_middle_of_any_step(
    at: int, expected: Any, pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    """The gradients of the first micro-batch are lost with the process, and those of a step before it must be gone."""
    disturb.crash_at = at
    chosen = recipe(pretrained, reviews, loop={"checkpoint_every": 1})
    with pytest.raises(Crashed):
        train(chosen, out=tmp_path / "run")
    if at == 1:
        with pytest.raises(CheckpointError, match="no checkpoint"):
            resume(tmp_path / "run")
        return
    assert_same(outcome(resume(tmp_path / "run")), expected("plain"))


@pytest.mark.parametrize(
    "variant",
    slow_except((name for name in VARIANTS if name != "plain"), "lora", "windows", "pure bf16", "balanced sampler"),
)
@pytest.mark.parametrize("at", [pytest.param(4, marks=pytest.mark.slow), 5, pytest.param(9, marks=pytest.mark.slow)])
def test_every_kind_of_run(
    variant: str, at: int, expected: Any, pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    """Before, at and after the bound of an epoch and its evaluation."""
    stopped(recipe(pretrained, reviews, **VARIANTS[variant]), tmp_path / "run", disturb, at)
    assert_same(outcome(resume(tmp_path / "run")), expected(variant))


def test_stopped_again_and_again(
    expected: Any, pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    stopped(recipe(pretrained, reviews), tmp_path / "run", disturb, 2)
    for at in (3, 5, 9, 12):
        disturb.signals[at] = signal.SIGTERM
        with pytest.raises(Preempted):
            resume(tmp_path / "run")
    assert_same(outcome(resume(tmp_path / "run")), expected("plain"))
    starts = json.loads((tmp_path / "run" / "manifest.json").read_text())["starts"]
    assert [start["first_step"] for start in starts] == [0, 2, 3, 5, 9, 12]


@pytest.mark.parametrize("at", slow_except([7, 10], 10))
def test_early_stopping_counts_on(at: int, pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb) -> None:
    """Evaluations after steps 2, 4, 6, ... with a metric that never gains: the run ends by itself after step 10."""
    chosen = recipe(
        pretrained,
        reviews,
        optimizer={"lr": 1e-12},
        loop={"evaluate_every": 2, "early_stopping": {"patience": 4}, "best_metric": "accuracy"},
    )
    whole = train(chosen, out=tmp_path / "undisturbed")
    assert (whole.status, whole.steps, whole.best_step) == ("stopped early", 10, 2)
    stopped(chosen, tmp_path / "run", disturb, at)
    found = resume(tmp_path / "run")
    assert (found.status, found.steps) == ("stopped early", 10), "the count began anew"
    assert_same(outcome(found), outcome(whole))


@pytest.mark.parametrize(
    "where",
    ["run.measure", "ending.save_model", "ending.build_report"],
    ids=["measure", "save_model", "build_report"],
)
def test_a_crash_after_the_last_step_loses_no_step(
    where: str, expected: Any, pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: Any, **named: Any) -> None:
        raise Crashed

    with monkeypatch.context() as during:
        during.setattr(f"paceline.run.{where}", crash)
        with pytest.raises(Crashed):
            train(recipe(pretrained, reviews, observe={"console": "off", "report": True}), out=tmp_path / "run")
    if where == "ending.build_report":  # the run itself was finished
        with pytest.raises(CheckpointError, match="finished"):
            resume(tmp_path / "run")
        return
    steps: Steps = []
    with monkeypatch.context() as during:  # the undisturbed run, perhaps still to come, makes steps
        during.setattr("paceline.run.loop.Loop._step", lambda self: steps.append((0, 0, ())))
        found = outcome(resume(tmp_path / "run", ["observe.report=false"]))
    assert not steps, "steps were done again"
    assert_same(found, expected("plain"))


def test_a_run_that_cannot_start_leaves_its_folder_free(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"optimizer\.groups"):
        train(recipe(pretrained, reviews, optimizer={"groups": [{"match": "none", "lr": 1}]}), out=tmp_path / "run")
    with pytest.raises(RecipeError, match="make no whole batch"):
        train(recipe(pretrained, reviews, loop={"batch_size": 99, "drop_last": True}), out=tmp_path / "run")
    assert train(recipe(pretrained, reviews), out=tmp_path / "run").status == "finished"


# ---- what a resume refuses, and what it takes


@pytest.fixture
def halfway(pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb) -> Path:
    """The folder of a run that was stopped after step 7; its data are a copy."""
    data = tmp_path / "own.csv"
    data.write_bytes(reviews.read_bytes())
    stopped(recipe(pretrained, data), tmp_path / "halfway", disturb, 7)
    return tmp_path / "halfway"


def edit(folder: Path, part: str, **values: Any) -> None:
    """As a person with an editor would."""
    found = yaml.safe_load((folder / "recipe.yaml").read_text())
    found[part].update(values)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(found))


def test_an_edited_recipe_is_refused_and_every_difference_listed(halfway: Path) -> None:
    edit(halfway, "optimizer", lr=0.5, clip_norm=None)
    before = {path.name: path.read_bytes() for path in halfway.iterdir() if path.is_file()}
    with pytest.raises(CheckpointError) as error:
        resume(halfway)
    assert "optimizer.lr: 0.01 -> 0.5" in str(error.value)
    assert "optimizer.clip_norm: 1.0 -> null" in str(error.value)
    with pytest.raises(CheckpointError, match=r"optimizer\.clip_norm: 1\.0 -> null") as error:
        resume(halfway, ["optimizer.lr=0.5"])
    assert "optimizer.lr:" not in str(error.value), "what was named is not to be refused"
    after = {path.name: path.read_bytes() for path in halfway.iterdir() if path.is_file() and path.name != ".lock"}
    assert after == {name: before[name] for name in after}, "a refused resume changed the folder"


def test_a_change_that_is_named_goes_on_and_stays_agreed(halfway: Path, disturb: Disturb) -> None:
    disturb.crash_at = 8
    with pytest.raises(Crashed):
        resume(halfway, ["optimizer.lr=0.5"])
    record = resume(halfway)  # crashed before its next checkpoint, and yet nothing need be named again
    assert record.status == "finished"
    rates = {line["step"]: line["learning_rates"][0] for line in lines(halfway, "step")}
    assert rates[7] == pytest.approx(0.01 * 6 / 9)
    assert rates[8] == pytest.approx(0.5 * 5 / 9)
    starts = json.loads((halfway / "manifest.json").read_text())["starts"]
    assert [start["changes"] for start in starts] == [[], ["optimizer.lr: 0.01 -> 0.5"], []]


def test_execution_fields_change_freely_and_are_recorded(halfway: Path, expected: Any) -> None:
    edit(halfway, "loop", keep_last=3)
    found = outcome(resume(halfway, ["loop.evaluation_batch_size=5", "loop.checkpoint_every=4"]))
    whole = expected("plain")
    assert found.model == whole.model, "how the run is carried out changed what it learned"
    (_, start) = json.loads((halfway / "manifest.json").read_text())["starts"]
    assert sorted(start["changes"]) == [
        'loop.checkpoint_every: "epoch" -> 4',
        "loop.evaluation_batch_size: 8 -> 5",
        "loop.keep_last: 1 -> 3",
    ]


def test_another_batch_size_is_refused_also_by_name(halfway: Path) -> None:
    """Its steps and its place in the data are counted in batches."""
    with pytest.raises(CheckpointError, match=r"loop\.batch_size = 20: the run was started with 9"):
        resume(halfway, ["loop.batch_size=20"])


def test_fewer_samples_end_the_epoch_that_they_no_longer_fill(tmp_path: Path, disturb: Disturb) -> None:
    settings = {
        "model": {"config": tiny_bert_config()},
        "data": {"source": "builtin:random", "random": {"samples": 120, "length": 8, "vocabulary": 200}},
        "loop": {"batch_size": 10, "epochs": 2, "max_steps": STEPS},
        "observe": {"console": "off", "report": False},
    }
    stopped(Recipe.parse(settings), tmp_path / "run", disturb, 8)
    record = resume(tmp_path / "run", ["data.random.samples=60"])
    assert record.status == "finished"


def test_other_data_are_refused(halfway: Path) -> None:
    data = halfway.parent / "own.csv"
    data.write_text(data.read_text().replace("film 5:", "film five:"))
    with pytest.raises(CheckpointError, match=r"data \(its content\)"):
        resume(halfway)
    assert resume(halfway, [f"data.source={data}"]).status == "finished"


@pytest.mark.parametrize("change", slow_except(["data", "metric"], "data"))
def test_what_is_measured_otherwise_is_judged_anew(
    pretrained: Path, reviews: Path, tmp_path: Path, change: str
) -> None:
    """The best of other data, or by another metric, is beaten by nothing and would be what is saved."""
    data = tmp_path / "own.csv"
    data.write_bytes(reviews.read_bytes())
    first = train(recipe(pretrained, data, loop={"best_metric": "accuracy"}), out=tmp_path / "run")
    assert first.best_step, "the test lost its point"
    if change == "data":
        data.write_text(data.read_text().replace("film 5:", "film five:"))
        settings = [f"data.source={data}"]
    else:
        settings = ["loop.best_metric=-loss"]
    record = resume(tmp_path / "run", [*settings, f"loop.max_steps={2 * STEPS}", "loop.epochs=9"])
    since = {found.step: found.loss for found in record.evaluations}
    assert min(since) >= first.steps, "what was measured before still counts"
    assert record.best_step in since
    assert record.final["validation"]["loss"] == since[record.best_step]
    (notice,) = [line["message"] for line in lines(tmp_path / "run", "notice") if "looked for anew" in line["message"]]
    assert notice.startswith("the data changed" if change == "data" else "loop.best_metric changed")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-8] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    expected: Any, pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    folder = tmp_path / "run"
    stopped(recipe(pretrained, reviews, loop={"checkpoint_every": 3, "keep_last": 2}), folder, disturb, 8)
    newest = max((folder / "checkpoints").glob("step-*"))
    assert newest.name == "step-00000008"
    damage(newest / "optimizer.safetensors")
    record = resume(folder)
    assert any("step-00000008/optimizer.safetensors" in notice for notice in record.notices), record.notices
    assert any("step 6" in notice for notice in record.notices), record.notices
    assert_same(outcome(record), expected("plain"))
    assert any("step-00000008" in line["message"] for line in lines(folder, "notice"))


def test_never_from_the_start_when_all_checkpoints_are_damaged(halfway: Path) -> None:
    files = sorted((halfway / "checkpoints").glob("*/model.safetensors"))
    assert files
    for path in files:
        damage(path)
    with pytest.raises(CheckpointError, match="every checkpoint is damaged") as error:
        resume(halfway)
    assert error.value.exit_code == 2
    assert all(f"{path.parent.name}/{path.name}" in str(error.value) for path in files)


def test_a_finished_run_is_refused_unless_it_is_made_longer(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(recipe(pretrained, reviews), out=folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}
    for settings in ([], ["observe.log_every=3"], ["loop.max_steps=11"]):
        with pytest.raises(CheckpointError, match=r"epochs=\d"):
            resume(folder, settings)
    assert before == {name: (folder / name).read_bytes() for name in before}, "a refused resume changed the folder"
    longer = resume(folder, ["loop.epochs=4", "loop.max_steps=17"])
    assert (longer.status, longer.steps) == ("finished", 17)
    assert [line["step"] for line in lines(folder, "step")] == list(range(1, 18))
    assert lines(folder, "start")[-1]["first_step"] == 12, "steps that were done were done again"


def test_a_longer_run_that_was_stopped_goes_on(
    pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    """The summary of the shorter run must not make it look finished."""
    for name in ("straight", "run"):
        train(recipe(pretrained, reviews), out=tmp_path / name)
    longer = ["loop.epochs=4", "loop.max_steps=17"]
    whole = outcome(resume(tmp_path / "straight", longer))
    disturb.signals[14] = signal.SIGTERM
    with pytest.raises(Preempted):
        resume(tmp_path / "run", longer)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert_same(outcome(resume(tmp_path / "run")), whole)


def test_a_disk_that_fills_up_costs_no_checkpoint(
    expected: Any, pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, needed: int, what: str) -> None:
        if what == "a checkpoint of step 10":
            raise DiskFullError(f"{folder}: no room for {what}", f"{needed:,} bytes needed, 5 bytes free")

    with monkeypatch.context() as during:
        during.setattr("paceline.run.checkpoint.store.require_room", full)
        with pytest.raises(DiskFullError, match=r"[\d,]+ bytes needed, 5 bytes free") as error:
            train(recipe(pretrained, reviews, loop={"checkpoint_every": 2}), out=tmp_path / "run")
    assert error.value.exit_code == 2
    assert error.value.fix == f"free some space there; paceline train {tmp_path / 'run'} --resume goes on"
    assert CheckpointStore(tmp_path / "run" / "checkpoints", 1).newest().step == 8
    assert_same(outcome(resume(tmp_path / "run")), expected("plain"))


# ---- the account of a run


def test_seconds_add_up_also_after_a_resume(halfway: Path) -> None:
    saved = CheckpointStore(halfway / "checkpoints", 1).newest().state["seconds"]
    began = time.perf_counter()
    record = resume(halfway)
    here = time.perf_counter() - began
    seconds = dict(record.seconds)
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, abs=1e-6)
    assert saved["total"] < total < saved["total"] + here
    assert all(seconds[name] >= spent for name, spent in saved.items() if name not in ("other", "total"))
    shown = sum(line["samples"] for line in lines(halfway, "step"))
    assert shown == 42 + 42 + 18, "2.4 epochs of 42 training samples, the last of two steps of 9"
    assert record.samples_per_second == pytest.approx(shown / seconds["train"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seconds", None),
        ("seconds", {"train": "long"}),
        ("progress", None),
        ("progress", {"order": {}}),
        ("engine", []),
    ],
)
def test_a_state_that_lacks_something_is_told(halfway: Path, name: str, value: Any) -> None:
    """Its checksums are right: another version wrote it, or somebody who knew how."""
    store = CheckpointStore(halfway / "checkpoints", 1)
    newest = store.newest()
    state = {**newest.state, name: value}
    if value is None:
        del state[name]
    store.save(newest.step, {stem: newest.tensors(stem) for stem in ("model", "optimizer")}, state)
    with pytest.raises(CheckpointError, match=rf"state.json: .*{name}") as error:
        resume(halfway)
    assert "another --out" in error.value.fix
