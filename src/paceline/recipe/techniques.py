"""The catalogue: what each technique and each way of splitting a run needs, excludes and preserves.

It is said here alone, without torch. ``recipe.rules`` takes refusals and the choices of ``auto`` from it,
``recipe.parts`` the words and defaults of fields, ``paceline techniques`` its listing, the memory plan the changes that
it suggests, ``evaluate`` and ``predict`` what they leave off, ``scripts/technique_rules.py`` the table on each page.

A technique is one room, one setting of the recipe, one page ``docs/techniques/<name>.md``, one parity test
``tests/parity/test_<name>.py`` and one entry in ``recipe/catalogue/``; the architecture tests hold the five together.
Where nothing else is said, the room is ``techniques/<name>.py`` and the setting a field of ``TechniquesPart``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from paceline.recipe.catalogue.data import DATA
from paceline.recipe.catalogue.evaluation import EVALUATION
from paceline.recipe.catalogue.loss import LOSS
from paceline.recipe.catalogue.model import MODEL
from paceline.recipe.catalogue.optimizer import OPTIMIZER
from paceline.recipe.catalogue.rates import RATES, ROUNDING
from paceline.recipe.catalogue.speed import SPEED
from paceline.recipe.catalogue.strategies import AXES, STRATEGIES, STRATEGY
from paceline.recipe.entries import OwnSetting, Rule, TechniqueEntry, value_of, written

GROUPS: dict[str, tuple[TechniqueEntry, ...]] = {
    "speed and memory": SPEED,
    "several GPUs": (*STRATEGIES, *AXES),
    "data": DATA,
    "model": MODEL,
    "loss and imbalance": LOSS,
    "optimizer": (*OPTIMIZER, *ROUNDING),
    "learning rates": RATES,
    "evaluation": EVALUATION,
}
"""All entries, under the headings of ``paceline techniques``."""

ENTRIES = tuple(entry for group in GROUPS.values() for entry in group)

CATALOGUE = tuple(entry for entry in ENTRIES if entry.choice != STRATEGY)
"""The techniques, of which a run may have several. Within a group they stand in the order of application."""


def entry_of(name: str) -> TechniqueEntry:
    """The technique or strategy of this name."""
    return next(entry for entry in ENTRIES if entry.name == name)


def one_process(strategy: str) -> bool:
    """Whether one process has all GPUs of a run with this ``parallel.strategy``."""
    return any(entry.one_process for entry in STRATEGIES if entry.name == strategy)


def shards(strategy: str) -> bool:
    """Whether each process of a run with this ``parallel.strategy`` keeps a shard of the weights."""
    return any(entry.shards for entry in STRATEGIES if entry.name == strategy)


def told_strategies() -> str:
    """The description of ``parallel.strategy``."""
    each = [f"{one.name}: {one.summary[0].lower()}{one.summary[1:]}" for one in STRATEGIES]
    auto = "; ".join(f"{one.name} {one.auto}" for one in STRATEGIES if one.auto)
    return f"{' '.join(each)} auto: {auto}."


OWN_SETTINGS = {own.name: own for entry in STRATEGIES for own in entry.settings}
"""By name, the fields of ``parallel`` that have an effect with some strategies only."""


AXIS_SETTINGS = {own.name: own for entry in AXES for own in entry.settings}
"""By name, the fields of ``parallel`` that have an effect only where a further axis is used."""


def axis_of(own: OwnSetting) -> TechniqueEntry:
    """The axis with which a setting has an effect."""
    return next(entry for entry in AXES if own in entry.settings)


def users_of(own: OwnSetting) -> tuple[str, ...]:
    """The strategies with which a setting has an effect."""
    return tuple(entry.name for entry in STRATEGIES if own in entry.settings)


SHARING = (STRATEGY, *(entry.setting for entry in AXES))
"""The settings that say how processes share the work."""


@cache
def exclusions(entry: TechniqueEntry) -> tuple[Rule, ...]:
    """What cannot be beside a technique: by the rules of its own entry, then by those of others about it.

    What an entry has for ``auto`` alone is about a technique that is left open, which a strategy in use is not.
    """
    theirs = (
        replace(rule, condition=other.use)
        for other in ENTRIES
        for rule in other.excludes
        if rule.is_about(entry) and (rule.is_for("asked") or other.choice == STRATEGY)
    )
    return (*entry.excludes, *theirs)


_INFERENCE = {
    "off": "off",
    "auto": "decided anew",
    "kept": "as in training",
    "open": "as in training; may be set",
}


def told(entry: TechniqueEntry) -> Iterator[tuple[str, str]]:
    """An entry for people, line by line: what the line is of, and its text."""
    yield "preserves", "; ".join([entry.preserves, *(f"{value} changes the result" for value in entry.changing)])
    if entry.auto:
        yield "auto", entry.auto
    for words, rules in (("without", entry.needs), ("with", exclusions(entry))):
        yield from (
            ("auto", f"off {words} {line}") for line in _by_reason(rule for rule in rules if rule.only == "auto")
        )
    yield from (("needs", line) for line in _by_reason(rule for rule in entry.needs if rule.is_for("asked")))
    installed = f": {entry.install}" if entry.install else ", on a GPU"
    yield from (("needs", f"{package}{installed}") for package in entry.packages)
    if entry.capability is not None:
        yield "needs", capable(entry.capability)
    for value in entry.values:
        yield "needs", f"{value.name}: {capable(value.capability)}{'' if value.gpus_only else ', or a CPU'}"
    yield from (("excludes", line) for line in _by_reason(rule for rule in exclusions(entry) if rule.is_for("asked")))
    for own in entry.settings:
        yield "settings", "; needs ".join([own.setting, *_by_reason(own.needs)])
    yield "inference", _INFERENCE[entry.inference]
    if entry.memory:
        yield "memory", entry.memory


def _by_reason(rules: Iterable[Rule]) -> list[str]:
    """The conditions of each reason, and the reason."""
    conditions: dict[str, list[str]] = {}
    for rule in rules:
        conditions.setdefault(rule.why, []).append(rule.condition)
    return [f"{', '.join(found)}: {why}" for why, found in conditions.items()]


def capable(capability: tuple[int, int]) -> str:
    """A compute capability for people."""
    return "a GPU of compute capability {}.{} or above".format(*capability)


def opened(recipe: object) -> tuple[str, ...]:
    """Settings that leave open again what is on and may have been switched on by ``auto``."""
    entries = [entry for entry in CATALOGUE if entry.auto and value_of(recipe, entry.setting) is True]
    # shards may have been the only way that the model fits
    entries += [entry for entry in STRATEGIES if entry.auto and not entry.shards and entry.is_on(recipe)]
    return tuple(f"{entry.setting}=auto" for entry in entries)


def settings_for_inference() -> tuple[str, ...]:
    """What ``evaluate`` and ``predict`` set, whatever a model was trained with."""
    off = [f"{entry.setting}={written(entry.off)}" for entry in ENTRIES if entry.inference == "off"]
    off += [f"{own.setting}={written(own.default)}" for own in AXIS_SETTINGS.values()]
    anew = [f"{entry.setting}=auto" for entry in CATALOGUE if entry.inference == "auto"]
    return tuple(dict.fromkeys([*off, *anew]))  # strategies share one setting
