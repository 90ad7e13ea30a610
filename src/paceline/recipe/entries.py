"""What the catalogue of techniques is written in: an entry, its rules, and how a recipe is asked about them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Preserves = Literal["bit-exact", "up to rounding", "changes the result"]
"""How the trained weights compare with a plain loop's; set by the technique's parity test."""

Inference = Literal["off", "auto", "kept", "open"]
"""What ``evaluate`` and ``predict`` make of a technique that a model was trained with. off: it is of steps alone; auto:
decided anew; kept: as in training; open: as in training, and ``--set`` may say otherwise."""

Who = Literal["auto", "asked"]
"""Whom a rule is for: ``auto``, which then leaves the technique off, or a person, who asked for it and is refused."""


@dataclass(frozen=True)
class Rule:
    """A condition that a technique needs, or excludes.

    Args:
        condition: ``PATH=VALUE|VALUE``, a dotted recipe path and the values that fulfil it; or ``PATH!=VALUE|VALUE``,
            the values that do not.
        why: the reason, as it stands behind a decision and behind "cannot work with PATH = VALUE: ".
        only: for whom alone it is; None: for both.
    """

    condition: str
    why: str = ""
    only: Who | None = None

    @property
    def path(self) -> str:
        """The dotted recipe path."""
        return self.condition.partition("=")[0].removesuffix("!")

    @property
    def values(self) -> tuple[str, ...]:
        """The values named in it, as YAML writes them."""
        return tuple(self.condition.partition("=")[2].split("|"))

    @property
    def is_negated(self) -> bool:
        """Whether the values named are those that do not fulfil it."""
        return self.condition.partition("=")[0].endswith("!")

    def is_for(self, who: Who) -> bool:
        """Whether it counts for ``auto``, or for what was asked for."""
        return self.only in (None, who)

    def holds(self, value: object) -> bool:
        """Whether a recipe with this value at ``path`` fulfils it."""
        return (written(value) in self.values) is not self.is_negated

    def is_about(self, entry: TechniqueEntry) -> bool:
        """Whether it holds as soon as the entry's technique is on."""
        return self.path == entry.setting and (
            written(entry.off) in self.values if self.is_negated else entry.on in self.values
        )


@dataclass(frozen=True)
class Value:
    """What holds of one value of a technique that has several.

    Args:
        capability: smallest compute capability of a GPU that it runs on.
        gpus_only: why it cannot be had on a CPU; empty: it can.
        words: what else is to be said of it.
        preserves: what it does to the result, where that is not what the technique does.
    """

    name: str
    capability: tuple[int, int]
    gpus_only: str = ""
    words: str = ""
    preserves: Preserves | None = None


@dataclass(frozen=True)
class Saving:
    """A value that saves memory, as the memory plan suggests it.

    Args:
        slowdown: by what share a step takes longer, at most about; 0: no longer.
        speed: the same for people; ``{slowdown}`` and ``{gpus}`` may stand in it.
        beside: settings that belong to it. A strategy that has some saves memory on as many GPUs as there are; others
            do on more.
    """

    value: str
    slowdown: float
    speed: str
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class OwnSetting:
    """A field of ``parallel`` that has no effect with other strategies, where it is refused.

    Args:
        words: what it is, for its description.
        default: with which it is not set.
        least: the smallest number it may be.
        most: the largest.
        chooses: whether setting it is wish enough: ``auto`` then takes the strategy.
        stays: whether one process, which shares nothing, leaves it as it is: it only sets how fast the all-reduce is.
        needs: conditions of which each must hold while it is set.
        values: those that it may have, where they are words; the first is its default.
        of_values: a value, and a condition that must hold while it has that.
    """

    name: str
    words: str
    default: object = None
    least: int | None = None
    most: int | None = None
    chooses: bool = False
    stays: bool = False
    needs: tuple[Rule, ...] = ()
    values: tuple[str, ...] = ()
    of_values: tuple[tuple[str, Rule], ...] = ()

    @property
    def setting(self) -> str:
        """Its dotted recipe path."""
        return f"parallel.{self.name}"

    def refuses(self, strategy: str, recipe: object) -> bool:
        """Whether the value that a recipe has is none of this strategy's."""
        value = value_of(recipe, self.setting)
        rules = (rule for of, rule in self.of_values if of == value)
        return any(rule.path == "parallel.strategy" and not rule.holds(strategy) for rule in rules)

    def broken(self, recipe: object) -> Rule | None:
        """The first condition that a recipe in which it is set does not fulfil."""
        value = value_of(recipe, self.setting)
        if value == self.default:
            return None
        rules = (*self.needs, *(rule for of, rule in self.of_values if of == value))
        return next((rule for rule in rules if not rule.holds(value_of(recipe, rule.path))), None)


@dataclass(frozen=True)
class TechniqueEntry:
    """One line of the catalogue.

    Args:
        name: the field of ``TechniquesPart``, the module, the page and the parity test.
        summary: one sentence on what it does.
        preserves: what it does to the result.
        auto: when ``auto`` takes it, for people; empty: a person has to ask for it.
        takes: why ``auto`` takes it on a GPU as soon as no rule is against it; empty: model and data decide later.
        off: the setting with which it does nothing.
        values: of those that switch it on, where there are several.
        execution: whether a resumed run may have another value.
        needs: conditions of which each must hold while it is on.
        excludes: conditions of which none may hold while it is on. What forbids a technique with a strategy stands
            in the entry of either.
        packages: distributions of which each must be installed where it runs on a GPU.
        install: what installs the packages, where that is not plain pip; they are then needed on a CPU too.
        capability: smallest compute capability of the GPU that it runs on.
        inference: what ``evaluate`` and ``predict`` make of it.
        memory: what it changes in memory; empty: nothing to speak of.
        saving: how it makes a run fit, where it does.
        place: the dotted recipe path of its field; none: a field of ``TechniquesPart``, of its name.
        choice: the dotted recipe path of which ``name`` is one value; none: it has a field of its own.
        example: a value to show it with, where the field takes numbers or names.
        room: the module it is in; none: ``techniques/<name>.py``.
        settings: fields of ``parallel`` that have an effect with it; of a strategy.
        one_process: whether one process has all GPUs of the run; of a strategy.
        alone: whether it has a use in one process too; of a strategy.
        shards: whether each process keeps a shard of the weights; of a strategy.
        assumed: what a plan takes for granted of it, said with the plan.
    """

    name: str
    summary: str
    preserves: Preserves
    auto: str = ""
    takes: str = ""
    off: object = False
    values: tuple[Value, ...] = ()
    execution: bool = True
    needs: tuple[Rule, ...] = ()
    excludes: tuple[Rule, ...] = ()
    packages: tuple[str, ...] = ()
    install: str = ""
    capability: tuple[int, int] | None = None
    inference: Inference = "off"
    memory: str = ""
    saving: Saving | None = None
    place: str = ""
    choice: str = ""
    example: object = True
    room: str = ""
    settings: tuple[OwnSetting, ...] = ()
    one_process: bool = False
    alone: bool = False
    shards: bool = False
    assumed: str = ""

    @property
    def module(self) -> str:
        """The module with its one public entry point."""
        return self.room or f"paceline.techniques.{self.name}"

    @property
    def page(self) -> str:
        """The page that explains it, from the repository's root."""
        return f"docs/techniques/{self.name}.md"

    @property
    def setting(self) -> str:
        """Its dotted recipe path."""
        return self.choice or self.place or f"techniques.{self.name}"

    @property
    def on(self) -> str:
        """The value that switches it on, where there is one."""
        return self.name if self.choice else "true"

    @property
    def use(self) -> str:
        """The condition that it is on."""
        return f"{self.setting}!={written(self.off)}" if self.place else f"{self.setting}={self.on}"

    @property
    def default(self) -> object:
        """What a recipe has that does not name it."""
        return "auto" if self.auto else self.off

    @property
    def description(self) -> str:
        """What its field of the recipe is told with."""
        told = [f"{value.name}: {value.words}." for value in self.values if value.words]
        return " ".join([self.summary, *told, *([f"auto: {self.auto}."] if self.auto else [])])

    @property
    def changing(self) -> tuple[str, ...]:
        """Values of it that change the result where the others do not."""
        return tuple(value.name for value in self.values if value.preserves == "changes the result")

    def is_on(self, recipe: object) -> bool:
        """Whether ``recipe`` uses it."""
        value = value_of(recipe, self.setting)
        return bool(value == self.name) if self.choice else value not in (self.off, "auto")

    def value(self, name: object) -> Value | None:
        """What holds of one of its values; None where nothing does, as of ``off``."""
        return next((value for value in self.values if value.name == name), None)


@dataclass(frozen=True)
class TaskEntry:
    """One kind of task: what a sample's label is, and which room learns it.

    Args:
        name: the value of ``task.type``, and of ``kind`` in a data set and in a saved model.
        summary: one sentence on the labels.
        room: the package with the parts of the task: rows, head, objective, meter, predictions, plain.
        excludes: conditions of which none may hold for data of this kind.
        benched: whether the contenders of ``paceline bench`` do the same work.
    """

    name: str
    summary: str
    room: str
    excludes: tuple[Rule, ...] = ()
    benched: bool = False

    @property
    def page(self) -> str:
        """The page that explains it, from the repository's root."""
        return f"docs/tasks/{self.name}.md"


def value_of(recipe: object, path: str) -> Any:
    """What a recipe has at a dotted path."""
    value: Any = recipe
    for key in path.split("."):
        value = getattr(value, key)
    return value


def written(value: object) -> str:
    """A value as YAML and ``--set`` write it."""
    if isinstance(value, tuple):
        return f"[{','.join(map(written, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
