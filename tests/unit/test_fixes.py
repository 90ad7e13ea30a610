"""Fixes, typed as printed: settings and options in messages exist, and a fix gets past the error that names it."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

import paceline
from paceline.contract.errors import RecipeError
from paceline.recipe import Recipe, merge
from paceline.recipe.choose import choose
from paceline.recipe.entries import written
from paceline.recipe.explain import setting_paths
from paceline.recipe.techniques import ENTRIES
from paceline.verbs import cli
from tests.unit.test_techniques_verb import CPU, machine

SOURCE = Path(paceline.__file__).parent
LEAVES = [*setting_paths(Recipe)]
PATHS = {*LEAVES, *(path.rpartition(".")[0] for path in LEAVES)} - {""}
OPEN = ("task.class_weights.", "model.config.", "data.normalise.", "optimizer.ema.", "loop.early_stopping.")
"""Groups whose keys are a user's own, or that may also be a single value."""

HOLE = "\0"
"""Where an f-string takes a value."""

FOREIGN = re.compile(
    r"\b(srun|sbatch|torchrun|mpirun|horovodrun|pip|hf|git|nvidia-smi|convmv|nsys|hostname|jq|tr|ssh)\b"
)
"""Programs with options of their own."""


class Text(NamedTuple):
    """A text of the source that is no docstring."""

    place: str
    text: str


def texts(path: Path) -> Iterator[Text]:
    """Yield the texts of a file, with ``HOLE`` where an f-string takes a value."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        place = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.JoinedStr):
            yield Text(place, "".join(_text_of(value) for value in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts | docstrings:
            yield Text(place, node.value)


def _text_of(value: ast.expr) -> str:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else HOLE


def unknown_settings(text: str) -> list[str]:
    """Settings that a text tells to set, and that the recipe does not have."""
    found = re.findall(rf"--set '?([\w.{HOLE}]+)=", text) + re.findall(r"(?<!--)\bset ([a-z_]+(?:\.[a-z_]+)+)=", text)
    return [path for path in found if not _is_known(path)]


def _is_known(path: str) -> bool:
    if HOLE in path:
        pattern = re.compile(re.escape(path).replace(re.escape(HOLE), r"[\w.]+"))
        return any(pattern.fullmatch(one) for one in PATHS) or path.startswith(OPEN)
    return path in PATHS or path.startswith(OPEN)


def commands() -> dict[str, set[str]]:
    """Each command with its options; the groups' own too."""
    group = typer.main.get_command(cli.app)
    options: dict[str, set[str]] = {}
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        below = [command, *getattr(command, "commands", {}).values()]
        options[name] = {
            opt for one in below for parameter in one.params for opt in (*parameter.opts, *parameter.secondary_opts)
        }
    return options


COMMANDS = commands()


def unknown_options(text: str) -> list[str]:
    """Commands and options that a text names, and that the command line does not have."""
    wrong = []
    for verb, rest in re.findall(r"\bpaceline ([a-z]+)\b([^;`\n]*)", text):
        if verb not in COMMANDS:
            # prose goes on in words
            wrong += [f"paceline {verb}"] * bool(re.match(rf"\s+(--|[A-Z]{{2,}}\b|{HOLE})", rest))
            continue
        rest = re.split(r", or |\bpaceline\b", rest)[0]
        known = COMMANDS[verb] | {"--help", "-h"}
        wrong += [f"paceline {verb} {one}" for one in re.findall(r"(?<=\s)--[a-z][a-z-]*", rest) if one not in known]
    return wrong


TEXTS = [text for path in sorted(SOURCE.rglob("*.py")) for text in texts(path)]


def test_settings_that_messages_name_exist() -> None:
    assert len(TEXTS) > 3000
    assert [(place, path) for place, text in TEXTS for path in unknown_settings(text)] == []


def test_commands_that_messages_name_exist() -> None:
    assert [(place, one) for place, text in TEXTS if not FOREIGN.search(text) for one in unknown_options(text)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("--set loop.epohcs=3", ["loop.epohcs"]),
        ("--set data.text=COLUMN --set data.labl=COLUMN", ["data.labl"]),
        ("set model.trian=head", ["model.trian"]),
        ("--set 'data.delimitre=\";\"'", ["data.delimitre"]),
        (f"--set data.{HOLE}=COLUMN", []),
        ("--set task.class_weights.spam=2", []),
    ],
)
def test_a_wrong_setting_would_be_seen(text: str, wrong: list[str]) -> None:
    assert unknown_settings(text) == wrong


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("paceline trian RECIPE", ["paceline trian"]),
        ("paceline train RUN --resum", ["paceline train --resum"]),
        ("paceline predict RUN new.csv --gpus 2; or --gpus", ["paceline predict --gpus"]),
        ("paceline train RUN --resume, or paceline lr RECIPE --steps 3", []),
    ],
)
def test_a_wrong_command_would_be_seen(text: str, wrong: list[str]) -> None:
    assert unknown_options(text) == wrong


# ---- fixes that are settings, typed


GPUS = machine("NVIDIA H200", (9, 0))
SOURCES = {"model": {"source": "m"}, "data": {"source": "d.csv"}}
WRONG: tuple[Any, ...] = ("nonsense", "3", -1, 2.5, True, None, [], ["x"], {"x": 1}, 10**12)
"""Values of which each setting refuses some."""


def typed_settings(fix: str) -> list[str]:
    """The settings of a fix's first command as a shell passes them on; placeholders filled in."""
    command = re.split(r", or |; ", fix.partition("--set ")[1] + fix.partition("--set ")[2])[0]
    words = shlex.split(command)
    settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    return [re.sub(r"=(NAME|FOLDER|MODULE:FUNCTION)$", "=module:function", one).rstrip(",") for one in settings]


def typed_options(fix: str) -> list[list[str]]:
    """Each way out that a fix types as options, as settings: ``--data FILE`` is ``data.source=FILE``."""
    ways = []
    for way in re.split(r", or |; |(?<=[a-z\d]), (?=--set)|\bor (?=--set)", fix):
        words = shlex.split(way[at:]) if (at := way.find("--")) >= 0 and "paceline" not in way[:at] else []
        pairs = itertools.pairwise(words)
        options = [
            f"data.source={word}" * (name == "--data") or word for name, word in pairs if name in ("--set", "--data")
        ]
        ways += [[option.rstrip(")") for option in options]] * bool(options)
    return ways


def failing_fixes(settings: Mapping[str, Any], check: Callable[[Recipe], object]) -> Iterator[str]:
    """Apply fixes until the recipe is taken; yield what is wrong with one on the way."""
    applied: list[str] = []
    seen: set[str] = set()
    while True:
        try:
            check(Recipe.parse(merge(settings, applied)))
            return
        except RecipeError as error:
            if str(error) in seen:
                yield f"the fix does not get past its error: {error}"
                return
            seen.add(str(error))
            if not error.fix:
                yield f"no fix: {error}"
                return
            if "--set " not in error.fix:
                return  # a change of the file, or of the machine
            applied += typed_settings(error.fix)


@pytest.mark.parametrize("path", LEAVES)
def test_the_fix_for_a_value_that_cannot_be_gets_past_it(path: str) -> None:
    wrong = []
    for value in WRONG:
        settings = merge(SOURCES, [])
        *parents, last = path.split(".")
        node = settings
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        wrong += failing_fixes(settings, lambda recipe: recipe)
    assert wrong == []


def violations() -> Iterator[Any]:
    """Each technique with each setting that one of its rules forbids, or without one that it needs."""
    for entry in ENTRIES:
        value = entry.name if entry.choice else written(entry.example)
        for rule in (*entry.needs, *entry.excludes):
            for other in rule.values:
                broken = f"{rule.path}={other}"
                yield pytest.param([f"{entry.setting}={value}", broken], id=f"{entry.name}-{broken}")


@pytest.mark.parametrize("settings", [*violations()])
@pytest.mark.parametrize("world_size", [1, 4])
def test_the_fix_for_a_rule_gets_past_it(settings: list[str], world_size: int) -> None:
    for facts in (GPUS, CPU):
        recipe = merge(SOURCES, settings)
        assert [*failing_fixes(recipe, lambda recipe, facts=facts: choose(recipe, facts, world_size))] == []
