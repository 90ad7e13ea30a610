"""What the documentation says can be done: commands parse, recipes parse, links lead somewhere, tables are current."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import typer

import paceline
from paceline.contract.errors import UserError
from paceline.recipe import Recipe, parse_yaml
from paceline.verbs import cli
from paceline.verbs.asked import build_recipe

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "paceline"
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
USAGE_ERROR = typer.BadParameter.__mro__[1]
"""What the command line raises for an option, argument or command that it does not have; typer has no name for it."""

FOLDERS = ("src", "tests", "docs", "recipes", "benchmarks", "scripts")


class Block(NamedTuple):
    """A fenced block: where it begins, its language and its text."""

    place: str
    language: str
    text: str


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    text = path.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(f"{path.relative_to(ROOT)}:{line}", found[1], found[2])


def of_language(language: str) -> list[Any]:
    found = [block for path in PAGES for block in blocks(path) if block.language == language]
    return [pytest.param(block, id=block.place) for block in found]


def without_blocks(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The command lines of a bash block, comments and redirections taken off."""
    lines = [line.partition(" #")[0].partition(" > ")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def parse_command(line: str) -> None:
    """Parse ``paceline ...`` as the command line would, without running it; settings are tried on the recipe.

    Raises:
        Exception: of the command line's own, for what it does not know; RecipeError for a setting.
    """
    group = typer.main.get_command(cli.app)
    arguments = shlex.split(line)[1:]
    context = group.make_context("paceline", arguments, resilient_parsing=False)
    name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    parameters = command.make_context(name, rest, parent=context).params
    settings = parameters.get("settings") or []
    if name != "train":
        return
    # older releases of typer make a Path of it only later
    target = Path(parameters["target"]) if parameters["target"] else None
    if target is not None and target.suffix == ".yaml" and (ROOT / target).is_file():
        build_recipe(ROOT / target, parameters["model"], parameters["data"], settings)
    else:
        # a recipe or a run folder of the reader's own
        build_recipe(None, parameters["model"] or "MODEL", parameters["data"] or "data.csv", settings)


def check_make(line: str) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    unknown = set(shlex.split(line)[1:]) - set(targets)
    assert not unknown, f"the Makefile has no {unknown}"


@pytest.mark.parametrize("block", of_language("bash"))
def test_commands_can_be_typed(block: Block) -> None:
    found = commands(block.text)
    assert found, f"{block.place}: no command in it"
    for line in found:
        if line.startswith("paceline "):
            parse_command(line)
        elif line.startswith("make "):
            check_make(line)
        for path in re.findall(rf"(?:^|\s)((?:{'|'.join(FOLDERS)})/[\w./-]+)", line):
            assert (ROOT / path).exists(), f"{block.place}: {path} is not there"


@pytest.mark.parametrize(
    "line",
    [
        "paceline tain recipe.yaml",
        "paceline train --modle x --data y",
        "paceline train recipes/digits.yaml --set optimiser.lr=3",
        "paceline train --model x --data y --set loop.epochs=none",
        "paceline predict",
    ],
)
def test_a_wrong_command_would_be_seen(line: str) -> None:
    with pytest.raises((UserError, USAGE_ERROR)):
        parse_command(line)


@pytest.mark.parametrize("block", of_language("yaml"))
def test_recipes_parse(block: Block) -> None:
    plain = parse_yaml(block.text, block.place)
    if {"source", "config", "factory"}.isdisjoint(plain.get("model", {})):
        plain["model"] = {"source": "MODEL", **plain.get("model", {})}
    Recipe.parse(plain)


@pytest.mark.parametrize("block", of_language("python"))
def test_python_is_python_and_its_names_exist(block: Block) -> None:
    tree = ast.parse(block.text, block.place)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "paceline"
    }
    assert used <= set(paceline.__all__), f"{block.place}: paceline has no {used - set(paceline.__all__)}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", without_blocks(path)):
        if "://" in target:
            continue
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), f"{path.name}: {target} is not there"
        assert there.is_relative_to(ROOT), f"{path.name}: {target} leads out of the repository"
        assert not anchor or anchor in anchors(there), f"{path.name}: {target} has no heading #{anchor}"


def anchors(path: Path) -> set[str]:
    """Headings as links name them."""
    found = re.findall(r"^#+ (.*)$", without_blocks(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path: Path) -> None:
    """``tests/parity/test_loop.py`` in a sentence is as much a promise as a link."""
    for name in re.findall(rf"`(?:[^`]* )?((?:{'|'.join(FOLDERS)})/[\w./-]+)`", without_blocks(path)):
        assert (ROOT / name).exists(), f"{path.name}: {name} is not there"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_that_are_named_exist(path: Path) -> None:
    """``room/file.py: Class.method``, ``paceline.room.file.name``, ``file.py`` and the imports of examples."""
    text = path.read_text(encoding="utf-8")
    if "Superseded by" in text:
        pytest.skip("tells of the house that was")
    here, prose = path.relative_to(ROOT), without_blocks(path)
    for file, name in re.findall(r"`([\w/]+\.py): ([\w.]+)`", prose):
        assert defines(SOURCE / file, name), f"{here}: there is no {name} in src/paceline/{file}"
    for dotted in re.findall(r"`paceline\.([a-z_]+\.[\w.]+)", prose):
        assert is_there(dotted), f"{here}: there is no paceline.{dotted}"
    for file in set(re.findall(r"`((?:[\w]+/)*\w+\.py)(?::[^`]*)?`", prose)):
        assert any(f"/{known}".endswith(f"/{file}") for known in our_files()), f"{here}: no file ends in {file}"
    for block in blocks(path):
        for node in ast.walk(ast.parse(block.text)) if block.language == "python" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline."):
                for alias in node.names:
                    dotted = f"{node.module}.{alias.name}".removeprefix("paceline.")
                    assert is_there(dotted), f"{block.place}: there is no paceline.{dotted}"


def test_a_function_that_is_gone_would_be_seen() -> None:
    assert defines(SOURCE / "engine/step.py", "Step.micro")
    assert defines(SOURCE / "recipe/parts/optimizer.py", "OptimizerPart.clip_norm")
    assert not defines(SOURCE / "engine/step.py", "Step.macro")
    assert not defines(SOURCE / "engine/steps.py", "Step")
    assert is_there("seams.Batch")
    assert not is_there("seams.Trunk")
    assert not is_there("attic.step.Step")


@functools.cache
def our_files() -> list[str]:
    """Python files of the repository, from its root."""
    folders = [ROOT / folder for folder in FOLDERS]
    return [path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py")]


def is_there(dotted: str) -> bool:
    """Whether ``room.file.Class.method`` is a module of ours, or a name in one."""
    parts = dotted.split(".")
    for at in range(len(parts), 0, -1):
        place = SOURCE.joinpath(*parts[:at])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            return at == len(parts) or defines(file, ".".join(parts[at:]))
    return False


def defines(file: Path, name: str) -> bool:
    """Whether a file defines, or takes in from elsewhere, a dotted name; parsed alone, so that nothing is imported."""
    if not file.is_file():
        return False
    body: list[ast.stmt] = tree_of(file).body
    for part in name.split("."):
        found = [node for node in body if part in names_of(node)]
        if not found:
            return False
        body = getattr(found[0], "body", [])
    return True


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def names_of(node: ast.stmt) -> set[str]:
    """What a statement gives a name to."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


GENERATED = r"<!-- (?:rules|families|fields|names)\b.*?<!-- end of \w+ -->"
OTHER_WORDS = {
    r"cards?": "GPU, or page",
    r"launched steps?": "eager step",
    r"recordings?": "capture, or CUDA graph",
    r"recorded (?:as|in) (?:a )?CUDA graphs?": "captured",
    r"sum(?:s|med)? over (?:the )?ranks": "all-reduce",
    r"kept apart|keeps them apart": "isolated",
    r"deal(?:s|t|ing)?": "split",
    r"(?:fast|plain|slow) path": "execution",
}
"""Words that PyTorch has others for, and these."""


@pytest.mark.parametrize(
    "path", [page for page in PAGES if page.name != "README.zh.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_pages_use_the_words_of_pytorch(path: Path) -> None:
    """In prose; what commands print, names in backticks and generated tables follow the source."""
    others = other_words(path.read_text(encoding="utf-8"))
    assert not others, f"{path.relative_to(ROOT)}: " + "; ".join(others)


def test_a_word_that_is_not_pytorchs_would_be_seen() -> None:
    assert other_words("Gradients are summed over\nranks.") == ["'summed over ranks': say all-reduce"]
    assert other_words("A Card.") == ["'Card': say GPU, or page"]
    assert not other_words("`a card`, ![](card.svg)\n```\non the card\n```\n<!-- rules -->a card<!-- end of rules -->")


def other_words(text: str) -> list[str]:
    """What a page says in words of its own, and what to say instead."""
    hidden = rf"^```.*?^```$|{GENERATED}|`[^`]*`|\]\([^)]*\)"
    prose = " ".join(re.sub(hidden, " ", text, flags=re.MULTILINE | re.DOTALL).split())
    return [
        f"{found[0]!r}: say {word}"
        for pattern, word in OTHER_WORDS.items()
        for found in re.finditer(rf"\b(?:{pattern})\b", prose, re.IGNORECASE)
    ]


def test_both_readmes_have_the_same_headings_and_commands() -> None:
    one, other = (re.findall(r"^(#+) ", without_blocks(path), re.MULTILINE) for path in READMES)
    assert one == other, "a section is missing in one of them"
    one, other = ([commands(block.text) for block in blocks(path) if block.language == "bash"] for path in READMES)
    assert one == other, "a command differs"
    one, other = (
        [parse_yaml(block.text, block.place) for block in blocks(path) if block.language == "yaml"] for path in READMES
    )
    assert one == other, "a recipe differs"
    inline = [set(re.findall(r"`(\.venv/bin/python [^`]*|--set [^`]*)`", without_blocks(path))) for path in READMES]
    assert inline[0] == inline[1], "a check or a setting differs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return script("recipe_reference")


def script(name: str) -> ModuleType:
    """A file of scripts/, which is no part of a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_recipes_is_current(reference: ModuleType) -> None:
    written = reference.PAGE.read_text(encoding="utf-8")
    assert written == reference.page(written), "run: python scripts/recipe_reference.py"


def test_the_rules_on_pages_are_current() -> None:
    rules = script("technique_rules")
    for entry in rules.ENTRIES:
        written = (ROOT / entry.page).read_text(encoding="utf-8")
        assert written == rules.rewritten(written, entry), f"{entry.page}: run python scripts/technique_rules.py"


def test_pictures_are_current_and_shown() -> None:
    pictures = script("docs_pictures")
    drawn = (pictures.PICTURES / "memory_errors.svg").read_text(encoding="utf-8")
    assert drawn == pictures.errors(pictures.records()), "run: python scripts/docs_pictures.py"
    # the others rest on plans, which take a minute: their figures stand in the text as well
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    for path in pictures.PICTURES.glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert f"](pictures/{path.name})" in page, f"{path.name} is shown nowhere"


def test_every_field_is_explained(reference: ModuleType) -> None:
    assert reference.missing_words() == [], "describe these in recipe/parts/, or in scripts/recipe_reference.py"


def test_every_decision_has_its_number_and_its_parts() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert pages
    for number, path in enumerate(pages, start=1):
        text = path.read_text(encoding="utf-8")
        assert path.name.startswith(f"{number:04d}-"), f"{path.name}: a number is missing or twice"
        assert text.startswith(f"# {number}. "), f"{path.name}: its heading has another number"
        for part in ("**Question.**", "**Decision.**", "**Why.**"):
            assert part in text, f"{path.name}: no {part}"
