"""The catalogue's rules at work: what ``auto`` leaves off and why, and what is refused where it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from paceline.contract.errors import RecipeError
from paceline.contract.records import Decision
from paceline.machine.facts import Facts
from paceline.recipe.entries import OwnSetting, Rule, TechniqueEntry, Who, value_of, written
from paceline.recipe.recipe import Recipe
from paceline.recipe.tasks import task_entry
from paceline.recipe.techniques import CATALOGUE, ENTRIES, SHARING, capable, exclusions

UNKNOWN = object()
"""Stands for a setting that nobody has told; no rule is broken by it."""

ValueAt = Callable[[str], object]
"""The value at a dotted path, or ``UNKNOWN``."""


def check_rules(recipe: Recipe, facts: Facts, catalogue: Iterable[TechniqueEntry] = ENTRIES) -> None:
    """Refuse techniques that cannot work together, with the rest of the recipe, or on this machine.

    Raises:
        RecipeError: names the setting, the rule it breaks, and the change that mends it.
    """
    value_at = partial(value_of, recipe)
    for entry in catalogue:
        for own in entry.settings:
            _check_own(own, recipe)
        if not entry.is_on(recipe):
            continue
        what = f"{entry.setting} = {written(value_at(entry.setting))}"
        # where auto is left, a setting of one strategy alone would choose it again
        own_settings = [own for own in entry.settings if value_at(own.setting) != own.default]
        off = [(entry.setting, entry.off), *((own.setting, own.default) for own in own_settings)]
        leave = " ".join(f"--set {path}={written(value)}" for path, value in off)
        for rule, needed in _broken(entry, value_at, "asked"):
            raise RecipeError(what, _refusal(rule, needed, recipe), leave)
        for package in missing_packages(entry, recipe, facts):
            why = f"needs {package}, which is not installed"
            raise RecipeError(what, why, f"{entry.install or f'pip install {package}'}, or {leave}")
        if entry.capability is not None and not _is_capable(entry.capability, facts):
            have = facts.gpus[0].compute_capability if facts.gpus else None
            found = "none is known here" if have is None else f"this one has {have[0]}.{have[1]}"
            raise RecipeError(what, f"needs {capable(entry.capability)}; {found}", leave)


def decision_of(entry: TechniqueEntry, recipe: Recipe, facts: Facts) -> Decision | None:
    """What becomes of a technique that was left open, as far as the machine and the recipe decide it.

    Args:
        entry: one that is on or off.
        recipe: with its device chosen.

    Returns:
        None where it was not left open, or where it depends on the model and the data.
    """
    if value_of(recipe, entry.setting) != "auto" or entry.values:
        return None
    why = why_off(entry, recipe, facts)
    if why is not None:
        return Decision(setting=entry.setting, value="false", reason=why)
    return Decision(setting=entry.setting, value="true", reason=entry.takes) if entry.takes else None


def why_off(entry: TechniqueEntry, recipe: Recipe, facts: Facts) -> str | None:
    """Why ``auto`` leaves a technique off; None where no rule is against it."""
    value_at = partial(value_of, recipe)
    for rule in _of_strategy(entry, value_at, "auto"):
        return rule.why
    for rule, _ in _broken(entry, value_at, "auto"):
        return rule.why
    for package in missing_packages(entry, recipe, facts):
        return f"{package} is not installed"
    if entry.capability is not None and not _is_capable(entry.capability, facts):
        return f"its kernels need {capable(entry.capability)}"
    return None


def check_kind(kind: str, value_at: ValueAt) -> None:
    """Refuse settings that have no meaning for data of this kind, which are known once labels are read.

    Args:
        kind: of the data; name of a task.
        value_at: value of a dotted path; ``UNKNOWN`` for settings that are not to be checked.

    Raises:
        RecipeError: names the setting, the reason, and the value that leaves it off.
    """
    for entry in ENTRIES:
        value = value_at(entry.setting)
        is_on = value == entry.name if entry.choice else value not in (entry.off, "auto")
        for rule in entry.needs if is_on and value is not UNKNOWN else ():
            if rule.path == "task.type" and not rule.holds(kind):
                what = f"{entry.setting} = {written(value)}: the data are for {kind}"
                raise RecipeError(what, rule.why, f"--set {entry.setting}={written(entry.off)}")
    for rule in task_entry(kind).excludes:
        value = value_at(rule.path)
        if value is not UNKNOWN and rule.holds(value):
            raise RecipeError(
                f"{rule.path} = {written(value)}: the data are for {kind}", rule.why, f"leave {rule.path} out"
            )


def is_refused(settings: Mapping[str, Any], setting: str, value: object) -> bool:
    """Whether a rule is against a technique's ``value``, as far as the other settings are known.

    Args:
        settings: dotted recipe paths, and what they have.
    """
    entry = next((one for one in CATALOGUE if one.setting == setting), None)
    if entry is None or value == entry.off:
        return False

    def value_at(path: str) -> object:
        return settings.get(path, UNKNOWN)

    return any(True for _ in _broken(entry, value_at, "asked")) or any(
        True for _ in _of_strategy(entry, value_at, "asked")
    )


def _broken(entry: TechniqueEntry, value_at: ValueAt, who: Who) -> Iterator[tuple[Rule, bool]]:
    """Rules of the entry that do not hold, and whether they are of what it needs; of the device first."""
    needed = [rule for rule in entry.needs if rule.path == "device"]
    others = [rule for rule in entry.needs if rule.path != "device"]
    for rules, is_needed in ((needed, True), (entry.excludes, False), (others, True)):
        for rule in rules:
            value = value_at(rule.path)
            if rule.is_for(who) and value is not UNKNOWN and rule.holds(value) is not is_needed:
                yield rule, is_needed


def _of_strategy(entry: TechniqueEntry, value_at: ValueAt, who: Who) -> Iterator[Rule]:
    """Rules between how the run's processes share it and the technique, in whichever entry they stand."""
    for rule in exclusions(entry):
        value = value_at(rule.path) if rule.path in SHARING and rule.is_for(who) else UNKNOWN
        if value is not UNKNOWN and rule.holds(value):
            yield rule


def missing_packages(entry: TechniqueEntry, recipe: Recipe, facts: Facts) -> list[str]:
    """Packages that a technique or strategy needs where the recipe runs, and that are not there."""
    needed = entry.packages if entry.install or recipe.device != "cpu" else ()
    return [name for name in needed if facts.versions.get(name) is None]


def _is_capable(capability: tuple[int, int], facts: Facts) -> bool:
    have = facts.gpus[0].compute_capability if facts.gpus else None
    return have is not None and have >= capability


def _check_own(own: OwnSetting, recipe: Recipe) -> None:
    broken = own.broken(recipe)
    if broken is not None:
        value = value_of(recipe, own.setting)
        what, leave = f"{own.setting} = {written(value)}", f"--set {own.setting}={written(own.default)}"
        raise RecipeError(what, _refusal(broken, True, recipe), leave)


def _refusal(rule: Rule, needed: bool, recipe: Recipe) -> str:
    """The broken rule for a person, beside what the recipe says."""
    values = f"{'other than' if rule.is_negated else '='} {' or '.join(rule.values)}"
    told = f"{'needs' if needed else 'cannot work with'} {rule.path} {values}"
    if needed or rule.is_negated or len(rule.values) > 1:
        told += f" (now {rule.path} = {written(value_of(recipe, rule.path))})"
    return f"{told}: {rule.why}" if rule.why else told
