"""A technique is one room, one setting, one page, one parity test and one entry of the catalogue."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

from paceline.recipe import Recipe
from paceline.recipe.catalogue.strategies import AXES, STRATEGIES
from paceline.recipe.entries import value_of
from paceline.recipe.parts import ParallelPart, TechniquesPart
from paceline.recipe.techniques import AXIS_SETTINGS, CATALOGUE, ENTRIES, OWN_SETTINGS
from paceline.verbs.techniques import field_at

ROOT = Path(__file__).resolve().parents[2]


def mismatches(root: Path, names: Iterable[str], elsewhere: Iterable[str] = ()) -> list[str]:
    """Where files, pages and parity tests differ from ``names``; those ``elsewhere`` have another room."""
    names = set(names)
    source, pages = root / "src" / "paceline" / "techniques", root / "docs" / "techniques"
    groups = {
        "files in src/paceline/techniques": {p.stem for p in source.glob("*.py")} - {"__init__"} | set(elsewhere),
        "pages in docs/techniques": {p.stem for p in pages.glob("*.md")} - {"README"},
    }
    problems = [
        f"{what}: {name} is {'missing' if name in names else 'not in the catalogue'}"
        for what, found in groups.items()
        for name in sorted(found ^ names)
    ]
    # the folder holds other parity tests too, such as that of the bare loop
    parity = {p.stem.removeprefix("test_") for p in (root / "tests" / "parity").glob("test_*.py")}
    return problems + [f"tests/parity/test_{name}.py is missing" for name in sorted(names - parity)]


def test_catalogue_files_fields_pages_and_parity_tests_agree() -> None:
    rooms = {entry.name: ROOT / "src" / f"{entry.room.replace('.', '/')}.py" for entry in ENTRIES if entry.room}
    assert all(room.is_file() for room in rooms.values()), f"rooms that are not there: {rooms}"
    problems = mismatches(ROOT, (entry.name for entry in ENTRIES), rooms)
    assert not problems, "\n".join(problems)


def test_every_entry_is_a_setting_and_every_field_of_techniques_an_entry() -> None:
    own = {entry.name for entry in ENTRIES if entry.setting.startswith("techniques.")}
    assert own == set(TechniquesPart.model_fields)
    strategies = set(get_args(ParallelPart.model_fields["strategy"].annotation)) - {"auto"}
    assert strategies == {entry.name for entry in STRATEGIES}
    plain = Recipe.parse({"model": {"source": "any"}})
    for entry in ENTRIES:
        assert field_at(entry.setting).description, f"{entry.setting} is not told"
        assert not entry.is_on(plain), f"{entry.name} is on by default"


def test_settings_that_change_the_result_exist_and_their_page_says_so() -> None:
    for entry in CATALOGUE:
        page = (ROOT / entry.page).read_text()
        for value in entry.changing:
            assert value in str(field_at(entry.setting).annotation), f"{entry.name} has no {value}"
            rows = [line for line in page.splitlines() if line.startswith(f"| `{value}`")]
            assert any("changes the result" in row for row in rows), f"{entry.page} says nothing of {value}"


def test_rules_name_settings_and_values_that_there_are_and_a_reason() -> None:
    plain = Recipe.parse({"model": {"source": "any"}})
    for entry in ENTRIES:
        for rule in (*entry.needs, *entry.excludes, *(rule for own in entry.settings for rule in own.needs)):
            assert rule.why, f"{entry.name}: {rule.condition} without a reason"
            assert rule.values, f"{entry.name}: {rule.condition} has no value"
            for value in rule.values:
                beside = ["model.train=lora"] * rule.path.startswith("model.lora.")  # without which it has no effect
                changed = plain.with_settings([*beside, f"{rule.path}={value}"])
                assert rule.holds(value_of(changed, rule.path)) is not rule.is_negated, (
                    f"{entry.name}: {rule.condition} does not know {value}"
                )


def test_values_are_those_of_the_field() -> None:
    for entry in CATALOGUE:
        if entry.values:
            field = set(get_args(field_at(entry.setting).annotation))
            assert field == {"auto", entry.off, *(value.name for value in entry.values)}, entry.name


def test_settings_of_a_strategy_are_the_fields_of_parallel_and_alike_in_each() -> None:
    for entry in STRATEGIES:
        for own in entry.settings:
            assert own == OWN_SETTINGS[own.name], f"{own.name} is another setting with {entry.name}"
    fields = ParallelPart.model_fields
    own = {"strategy", "backend", "sync_batch_norm", *(entry.place.rpartition(".")[2] for entry in AXES)}
    assert OWN_SETTINGS.keys() == fields.keys() - own - AXIS_SETTINGS.keys()
    for name, own in (OWN_SETTINGS | AXIS_SETTINGS).items():
        assert fields[name].default == own.default


def test_no_entry_stands_twice() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names), f"an entry stands twice: {names}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("src/paceline/techniques/planted.py", "files in src/paceline/techniques: planted is not in the catalogue"),
        ("docs/techniques/planted.md", "pages in docs/techniques: planted is not in the catalogue"),
        ("-src/paceline/techniques/known.py", "files in src/paceline/techniques: known is missing"),
        ("-docs/techniques/known.md", "pages in docs/techniques: known is missing"),
        ("-tests/parity/test_known.py", "tests/parity/test_known.py is missing"),
    ],
)
def test_the_guard_sees_every_mismatch(tmp_path: Path, change: str, message: str) -> None:
    for name in (
        "src/paceline/techniques/known.py",
        "src/paceline/techniques/__init__.py",
        "docs/techniques/known.md",
        "docs/techniques/README.md",
        "tests/parity/test_known.py",
        "tests/parity/test_loop.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert mismatches(tmp_path, ["known"]) == []
    path = tmp_path / change.removeprefix("-")
    if change.startswith("-"):
        path.unlink()
    else:
        path.touch()
    assert mismatches(tmp_path, ["known"]) == [message]
