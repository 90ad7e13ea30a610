"""Options that stand for a ``--set``: what they become, on every command that has them, and what contradicts them."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import RecipeError
from paceline.recipe import Recipe
from paceline.verbs import cli, launch
from paceline.verbs.short import SETTINGS, all_settings, without

NONE = dict.fromkeys(("epochs", "lr", "batch_size", "max_length", "seed"))

TYPED = ["--epochs", "5", "--lr", "3e-5", "--batch-size", "16", "--max-length=256", "--seed", "1"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def noted(monkeypatch: pytest.MonkeyPatch, module: str, *names: str) -> list[tuple[Any, ...]]:
    """Puts functions in a module's place that note what they are called with, and end."""
    calls: list[tuple[Any, ...]] = []

    def note(*arguments: Any, **_: Any) -> None:
        calls.append(arguments)
        raise SystemExit(0)

    fake = types.ModuleType(module)
    for name in names:
        setattr(fake, name, note)
    monkeypatch.setitem(sys.modules, module, fake)
    parent, _, name = module.rpartition(".")
    monkeypatch.setattr(importlib.import_module(parent), name, fake, raising=False)  # where it was imported before
    return calls


def settled(recipe: Recipe) -> tuple[object, ...]:
    loop = recipe.loop
    return loop.epochs, recipe.optimizer.lr, loop.batch_size, recipe.data.max_length, recipe.seed


@pytest.mark.parametrize(
    ("command", "module"), [("train", "paceline.verbs.train"), ("memory", "paceline.verbs.memory")]
)
def test_each_stands_for_its_setting(monkeypatch: pytest.MonkeyPatch, command: str, module: str) -> None:
    calls = noted(monkeypatch, module, command)
    assert run(monkeypatch, command, "--model", "m", "--data", "d.csv", *TYPED) == 0
    assert settled(calls[0][0]) == (5, 3e-5, 16, 256, 1)


def test_a_plan_and_a_trace_take_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.verbs import plan

    found: list[Recipe] = []

    def planned(recipe: Recipe, **_: Any) -> None:
        found.append(recipe)
        raise SystemExit(0)

    monkeypatch.setattr(plan, "plan", planned)
    run(monkeypatch, "plan", "--model", "m", "--data", "d.csv", *TYPED)
    calls = noted(monkeypatch, "paceline.verbs.train", "train")
    run(monkeypatch, "trace", "--model", "m", "--data", "d.csv", "--steps", "1:2", *TYPED)
    found.append(calls[0][0])
    assert [settled(recipe) for recipe in found] == [(5, 3e-5, 16, 256, 1)] * 2


def test_a_trace_that_starts_another_command_passes_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.verbs import trace

    seen: list[list[str]] = []
    monkeypatch.setattr(trace, "train_first", lambda words: seen.append(words) or 3)
    arguments = ["trace", "--model", "m", "--data", "d.csv", "--steps", "1:2", "--try", "--out", "x", "--epochs", "5"]
    assert run(monkeypatch, *arguments) == 3
    assert "loop.epochs=5" in seen[0]


def test_a_trace_that_is_only_read_takes_none(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    assert run(monkeypatch, "trace", str(tmp_path), "--epochs", "3") == 2
    assert f"{tmp_path} with --epochs" in capsys.readouterr().err


def test_a_resumed_run_takes_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = noted(monkeypatch, "paceline.verbs.train", "resume")
    run(monkeypatch, "train", str(tmp_path), "--resume", "--epochs", "9")
    assert calls == [(tmp_path, ["loop.epochs=9"])]


def test_ranks_are_started_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(launch, "launch", lambda command, ranks, **_: made.append(command) or 0)
    run(monkeypatch, "train", "--model", "m", "--data", "d.csv", "--processes", "2", "--lr", "3e-5", "--seed=4")
    assert made[0][-3:] == ["--lr", "3e-5", "--seed=4"]


@pytest.mark.parametrize("option", SETTINGS)
def test_what_is_set_twice_is_refused(option: str) -> None:
    name = option.removeprefix("--").replace("-", "_")
    with pytest.raises(RecipeError) as caught:
        all_settings([f"{SETTINGS[option]} = 8"], **{**NONE, name: "9"})
    assert f"{option} 9 with --set {SETTINGS[option]} = 8" in str(caught.value)
    assert f"stands for --set {SETTINGS[option]}" in str(caught.value)
    assert all_settings(["name=x"], **{**NONE, name: "9"}) == ["name=x", f"{SETTINGS[option]}=9"]


def test_a_value_is_refused_by_its_setting(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run(monkeypatch, "train", "--model", "m", "--data", "d.csv", "--epochs", "many") == 2
    assert "loop.epochs = 'many'" in capsys.readouterr().err


def test_advice_takes_the_place_of_what_it_corrects() -> None:
    typed = ["train", "r.yaml", "--batch-size", "1", "--set=loop.batch_size=1", "--set", "seed=3", "--lr=1"]
    assert without(typed, "loop.batch_size=2,") == ["train", "r.yaml", "--set", "seed=3", "--lr=1"]


@pytest.mark.parametrize("typed", [["--batch-size", "1"], ["--set", "loop.batch_size=1"]])
def test_a_launch_does_not_advise_two_sizes_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, typed: list[str]
) -> None:
    assert run(monkeypatch, "train", "--model", "m", "--data", "d.csv", "--processes", "2", *typed) == 2
    fix = capsys.readouterr().err.partition("fix: ")[2]
    assert "--data d.csv --processes 2 --set loop.batch_size=2, or start 1 process" in fix


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        (["--learning_rate", "3e-5"], ("--learning_rate: no such option", "is optimizer.lr here", "fix: --lr 3e-5")),
        (["--num-train-epochs=3"], ("loop.epochs", "fix: --epochs 3")),
        (["--warmup_ratio", "0.1"], ("schedule.warmup", "fix: --set schedule.warmup=0.1")),
        (["--fp16"], ("techniques.precision=fp16", "fix: --set techniques.precision=fp16")),
        (["--num_workers", "4"], ("no counterpart here", "fix: leave it out")),
        (["--output_dir", "x"], ("fix: --out x",)),
        (["--optimizer.lr", "1"], ("fix: --set optimizer.lr=1",)),
        (["--batch_size", "3"], ("fix: --batch-size 3",)),
        (["--ws", "2"], ("fix: --world-size 2",)),
        (["--init_method=TCP"], ("fix: --init tcp://HOST:PORT --rank RANK --world-size N",)),
        (["--print_every", "50"], ("fix: --set observe.log_every=50",)),
        (["--strategy", "deepspeed_stage_2"], ("fix: --set parallel.strategy=deepspeed --set parallel.stage=2",)),
        (["--learning_rate"], ("fix: --lr VALUE",)),
        (["--modle", "x"], ("--model",)),
    ],
)
def test_an_option_of_another_program_is_led_to_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, typed: list[str], parts: tuple[str, ...]
) -> None:
    assert run(monkeypatch, "train", "--data", "d.csv", *typed) == 2
    told = capsys.readouterr().err
    for part in parts:
        assert part in told


def test_an_option_that_another_command_has_is_not_advised(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run(monkeypatch, "predict", "runs/x", "--num_processes", "2") == 2
    assert "fix: leave it out" in capsys.readouterr().err
    assert run(monkeypatch, "doctor", "--optimizer.lr", "1") == 2
    assert "--set" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "fix"),
    [("evaluate", "paceline evaluate NAME --data FILE"), ("predict", "paceline predict NAME new.csv -o out.csv")],
)
def test_a_trained_model_is_named_without_an_option(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, verb: str, fix: str
) -> None:
    assert run(monkeypatch, verb, "--model", "m") == 2
    told = capsys.readouterr().err
    assert "--model: no such option" in told
    assert f"fix: {fix}" in told


def test_an_evaluation_is_run_again_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[str], int]] = []
    monkeypatch.setattr("paceline.verbs.launch.again.launch", lambda cmd, ranks: made.append((cmd, ranks.count)) or 7)
    assert run(monkeypatch, "evaluate", "runs/x", "--processes", "3", "--split", "validation") == 7
    ((command, count),) = made
    assert (command[-4:], count) == (["evaluate", "runs/x", "--split", "validation"], 3)
