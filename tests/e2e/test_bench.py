"""``paceline bench RECIPE``: what becomes of cells that go wrong, of a bench that is killed, and a real one, tiny."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import cells, ladder
from paceline.bench.folder import CELLS, PLAN
from paceline.bench.ladder import Climb, Ladder, Outlook, Wanted
from paceline.bench.records import Records
from paceline.bench.rungs import IMAGES, Rung
from paceline.contract.errors import DiskFullError, RecipeError, RunFolderError, UserError
from paceline.recipe import Recipe
from paceline.run_folder.lock import hold
from tests.e2e.commands import Paceline, in_process, reviews, write_csv
from tests.testing.tiny import tiny_distilbert_config, tiny_resnet_config, tiny_vit_config, write_tiny_model

CONTENDER = '''"""Stands for a contender: quick, and as good or bad as its settings say."""

import json
import os
import sys
import time

job = json.load(open(sys.argv[1]))
settings = job["settings"]
with open(os.path.join(os.path.dirname(sys.argv[0]), "started"), "a") as started:
    started.write(f"{settings['act']} {job['seed']}\\n")
losses = [settings.get("loss", 1.0)] * job["steps"]
time.sleep(settings.get("seconds", 0))
print("noise", {"event": "none"})
print("{no json", flush=True)
for event in ("imported", "data", "model", "first_update", "trained", "evaluated"):
    print(json.dumps({"event": event}), flush=True)
if settings["act"] == "crash":
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
folder = os.path.dirname(sys.argv[0])
if settings["act"] == "fill" and os.path.exists(os.path.join(folder, settings["until"])):
    raise OSError(28, os.strerror(28))
if settings["act"] == "hang":
    time.sleep(600)
if settings["act"] == "rubbish":
    losses = ["nan?"]
if settings["act"] != "unsaved":
    os.mkdir(job["save"])
    open(os.path.join(job["save"], "model.safetensors"), "w").close()
if settings["act"] != "mute":
    steady = {"steady_seconds": settings.get("steady", 1.0), "steady_steps": job["steps"] - job["warm_up"]}
    print(json.dumps({"event": "result", "quality": 0.5, "losses": losses, **steady}))
'''


def rung(name: str, **settings: Any) -> Rung:
    return Rung(name=name, contender="stand_in", change=name, settings={"act": "well", **settings})


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of contenders that need no torch."""
    folder = tmp_path / "stand_ins"
    folder.mkdir()
    (folder / "stand_in.py").write_text(CONTENDER)
    (folder / "job.py").write_text('"""Nothing."""\n')
    (folder / "matmul.py").write_text(
        '"""Nothing."""\nprint(\'{"event": "result", "flops_per_second": 1e9, "dtype": "a"}\')\n'
    )
    monkeypatch.setattr(cells, "CONTENDERS", folder)
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """48 training rows in batches of 8: 12 steps in two epochs, without dropout."""
    folder = tmp_path_factory.mktemp("bench")
    model = write_tiny_model(folder / "model", tiny_distilbert_config())
    data = write_csv(folder / "reviews.csv", reviews(60))
    return Recipe.parse(
        {
            "name": "tiny",
            "model": {"source": str(model)},
            "data": {"source": str(data), "max_length": 32, "splits": {"validation": 0, "test": 12}},
            "optimizer": {"lr": 1e-3},
            "schedule": {"type": "linear", "warmup": 2},
            "loop": {"epochs": 2, "batch_size": 8},
            "device": "cpu",
        }
    )


def climb(recipe: Recipe, out: Path, rungs: list[Rung], **wanted: Any) -> Ladder:
    return Climb(recipe, Wanted(**{"repeats": 1, **wanted}), out, ladder=rungs).run()


def started(out: Path) -> list[str]:
    """What contenders were started, in order."""
    return (out / "contenders" / "started").read_text().splitlines()


def test_a_cell_that_goes_wrong_is_a_row_that_says_so_and_the_ladder_goes_on(
    recipe: Recipe, stand_ins: Path, tmp_path: Path
) -> None:
    acts = ("well", "crash", "hang", "rubbish", "mute", "unsaved")
    found = climb(recipe, tmp_path / "out", [*(rung(act, act=act) for act in acts), rung("last")], limit=1.5, repeats=2)
    told = {row.rung.name: f"{row.state}: {row.why}" for row in found.rows}
    assert told == {
        "well": "measured: ",
        "crash": "failed: RuntimeError: CUDA error: an illegal memory access was encountered",
        "hang": "hung: ended after 2 s after 'evaluated'",
        "rubbish": "rubbish: 12 losses were due, one a step; found 1",
        "mute": "rubbish: it ended well, and printed no result",
        "unsaved": "rubbish: it saved no model",
        "last": "measured: ",
    }
    assert [row.n for row in found.rows if row.state == "measured"] == [2, 2]
    assert started(tmp_path / "out").count("crash 0") == 1, "what fails once is not run again in each round"
    assert not list((tmp_path / "out" / "cells").glob("*/saved")), "weights are left"


def test_a_bench_that_is_killed_goes_on_at_the_missing_cells(recipe: Recipe, stand_ins: Path, tmp_path: Path) -> None:
    rungs, out = [rung("a", act="a"), rung("b", act="b")], tmp_path / "out"

    def stop(outlook: Outlook) -> None:
        if outlook.done == 2:
            raise KeyboardInterrupt

    climb_once = Climb(recipe, Wanted(repeats=2), out, tell=stop, ladder=rungs)
    with pytest.raises(KeyboardInterrupt):
        climb_once.run()
    assert climb_once.found is not None, "what was measured cannot be shown"
    assert [row.n for row in climb_once.found.rows] == [1, 1]
    assert started(out) == ["a 0", "b 0"]
    found = climb(recipe, out, rungs, repeats=2)
    assert started(out) == ["a 0", "b 0", "b 1", "a 1"], "a cell was measured twice, or in another order"
    assert [row.n for row in found.rows] == [2, 2]
    climb(recipe, out, rungs, repeats=2)
    assert len(started(out)) == 4, "there was nothing left to do"


def test_what_failed_is_run_again_when_that_is_asked(recipe: Recipe, stand_ins: Path, tmp_path: Path) -> None:
    rungs, out = [rung("a", act="a"), rung("b", act="crash")], tmp_path / "out"
    climb(recipe, out, rungs)
    climb(recipe, out, rungs)
    assert started(out) == ["a 0", "crash 0"]
    climb(recipe, out, rungs, again=True)
    assert started(out) == ["a 0", "crash 0", "crash 0"]


def test_a_cell_that_was_ended_by_the_limit_is_run_again_under_a_longer_one(
    recipe: Recipe, stand_ins: Path, tmp_path: Path
) -> None:
    rungs, out = [rung("a", act="a"), rung("slow", act="slow", seconds=3), rung("b", act="crash")], tmp_path / "out"
    for limit in (1.5, 1.5, 1.0):
        found = climb(recipe, out, rungs, limit=limit)
        assert [row.state for row in found.rows] == ["measured", "hung", "failed"]
        assert started(out) == ["a 0", "slow 0", "crash 0"], "it has no more time than before"
    found = climb(recipe, out, rungs, limit=60.0)
    assert [row.state for row in found.rows] == ["measured", "measured", "failed"]
    assert started(out)[3:] == ["slow 0"]


def test_a_cell_that_finds_the_disk_full_is_run_once_more_after_room_is_made(
    recipe: Recipe, stand_ins: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / "caches" / "old").mkdir(parents=True)
    (out / "caches" / "old" / "kernel").touch()
    found = climb(recipe, out, [rung("a"), rung("b", act="fill", until="../caches/old/kernel")])
    assert [(row.state, row.why) for row in found.rows] == [("measured", "")] * 2
    assert started(out) == ["well 0", "fill 0", "fill 0"]


def test_a_disk_that_stays_full_ends_the_bench_and_the_same_command_goes_on(
    recipe: Recipe, stand_ins: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / "work").mkdir(parents=True)
    (out / "work" / "filler").touch()
    rungs = [rung("a"), rung("b", act="fill", until="../work/filler"), rung("c")]
    once = Climb(recipe, Wanted(repeats=1), out, ladder=rungs)
    with pytest.raises(DiskFullError, match=r"no room for b-0(?s:.*)No space left(?s:.*)the same command goes on"):
        once.run()
    assert once.found is not None
    assert [row.state for row in once.found.rows] == ["measured", "missing", "missing"]
    assert started(out) == ["well 0", "fill 0", "fill 0"]
    (out / "work" / "filler").unlink()
    found = climb(recipe, out, rungs)
    assert [row.state for row in found.rows] == ["measured"] * 3
    assert started(out)[3:] == ["fill 0", "well 0"], "what was measured is measured again"


def test_a_cell_that_fails_without_a_word_on_a_full_disk_failed_for_that(
    recipe: Recipe, stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    climb(recipe, tmp_path / "out", [rung("a")])
    monkeypatch.setattr(cells.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30, 4096))
    with pytest.raises(DiskFullError, match=r"4,096 bytes free"):
        climb(recipe, tmp_path / "out", [rung("a"), rung("b", act="crash")])


def test_two_benches_in_one_folder_are_refused(recipe: Recipe, stand_ins: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    climb(recipe, out, [rung("a")])
    with contextlib.ExitStack() as held:
        hold(out, held)
        with pytest.raises(RunFolderError, match="in use"):
            climb(recipe, out, [rung("a")])


def test_a_folder_of_another_bench_or_of_something_else_is_left_alone(
    recipe: Recipe, stand_ins: Path, tmp_path: Path
) -> None:
    climb(recipe, tmp_path / "out", [rung("a")])
    with pytest.raises(RunFolderError, match="another recipe"):
        climb(recipe.with_settings(["loop.batch_size=4"]), tmp_path / "out", [rung("a")])
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("dear reader")
    with pytest.raises(RunFolderError, match="holds something else"):
        climb(recipe, stranger, [rung("a")])
    assert [path.name for path in stranger.iterdir()] == ["thesis.txt"]


def test_the_longest_is_dropped_for_the_budget_and_that_is_said(
    recipe: Recipe, stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    seconds = {"a": 10.0, "long": 100.0, "b": 20.0}

    def measured(cell: cells.Cell, bench: cells.Bench, **_: Any) -> dict[str, Any]:
        now[0] += seconds[cell.rung.name]
        told = {"rung": cell.rung.name, "repeat": cell.repeat, "contender": cell.rung.contender, "seed": cell.repeat}
        figures = {"losses": [1.0] * 12, "quality": 0.5, "samples_per_second": 1.0, "stages": {}, "cold": False}
        return {**told, **figures, "status": "ok", "whole_seconds": seconds[cell.rung.name]}

    monkeypatch.setattr(ladder, "measure", measured)
    monkeypatch.setattr(ladder.time, "monotonic", lambda: now[0])
    rungs = [rung(name) for name in seconds]
    found = climb(recipe, tmp_path / "out", rungs, budget=330.0, steps=12, repeats=4)  # 520 seconds would be needed
    assert {row.rung.name: row.n for row in found.rows} == {"a": 4, "long": 2, "b": 4}
    assert found.rows[1].why == "no time in the budget for about 100 s more"
    assert "dropped for the budget, the longest first: long" in found.notices
    assert now[0] <= 330


def test_no_time_for_one_cell_is_told(recipe: Recipe, stand_ins: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no time for one cell"):
        climb(recipe, tmp_path / "out", [rung("a", seconds=30)], budget=1.0)


def test_faster_but_different_is_never_crowned(recipe: Recipe, stand_ins: Path, tmp_path: Path) -> None:
    rungs = [rung("a"), rung("quick", steady=0.1, loss=2.0), rung("same", steady=0.5)]
    found = climb(recipe, tmp_path / "out", rungs, repeats=2)
    assert [(row.verdict, row.is_best) for row in found.rows] == [
        ("first", False),
        ("different", False),
        ("same", True),
    ]


def test_a_recipe_that_peers_cannot_run_says_why(recipe: Recipe, stand_ins: Path, tmp_path: Path) -> None:
    smoothed = recipe.with_settings(["task.label_smoothing=0.1"])
    with pytest.raises(UserError, match=r"no task\.label_smoothing; --set task\.label_smoothing=0"):
        climb(smoothed, tmp_path / "out", [rung("a")])


def test_rows_that_no_ladder_is_for_are_refused(tmp_path: Path, recipe: Recipe, stand_ins: Path) -> None:
    rows = [{**row, "score": number / 7} for number, row in enumerate(reviews(40))]
    data = write_csv(tmp_path / "scores.csv", [{"text": row["text"], "score": row["score"]} for row in rows])
    scores = recipe.with_settings([f"data.source={data}", "data.label=score", "task.type=regression"])
    with pytest.raises(RecipeError, match="regression"):
        climb(scores, tmp_path / "out", [rung("a")])


def test_a_plan_that_is_not_whole_and_a_place_for_no_folder_are_told(
    recipe: Recipe, stand_ins: Path, tmp_path: Path
) -> None:
    out, rungs = tmp_path / "out", [rung("a")]
    climb(recipe, out, rungs)
    plan = json.loads((out / PLAN).read_text())
    spoilt = ['{"pace', "[]", "7", "null", json.dumps({**plan, "extent": {"steps": 12}})]
    spoilt += [json.dumps({**plan, field: None}) for field in ("asked", "source", "extent", "repeats", "fitted")]
    spoilt += [
        json.dumps({name: plan[name] for name in plan if name != field}) for field in ("asked", "source", "extent")
    ]
    for text in spoilt:
        (out / PLAN).write_text(text)
        with pytest.raises(RunFolderError, match=r"bench\.json: not whole(?s:.*)choose another --out"):
            climb(recipe, out, rungs)
    (out / PLAN).unlink()
    with pytest.raises(RunFolderError, match=r"bench\.json: missing(?s:.*)choose another --out"):
        climb(recipe, out, rungs)  # by another plan its cells would be of other work
    (out / CELLS).unlink()
    for text in ("{", "[]", '{"train_rows": 48}'):
        (out / "work" / "source.json").write_text(text)
        with pytest.raises(RunFolderError, match=r"source\.json: not whole(?s:.*)choose another --out"):
            climb(recipe, out, rungs)
    with pytest.raises(RunFolderError, match="not a folder"):
        climb(recipe, Path("/proc/bench"), [rung("a")])


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paceline:
    return in_process(monkeypatch, capsys)


def test_an_unknown_rung_and_a_budget_that_is_none_are_told_before_anything_starts(
    paceline: Paceline, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = paceline("bench", "recipes/bench_small.yaml", "--rungs", "plian", "--out", out)
    assert (done.code, done.first) == (2, "paceline: --rungs plian: no such rung")
    assert "did you mean 'plain'?" in done.err
    done = paceline("bench", "recipes/bench_small.yaml", "--budget", "soon", "--out", out)
    assert (done.code, done.first) == (2, "paceline: --budget 'soon'")
    assert not out.exists()


def test_the_list_says_what_each_rung_changes_and_what_is_missing(paceline: Paceline) -> None:
    done = paceline("bench", "--list", "--rungs", "plain,ddp")
    assert done.code == 0
    assert "every text padded to the maximum" in done.out
    assert "it needs 2 GPUs" in done.out


def bench_for_real(paceline: Paceline, recipe: Recipe, folder: Path, *rungs: str) -> dict[str, Any]:
    file = folder / "tiny.yaml"
    file.write_text(recipe.to_yaml())
    options = ("--rungs", ",".join(rungs), "--repeats", 1, "--out", folder / "out", "--json", "--budget", "10m")
    done = paceline("bench", file, *options, "--steps", 8, "--figures", folder / "figures")
    assert done.code == 0, done.err
    told: dict[str, Any] = json.loads(done.out)
    return told


def losses(told: dict[str, Any]) -> dict[str, list[float]]:
    wrong = [(row["rung"], row["state"], row["why"]) for row in told["rows"] if row["state"] != "measured"]
    assert not wrong, wrong
    return {cell["rung"]: cell["losses"] for cell in told["cells"]}


@pytest.mark.slow
def test_a_tiny_bench_does_the_same_work_on_each_rung_and_keeps_its_order(
    paceline: Paceline, recipe: Recipe, tmp_path: Path
) -> None:
    told = bench_for_real(paceline, recipe, tmp_path, "paceline_off", "plain")
    assert [row["rung"] for row in told["rows"]] == ["plain", "paceline_off"]
    assert [cell["rung"] for cell in told["cells"]] == ["plain", "paceline_off"], "the first rung goes first"
    found = losses(told)
    assert found["plain"] == pytest.approx(found["paceline_off"], abs=2e-5), "other rows, order, weights or rates"
    for cell in told["cells"]:
        assert cell["samples_per_second"] > 0
        assert cell["peak_host_bytes"] > 2**27
        assert math.isclose(sum(cell["stages"].values()), cell["whole_seconds"], rel_tol=0.05)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "paceline_off" in page
    picture = (tmp_path / "figures" / "rate.svg").read_text()
    assert picture.startswith("<svg xmlns=")
    assert "--c0: #2563a8" in picture, "a picture by itself has no colours"


@pytest.fixture
def digits(tmp_path: Path) -> Recipe:
    """Images of ten classes, without augmentation."""
    return Recipe.parse(
        {
            "name": "digits",
            "model": {"config": tiny_resnet_config()},
            "data": {"source": "builtin:digits", "splits": {"validation": 0, "test": 0.2}},
            "optimizer": {"type": "sgd", "lr": 0.05, "weight_decay": 1e-3},
            "loop": {"epochs": 2, "batch_size": 32},
            "device": "cpu",
        }
    )


@pytest.mark.slow
def test_images_have_a_ladder_of_their_own_that_does_the_same_work(
    paceline: Paceline, digits: Recipe, tmp_path: Path
) -> None:
    told = bench_for_real(paceline, digits, tmp_path, "plain", "paceline_off")
    assert [row["rung"] for row in told["rows"]] == ["plain", "paceline_off"]
    found = losses(told)
    assert found["plain"] == pytest.approx(found["paceline_off"], abs=2e-4), "other images, order, weights or rates"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_do_the_same_work_on_images(
    digits: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What two GPUs would be given, by two processes on the CPU; synchronised batch norms are for GPUs alone."""
    rungs = [replace(each, gpus=0) for each in IMAGES if each.name in ("plain", "ddp")]
    measured = ladder.measure
    monkeypatch.setattr(ladder, "measure", lambda cell, bench, **more: measured(cell, replace(bench, gpus=2), **more))
    vit = digits.with_settings([f"model.config={json.dumps(tiny_vit_config())}"])  # no statistics over a rank's images
    found = Climb(vit, Wanted(repeats=1, steps=6), tmp_path / "out", ladder=rungs).run()
    assert [(row.state, row.why) for row in found.rows] == [("measured", "")] * 2
    plain, ddp = (record["losses"] for record in Records(tmp_path / "out" / CELLS))
    assert plain == pytest.approx(ddp, abs=2e-4)


PEERS = ("plain", "accelerate", "accelerate_accumulation", "accelerate_recompute", "trainer")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "peers"),
    [("accelerate", PEERS), ("lightning", ("plain", "lightning", "fabric"))],
    ids=["hugging_face", "lightning"],
)
def test_peers_do_the_same_work(
    paceline: Paceline, recipe: Recipe, tmp_path: Path, package: str, peers: tuple[str, ...]
) -> None:
    if importlib.util.find_spec(package) is None:  # not imported: it would leave its marks on this process
        pytest.skip(f"{package} is not installed")
    found = losses(bench_for_real(paceline, recipe, tmp_path, *peers))
    assert set(found) == set(peers)
    for peer in peers:
        assert found[peer] == pytest.approx(found["plain"], abs=2e-5), peer


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_learns_something_else_runs_too(paceline: Paceline, recipe: Recipe, tmp_path: Path) -> None:
    told = bench_for_real(paceline, recipe, tmp_path, "plain", "features_svm", "head_only", "trainer_grouped")
    assert {row["rung"]: row["verdict"] for row in told["rows"] if row["verdict"] == "by design"}.keys() == {
        "features_svm",
        "head_only",
    }
    assert losses(told)["features_svm"] == []
