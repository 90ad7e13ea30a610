"""``paceline trace``: the command for Nsight Systems, and the second run with a switch on."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import UserError
from paceline.recipe import Recipe
from paceline.verbs import cli
from paceline.verbs import trace as verb
from tests.unit.tracing.simulated import Workload, write

RECIPE = "model: {source: some}\ndata: {source: rows.csv}\nname: mine\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with recipe.yaml; nsys is not on this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Any:
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_the_line_for_nsys(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--kind", "nsys", "--steps", "90:100", "--out", "runs/x", "--gpus", "4", "--set", "seed=3")
    assert command(monkeypatch, "trace", "recipe.yaml", *asked, "--print") == 0
    words = shlex.split(capsys.readouterr().out)
    assert words == [
        *("nsys", "profile", "--trace=cuda,nvtx,osrt", "--sample=none"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--output=runs/x"),
        *("paceline", "train", "recipe.yaml", "--out", "runs/x", "--gpus", "4", "--set", "seed=3"),
        *("--set", "trace.steps=[90:100]", "--set", "trace.kind=nsys"),
    ]
    # what it sets is a recipe's
    settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    assert Recipe.parse({"model": {"source": "some"}}).with_settings(settings).trace.steps == ("90:100",)


def test_a_report_a_window(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--kind", "nsys", "--steps", "5:8", "--steps", "last-epoch:-1", "--graph", "keep", "--print")
    assert command(monkeypatch, "trace", "recipe.yaml", *asked) == 0
    out = capsys.readouterr().out
    assert "--capture-range-end=repeat:2 " in out
    assert "--cuda-graph-trace=node" in out
    assert "--out runs/mine-" in out


def test_windows_that_overlap_are_one_report(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, end in (("5:8 7:12", "stop"), ("5:8 8:12", "repeat:2"), ("last-epoch last-epoch:-3 5:8", "repeat:2")):
        asked = [word for text in steps.split() for word in ("--steps", text)]
        assert command(monkeypatch, "trace", "recipe.yaml", "--kind", "nsys", *asked, "--print") == 0
        assert f"--capture-range-end={end} " in capsys.readouterr().out


def test_without_nsys_the_line_is_all_there_is(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "trace", "recipe.yaml", "--kind", "nsys") == 0
    line, remark = capsys.readouterr().out.splitlines()
    assert line.startswith("nsys profile ")
    assert "'trace.steps=[last-epoch:-10]'" in line, "the tutorials' window, where none is named"
    assert remark.startswith("nsys is not on this machine")


def test_where_nsys_is_it_is_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsys = here / "bin" / "nsys"
    nsys.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {here}/given\nexit 3\n')
    nsys.chmod(0o755)
    assert command(monkeypatch, "trace", "recipe.yaml", "--kind", "nsys", "--out", "runs/x") == 3
    given = (here / "given").read_text().splitlines()
    at = given.index(sys.executable)
    assert given[:at] == verb.nsys_command([], Path("runs/x"), Recipe.load("recipe.yaml", ["trace.steps=[0:1]"]))[1:]
    assert given[at + 1 : at + 6] == ["-P", "-m", "paceline", "train", "recipe.yaml"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--kind", "both"), "trace.kind = 'both'"),
        (("--kind", "kineto,nsys"), "trace.kind: one of kineto and nsys"),
        (("--steps", "8:5"), "--steps: 8:5 holds no step"),
        (("--steps", "5:8", "--steps", ""), "--steps: '' is no window"),
        (("--steps", "-3:"), "--steps: '-3:' is no window"),
        (("--steps", "]"), "--steps: ']' is no window"),
        (("--print",), "--print with trace.kind = kineto"),
        (("--try", "--kind", "nsys"), "--try with trace.kind = nsys"),
        (("--try", "--init", "tcp://a:1", "--rank", "0", "--world-size", "2"), "--try among ranks"),
    ],
)
def test_what_cannot_be_asked(
    arguments: tuple[str, ...],
    told: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(monkeypatch, "trace", "recipe.yaml", *arguments) == 2
    assert capsys.readouterr().err.startswith(f"paceline: {told}")
    assert not (here / "runs").exists()


def test_ranks_of_a_scheduler_are_not_run_twice(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**started, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert command(monkeypatch, "trace", "recipe.yaml", "--try") == 2
    assert "--try among ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--memory", "--print", "--graph=keep", "--gpus=2", "--devices=0,1", "--timeout=60", "--rank=1"]
)
def test_a_folder_is_only_read(
    option: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "trace" / "steps-91-100", Workload())
    assert command(monkeypatch, "trace", here, option) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"paceline: {here} with {option.partition('=')[0]}\n")
    assert not told.out


def test_the_line_is_printed_under_nsys_too(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert command(monkeypatch, "trace", "recipe.yaml", "--kind", "nsys", "--print") == 0
    assert capsys.readouterr().out.startswith("nsys profile ")


def test_a_folder_that_is_no_runs(here: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        verb.show(here / "bin", print)


def test_windows_that_cannot_be_read_are_told_beside_the_others_and_are_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = here / "trace"
    for name in ("steps-11-20", "steps-91-100", "steps-91-100-copy"):
        write(trace / name, Workload())
    cut_off = trace / "steps-11-20" / "rank0.trace.json.gz"
    cut_off.write_bytes(cut_off.read_bytes()[:500])
    facts = trace / "steps-91-100-copy" / "rank0.window.json"
    facts.write_text(facts.read_text().replace('"format": 1', '"format": 2'))
    assert command(monkeypatch, "trace", here) == 2
    told = capsys.readouterr()
    assert f"steps-11-20: {cut_off}: cut off" in told.out
    assert "steps-91-100: no bottleneck" in told.out
    assert f"steps-91-100-copy: {facts}: of another version" in told.out
    assert told.err.splitlines() == [
        f"paceline: {here}: 2 of 3 windows cannot be read",
        "  why: what is wrong stands above, under steps-11-20, steps-91-100-copy",
    ]
