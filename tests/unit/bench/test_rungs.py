"""The ladder as data: names, what each rung needs, and the scripts that it is climbed with."""

from __future__ import annotations

import ast
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import cells
from paceline.bench.cells import CONTENDERS, SHARED, Bench, Cell, measure, script, turns
from paceline.bench.process import Outcome
from paceline.bench.rungs import LADDERS, OURS, TEXT, Rung, chosen, obstacle, without
from paceline.bench.start import Trained
from paceline.bench.work import Extent
from paceline.contract.errors import UserError
from paceline.contract.redaction import without_credentials
from paceline.machine.facts import Facts, Gpu
from paceline.recipe import Recipe
from paceline.recipe.choose import choose

HERE = Facts(python="3.11", platform="linux", cpu_model="cpu", cpu_count=2, memory_bytes=2**34)
EVERY = [rung for ladder in LADDERS.values() for rung in ladder]


def with_gpus(number: int) -> Facts:
    gpu = Gpu(name="NVIDIA H100", driver="580.1", memory_bytes=80 * 2**30, compute_capability=(9, 0))
    return replace(HERE, gpus=(gpu,) * number, versions={"torch": "2.13.0", "triton": "3.6"}, torch_cuda="13.0")


@pytest.mark.parametrize("ladder", LADDERS.values(), ids=LADDERS)
def test_rungs_have_names_of_their_own_and_scripts_that_exist(ladder: tuple[Rung, ...]) -> None:
    names = [rung.name for rung in ladder]
    assert len(set(names)) == len(names)
    assert all(without_credentials(name) == name for name in names), "a name that is taken for a token is not shown"
    assert ladder[0].contender != OURS, "the first rung is the tutorials' loop"
    assert [rung.name for rung in ladder[-2:]] == [OURS, "paceline_ddp"], "what paceline chooses, on one GPU and on all"
    for rung in ladder:
        assert rung.contender == OURS or (CONTENDERS / f"{rung.contender}.py").is_file(), rung.contender
        assert rung.change, rung.name


@pytest.mark.parametrize("rung", [rung for rung in EVERY if rung.contender == OURS], ids=lambda rung: rung.name)
def test_settings_of_ours_are_a_recipes(rung: Rung) -> None:
    settings = [f"{key}={str(value).lower()}" for key, value in rung.settings.items()]
    Recipe.parse({"model": {"source": "m"}}).with_settings(settings)


def test_each_rung_of_ours_changes_one_thing() -> None:
    ours = [rung for rung in TEXT if rung.contender == OURS and rung.settings]
    for before, after in itertools.pairwise(ours):
        changed = {key for key in after.settings if before.settings.get(key) != after.settings[key]}
        assert len(changed) == 1, f"{after.name} changes {changed}"


def test_a_rung_goes_without_what_the_rungs_below_it_could_not_add() -> None:
    def rung(name: str, number: int, **instead: Any) -> Rung:
        return Rung(name=name, contender=OURS, change="", settings={"a": number > 0, "b": number > 1}, instead=instead)

    ladder = [rung("off", 0), rung("first", 1, a=False), rung("second", 2, b=False)]
    told = {
        each.name: each.settings
        for each in without([*ladder, Rung(name="auto", contender=OURS, change="")], ("first",))
    }
    assert told["second"] == {"a": False, "b": True}
    assert told["auto"] == {}, "what it chooses by itself is its own"


@pytest.mark.parametrize("facts", [HERE, with_gpus(1)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("reads", LADDERS)
def test_every_rung_of_ours_can_be_chosen_where_it_is_run(reads: str, facts: Facts) -> None:
    """The catalogue refuses no setting of a rung beside those that are left of the rungs below."""
    model = {"config": {"model_type": "distilbert" if reads == "text" else "resnet"}}
    unable = {rung.name for rung in LADDERS[reads] if obstacle(rung, facts, installed=lambda _: True)}
    able = [rung for rung in without(LADDERS[reads], unable) if rung.contender == OURS and rung.name not in unable]
    assert len(able) >= 4
    for rung in able:
        settings = [f"{key}={str(value).lower()}" for key, value in rung.settings.items()]
        choose(Recipe.parse({"model": model}).with_settings(settings), facts)


@pytest.mark.parametrize(("name", "options"), [("paceline", []), ("paceline_ddp", ["--gpus", "2"])])
def test_a_rung_of_ours_gets_all_gpus_only_where_it_takes_them(
    name: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def train(recipe: Path, out: Path, options: list[str], **started: Any) -> Trained:
        commands.append(options)
        outcome = Outcome(status="failed", code=1, seconds=1.0, peak_bytes=0, lines=(), error="not started here")
        return Trained([*options], outcome, None, ())

    monkeypatch.setattr(cells, "train", train)
    extent = Extent(steps=20, train_rows=20, heldout_rows=2, warm_up=2)
    bench = Bench(folder=tmp_path, extent=extent, job={}, recipe=Path("r.yaml"), batch_size=1, gpus=2, seed=0)
    rung = next(rung for rung in TEXT if rung.name == name)
    measure(Cell(rung, 0), bench, limit_seconds=1, out_of_time=False)
    assert commands == [["--set", "seed=0", *options]]


def test_rungs_are_chosen_by_name_pattern_and_contender_in_the_ladders_order() -> None:
    assert [rung.name for rung in chosen(TEXT, ("paceline", "plain"))] == ["plain", "paceline"]
    assert {rung.contender for rung in chosen(TEXT, ("fabric_loop",))} == {"fabric_loop"}
    both = [Rung(name=name, contender="a", change="") for name in ("a", "b")]
    assert chosen(both, ("a",)) == (both[0],), "a rung is meant before a contender"
    assert all(rung.name.startswith("accelerate") for rung in chosen(TEXT, ("accelerate*",)))
    assert chosen(TEXT, ()) == TEXT


def test_an_unknown_rung_is_told_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"--rungs lightnin: no such rung(.|\n)*did you mean 'lightning'"):
        chosen(TEXT, ("plain", "lightnin"))


def test_what_a_machine_lacks_is_told_and_gpus_come_first() -> None:
    rung = Rung(name="a", contender="x", change="y", packages=("accelerate", "nowhere"), gpus=2, compiles=True)

    def told(facts: Facts, installed: bool = True, compiler: bool = True) -> tuple[str, str] | None:
        return obstacle(rung, facts, installed=lambda _: installed, compiler=lambda: compiler)

    assert told(HERE) == ("not here", "it needs 2 GPUs, and this machine has none")
    assert told(with_gpus(1)) == ("not here", "it needs 2 GPUs, and this machine has 1")
    assert told(with_gpus(2), installed=False) == ("absent", "pip install accelerate nowhere")
    assert told(with_gpus(2), compiler=False) == ("not here", "it needs a C++ compiler, such as g++")
    assert told(with_gpus(2)) is None


def test_rounds_take_turns_and_the_first_begins_with_the_first_rung() -> None:
    cells = turns(TEXT[:3], 3)
    assert len(set(cells)) == 9
    assert [cell.rung.name for cell in cells[:3]] == [rung.name for rung in TEXT[:3]]
    assert [cells[at].rung for at in (0, 3, 6)] == list(TEXT[:3]), "each round begins at another rung"
    assert [cell.cold for cell in cells] == [True] * 3 + [False] * 6
    assert Cell(TEXT[0], 1).name == "plain-1"


@pytest.mark.parametrize("path", sorted(CONTENDERS.glob("*.py")), ids=lambda path: path.stem)
def test_a_contender_is_one_file_without_paceline(path: object) -> None:
    name = str(getattr(path, "stem", path))
    text = script(name) if name != SHARED else (CONTENDERS / f"{SHARED}.py").read_text()
    tree = ast.parse(text)
    imported = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {(node.module or "").partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & {"paceline", SHARED}, f"{name} imports {imported & {'paceline', SHARED}}"
    compile(text, name, "exec")
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if name not in (SHARED, "matmul"):
        assert {"read_job", "tell_result", "main"} <= defined, f"{name} is not whole"
        assert "main" in used


def test_a_contender_defines_all_that_it_uses() -> None:
    """What a script takes from the shared module is in it under that name."""
    shared = ast.parse((CONTENDERS / f"{SHARED}.py").read_text())
    there = {node.name for node in shared.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for path in CONTENDERS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == SHARED:
                assert {alias.name for alias in node.names} <= there, path.name
