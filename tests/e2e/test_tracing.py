"""Runs some of whose steps are traced: the same run to the bit, with whole steps in its traces, on every rank."""

from __future__ import annotations

import gzip
import itertools
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers.models.bert.modeling_bert  # noqa: F401
import yaml

# this and the model above are loaded so that the server from which ranks are forked loads them, once
import paceline.run.run
from paceline.contract.errors import Preempted, RecipeError, UserError
from paceline.contract.records import RunRecord
from paceline.recipe import Recipe
from paceline.tracing import budget, read_window, told, verdict
from paceline.verbs.train import resume, train
from tests.e2e.commands import Paceline, in_process
from tests.e2e.ranks import Trouble, on_ranks
from tests.e2e.whole_runs import STEPS, Disturb, assert_same, outcome, recipe
from tests.testing.tiny import tiny_bert_config, write_tiny_model
from tests.unit.observe.nvtx_tool import built_tool, heard, nested

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "imdb_bert_ddp_nvtx.yaml"

MICRO = {"forward", "backward"}


def traced(model: Path, data: Path, /, *windows: str, **changes: Any) -> Recipe:
    return recipe(model, data, **{**changes, "trace": {"steps": list(windows), **changes.get("trace", {})}})


def files(folder: Path) -> dict[str, list[str]]:
    """Of each window."""
    return {
        window.name: sorted(path.name for path in window.iterdir()) for window in sorted((folder / "trace").iterdir())
    }


def facts(window: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((window / f"rank{rank}.window.json").read_text())
    return found


def spans(window: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Of the main thread, outer ones first: name, step, begin and end in microseconds."""
    with gzip.open(window / f"rank{rank}.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    found = []
    for event in events:
        name = str(event.get("name", ""))
        if event.get("ph") == "X" and event.get("cat") == "user_annotation" and name.startswith("paceline: "):
            *words, last = name.removeprefix("paceline: ").split(" ")
            step = int(last) if last.isdecimal() else None
            plain = " ".join(words) if step is not None else " ".join([*words, last])
            found.append({"name": plain, "step": step, "begin": event["ts"], "end": event["ts"] + event["dur"]})
    return sorted(found, key=lambda span: (span["begin"], -span["end"]))


def inside(window: Path, rank: int = 0) -> dict[int, list[str]]:
    """By step, the names of the spans inside it."""
    every = spans(window, rank)
    steps = [span for span in every if span["name"] == "step"]
    return {
        step["step"]: [
            span["name"]
            for span in every
            if span is not step and step["begin"] <= span["begin"] and span["end"] <= step["end"]
        ]
        for step in steps
    }


def warnings_of(record: RunRecord) -> list[str]:
    return [notice for notice in record.notices if notice.startswith("trace.steps")]


def test_a_traced_run_is_the_run_to_the_bit(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    """With dropout, whose draws a profiler must not move; and its windows hold whole steps."""
    plain = train(recipe(pretrained, reviews), out=tmp_path / "plain")
    chosen = traced(pretrained, reviews, "2:4", "last-epoch")
    watched = train(chosen, out=tmp_path / "watched")
    assert_same(outcome(watched), outcome(plain))
    assert not (tmp_path / "plain" / "trace").exists()
    assert files(tmp_path / "watched") == {
        "steps-11-12": ["rank0.trace.json.gz", "rank0.window.json"],
        "steps-3-4": ["rank0.trace.json.gz", "rank0.window.json"],
    }
    window = tmp_path / "watched" / "trace" / "steps-3-4"
    for step, names in inside(window).items():
        # nine samples in micro-batches of four; the epoch's last has six
        micro = 3
        assert names.count("forward") == names.count("backward") == micro, (step, names)
        assert names.count("data wait") == micro
        assert (names.count("clip"), names.count("update")) == (1, 1)
    assert list(inside(window)) == [3, 4]
    assert list(inside(tmp_path / "watched" / "trace" / "steps-11-12")) == [11, 12]
    meta = facts(window)
    assert (meta["first_step"], meta["last_step"], meta["kind"], meta["device"]) == (3, 4, "kineto", "cpu")
    assert [(step["step"], step["samples"]) for step in meta["steps"]] == [(3, 9), (4, 9)]
    recorded = {line.step: line for line in records(tmp_path / "watched")}
    for step in meta["steps"]:
        line = recorded[step["step"]]
        assert (step["epoch"], step["tokens"], step["slots"]) == (line.epoch, line.tokens, line.slots)
        assert step["flops"] > 0
    assert meta["settings"]["techniques.packing"] is True
    assert meta["execution"]["layout"] == "packed"
    assert (meta["graphs"], meta["recompiles"]) == ("none", [])
    assert meta["peak_flops"] is None


def test_the_rank_with_the_slow_loader_is_named(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    chosen = traced(pretrained, reviews, "4:12")
    ended = on_ranks(
        2, f"file://{tmp_path}/meeting", chosen, tmp_path / "run", trouble=Trouble(rank=1, late_batches=0.15)
    )
    assert [rank.error for rank in ended] == [None, None]
    window = read_window(tmp_path / "run" / "trace" / "steps-5-12")
    budgets = budget(window)
    found = verdict(window, budgets)
    assert (found.bound, found.rank) == ("straggler", 1), told(found, budgets)
    assert "data wait" in " ".join(found.evidence), told(found, budgets)
    assert budgets.slowest == 1, "the rank that waits is taken for the slow one"


def records(folder: Path) -> list[Any]:
    from paceline.contract.records import StepRecord
    from paceline.observe.metrics_file import read_metrics

    return [record for record in read_metrics(folder / "metrics.jsonl") if isinstance(record, StepRecord)]


@pytest.mark.slow
def test_every_rank_leaves_its_own(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    meeting = (f"file://{tmp_path}/meeting-{number}" for number in itertools.count()).__next__
    chosen = traced(pretrained, reviews, "5:8")
    watched = on_ranks(2, meeting(), chosen, tmp_path / "watched")
    plain = on_ranks(2, meeting(), recipe(pretrained, reviews), tmp_path / "plain")
    assert [rank.error for rank in (*watched, *plain)] == [None] * 4
    assert watched[0].record is not None
    assert plain[0].record is not None
    assert_same(outcome(watched[0].record), outcome(plain[0].record))
    window = tmp_path / "watched" / "trace" / "steps-6-8"
    assert files(tmp_path / "watched")["steps-6-8"] == [
        f"rank{rank}.{kind}" for rank in (0, 1) for kind in ("trace.json.gz", "window.json")
    ]
    both = [facts(window, rank) for rank in (0, 1)]
    assert [(meta["rank"], meta["world_size"]) for meta in both] == [(0, 2), (1, 2)]
    for rank in (0, 1):
        assert list(inside(window, rank)) == [6, 7, 8]
        for names in inside(window, rank).values():
            assert set(names) >= {*MICRO, "communicate", "clip", "update"}
    whole = {line.step: line for line in records(tmp_path / "watched")}
    for mine, others in zip(both[0]["steps"], both[1]["steps"], strict=True):
        assert mine["samples"] + others["samples"] == whole[mine["step"]].samples
        assert mine["tokens"] + others["tokens"] == whole[mine["step"]].tokens


@pytest.mark.slow
def test_the_tutorials_windows_on_two_ranks(reviews: Path, tmp_path: Path) -> None:
    """BERT, DDP, three epochs, the last ten iterations of the last epoch and the last one, made tiny."""
    model = write_tiny_model(tmp_path / "model", tiny_bert_config())
    changes = [f"model.source={model}", f"data.source={reviews}", "data.validation=null", "data.test=null"]
    changes += ["device=cpu", "data.max_length=16", "loop.batch_size=4", "observe.console='off'"]
    changes += ["loop.micro_batch_size=2", "loop.evaluation_batch_size=8", "trace.kind=kineto"]
    chosen = Recipe.load(RECIPE, changes)
    assert chosen.loop.epochs == 3
    ended = on_ranks(2, f"file://{tmp_path}/meeting", chosen, tmp_path / "run")
    assert [rank.error for rank in ended] == [None, None]
    # 48 training samples are 12 steps an epoch
    window = tmp_path / "run" / "trace" / "steps-27-36"
    assert list(files(tmp_path / "run")) == [window.name]
    assert list(inside(window)) == list(inside(window, 1)) == list(range(27, 37))
    assert facts(window)["asked"] == "last-epoch:-10, last-epoch:-1"


@pytest.mark.parametrize("stopped_at", [3, 6], ids=["before", "within"])
def test_a_resumed_run_traces_what_is_left(
    stopped_at: int, pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    chosen = traced(pretrained, reviews, "4:8")
    disturb.signals[stopped_at] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(chosen, out=tmp_path / "run")
    # whole steps of a window that was cut short are kept
    assert (tmp_path / "run" / "trace").exists() == (stopped_at == 6)
    record = resume(tmp_path / "run")
    expected = {3: ["steps-5-8"], 6: ["steps-5-6", "steps-7-8"]}[stopped_at]
    assert list(files(tmp_path / "run")) == expected
    assert bool([n for n in record.notices if "began before this start" in n]) == (stopped_at == 6)
    assert_same(outcome(record), outcome(train(recipe(pretrained, reviews), out=tmp_path / "plain")))


def test_windows_added_on_resume(pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb) -> None:
    disturb.signals[6] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(recipe(pretrained, reviews), out=tmp_path / "run")
    record = resume(tmp_path / "run", ["trace.steps=[2:4, 8:9]"])
    assert list(files(tmp_path / "run")) == ["steps-9-9"]
    assert any("steps 3 to 4 were made before; not traced" in notice for notice in record.notices)


def test_a_window_that_early_stopping_never_lets_open(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    loop = {"evaluate_every": 2, "early_stopping": {"patience": 2}, "best_metric": "accuracy"}
    chosen = traced(pretrained, reviews, "10:12", optimizer={"lr": 1e-12}, loop=loop)
    record = train(chosen, out=tmp_path / "run")
    assert (record.status, record.steps) == ("stopped early", 6)
    assert warnings_of(record) == ["trace.steps = 10:12: never opened, the run stopped early after step 6"]
    assert not (tmp_path / "run" / "trace").exists()


@pytest.mark.parametrize(
    ("windows", "changes", "told"),
    [
        (["10:20"], {}, "trace.steps = 10:20: beyond the run"),
        (["12:13"], {}, f"it has {STEPS} steps, so that the window never opens"),
        (["last-epoch"], {"model": {"train": "features"}}, "no step is made"),
    ],
)
def test_a_window_that_cannot_be_is_refused_before_training(
    windows: list[str], changes: dict[str, Any], told: str, pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as raised:
        train(traced(pretrained, reviews, *windows, **changes), out=tmp_path / "run")
    assert told in str(raised.value)
    assert raised.value.exit_code == 2
    assert not (tmp_path / "run").exists(), "a run that never began left its folder"


def contents(folder: Path) -> dict[Path, bytes]:
    """Of all files but the lock, which says who held it last."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_where_traces_cannot_be_written_nothing_is_lost(
    pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    disturb.signals[6] = signal.SIGTERM
    with pytest.raises(Preempted):
        train(recipe(pretrained, reviews), out=tmp_path / "run")
    (tmp_path / "run" / "trace").write_text("mine")
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match="is no folder"):
        resume(tmp_path / "run", ["trace.steps=[8:9]"])
    assert contents(tmp_path / "run") == before
    assert resume(tmp_path / "run").status == "finished"


def test_memory_is_a_curve_in_the_trace(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    train(traced(pretrained, reviews, "2:3", trace={"memory": True}), out=tmp_path / "run")
    with gzip.open(tmp_path / "run" / "trace" / "steps-3-3" / "rank0.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    curve = [event for event in events if event["ph"] == "C" and event["name"] == "memory of host"]
    assert len(curve) > 50
    assert len({event["args"]["allocated"] for event in curve}) > 10


def test_a_run_in_which_something_fails_closes_its_window(
    pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    from paceline.contract import spans
    from tests.e2e.whole_runs import Crashed

    disturb.crash_at = 6
    with pytest.raises(Crashed):
        train(traced(pretrained, reviews, "4:8"), out=tmp_path / "run")
    assert spans._sinks == (), "a sink still listens"
    # a profiler that was left running would refuse this one
    assert train(traced(pretrained, reviews, "4:5"), out=tmp_path / "again").status == "finished"


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paceline:
    return in_process(monkeypatch, capsys)


def test_the_verb_traces_a_recipe_and_reads_a_folder(
    paceline: Paceline, pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "recipe.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(recipe(pretrained, reviews, observe={"console": "plain"}).plain()))
    done = paceline("trace", file, "--steps", "3:5", "--steps", "8:9", "--out", out)
    assert done.code == 0, done.err
    assert "info: steps 4 to 5 will be traced (3:5, kineto)" in done.out
    assert "info: traced steps 9 to 9 into" not in done.out
    assert "info: traced step 9 into trace/steps-9-9: " in done.out
    again = paceline("trace", out)
    assert again.code == 0, again.err
    assert again.out.strip()
    # what the run said of its windows at its end is what is read later
    missing = [line for line in again.out.splitlines() if line.rstrip() not in done.out]
    assert not missing, missing
    refused = paceline("trace", out, "--steps", "1:2")
    assert (refused.code, refused.first) == (2, f"paceline: {out} with --steps")
    nothing = tmp_path / "plain"
    assert paceline("train", file, "--out", nothing).code == 0
    done = paceline("trace", nothing)
    assert (done.code, done.first) == (2, f"paceline: {nothing}: nothing was traced")


def test_a_damaged_trace_is_told_and_read_around(
    paceline: Paceline, pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    train(traced(pretrained, reviews, "3:5", "8:9"), out=tmp_path / "run")
    trace = tmp_path / "run" / "trace" / "steps-4-5" / "rank0.trace.json.gz"
    trace.write_bytes(trace.read_bytes()[:500])
    done = paceline("trace", tmp_path / "run")
    assert (done.code, done.first) == (2, f"paceline: {tmp_path / 'run'}: 1 of 2 windows cannot be read")
    assert f"steps-4-5: {trace}: cut off" in done.out
    assert len(done.out.split("\n\n")) >= 2, "the other window is not told of"


NSYS = """
import sys
from paceline.verbs.cli import main
sys.argv = ["paceline", "train", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_a_tool_around_the_run_hears_the_tutorials_ranges(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    """``trace.kind: nsys``, with a tool in place of nsys: names, nesting, balance, and nothing outside the window."""
    pytest.importorskip("nvtx", reason="the package nvtx is not installed")
    tool, file = built_tool(tmp_path), tmp_path / "recipe.yaml"
    chosen = traced(pretrained, reviews, "last-epoch", trace={"kind": "nsys"}, loop={"micro_batch_size": None})
    file.write_text(yaml.safe_dump(chosen.plain()))
    events = heard([sys.executable, "-c", NSYS, str(file), "--out", str(tmp_path / "run")], tool, tmp_path)
    tree = nested(events)
    iterations = ["Epoch 3, Iteration 1", "Epoch 3, Iteration 2"]
    assert [names[0] for names in tree if len(names) == 1 and names[0].startswith("Epoch")] == iterations
    inside = [names[1:] for names in tree if names[0] == iterations[1] and len(names) == 2]
    assert inside == [("Data Wait",), ("Forward",), ("Backward",), ("Clip",), ("Optimizer Step",)]
    payloads = {event["name"]: event["payload"] for event in events if event["kind"] == "push"}
    assert [payloads[name] for name in iterations] == [11, 12]
    (meta,) = [facts(path) for path in (tmp_path / "run" / "trace").iterdir()]
    assert (meta["kind"], meta["first_step"], meta["last_step"]) == ("nsys", 11, 12)
    assert files(tmp_path / "run") == {"steps-11-12": ["rank0.window.json"]}
