"""The catalogue of techniques: what each needs, excludes and preserves, without loading torch.

A technique is one file ``techniques/<name>.py``, one field of ``TechniquesPart``, one card
``docs/techniques/<name>.md``, one parity test ``tests/parity/test_<name>.py`` and one entry here; the architecture
tests hold the five together. The ways of splitting a run over ranks or cards are techniques too, of which a run has one
at most: the values of ``parallel.strategy``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paceline.errors import RecipeError
from paceline.facts import Facts
from paceline.recipe.recipe import Recipe

Stage = Literal["layout", "numerics", "memory", "compile", "shard", "capture"]
"""When a technique is applied, first to last: it may change what the stages before it built."""

Preserves = Literal["bit-exact", "up to rounding", "changes the result"]
"""How the trained weights compare with a plain loop's; set by the technique's parity test."""


@dataclass(frozen=True)
class TechniqueEntry:
    """One line of the catalogue.

    Args:
        name: the field of ``TechniquesPart``, the module, the card and the parity test.
        summary: one sentence for ``paceline techniques``.
        stage: when it is applied.
        preserves: what it does to the result.
        changing: settings of it that change the result nevertheless.
        off: the setting with which it does nothing.
        needs: conditions of which each must hold while it is on.
        excludes: conditions of which none may hold while it is on.
        capability: smallest compute capability of the card that it runs on.
        packages: distributions of which each must be installed.
        choice: the dotted recipe path of which ``name`` is one value; none: it has a field of ``TechniquesPart``.
        room: the module it is in; none: ``techniques/<name>.py``.

    A condition is ``PATH=VALUE|VALUE``, a dotted recipe path and the values that fulfil it, or the bare name of
    another technique, which holds when that technique is on.
    """

    name: str
    summary: str
    stage: Stage
    preserves: Preserves
    changing: tuple[str, ...] = ()
    off: object = False
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    packages: tuple[str, ...] = ()
    choice: str = ""
    room: str = ""

    @property
    def module(self) -> str:
        """The module with its one public entry point."""
        return self.room or f"paceline.techniques.{self.name}"

    @property
    def card(self) -> str:
        """The page that explains it, from the repository's root."""
        return f"docs/techniques/{self.name}.md"

    @property
    def setting(self) -> str:
        """Its dotted recipe path."""
        return self.choice or f"techniques.{self.name}"

    def is_on(self, recipe: Recipe) -> bool:
        """Whether ``recipe`` uses it."""
        value = _value(recipe, self.setting)
        return value == self.name if self.choice else value not in (self.off, "auto")


CATALOGUE: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "packing",
        "Put the texts of a micro-batch one after the other in one row: no padding, no mask.",
        "layout",
        "up to rounding",
    ),
    TechniqueEntry(
        "early_pooling",
        "In the last block compute only the position of each text that the head reads.",
        "layout",
        "up to rounding",
        needs=("techniques.packing=auto|true",),
    ),
    TechniqueEntry("channels_last", "Keep images with the channels last in memory.", "layout", "up to rounding"),
    TechniqueEntry(
        "fully_connected",
        "Compute convolutions that put out one pixel as matrix products over the pixels they see.",
        "layout",
        "up to rounding",
    ),
    TechniqueEntry(
        "cudnn_benchmark",
        "Try all of cuDNN's kernels for each convolution of a step, and keep the quickest.",
        "numerics",
        "up to rounding",
        needs=("device=cuda", "deterministic=false"),
    ),
    TechniqueEntry(
        "precision",
        "Compute in tf32, bf16, fp16, or only bf16.",
        "numerics",
        "up to rounding",
        changing=("pure_bf16",),
        off="fp32",
    ),
    TechniqueEntry(
        "fused_qkv",
        "Compute query, key and value of an attention layer in one matrix product.",
        "numerics",
        "up to rounding",
    ),
    TechniqueEntry(
        "fusion",
        "Compute bias and GELU, and dropout, residual and LayerNorm, by one kernel each.",
        "numerics",
        "up to rounding",
        needs=("device=cuda", "techniques.precision=bf16|fp16"),
        excludes=("model.train=features",),
        capability=(8, 0),
        packages=("triton",),
    ),
    TechniqueEntry(
        "embedding_gradient",
        "Add up the gradients of embeddings by kernels of our own.",
        "numerics",
        "up to rounding",
        needs=("device=cuda",),
        excludes=("model.train=head|features",),
        packages=("triton",),
    ),
    TechniqueEntry(
        "recompute",
        "Recompute each block's activations in the backward pass instead of keeping them.",
        "memory",
        "bit-exact",
        excludes=("model.train=head|features",),
    ),
    TechniqueEntry(
        "compile",
        "Compile each block of the model for training.",
        "compile",
        "up to rounding",
        excludes=("model.train=features",),
    ),
    TechniqueEntry(
        "capture",
        "Record the kernels of a step as CUDA graphs and replay them.",
        "capture",
        "bit-exact",
        needs=("device=cuda",),
        excludes=("model.train=features", "recompute", "parallel.offload=true"),
    ),
)
"""Every technique with a field of its own, in the order of application."""

STRATEGIES: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "ddp",
        "Every process keeps the model; gradients are summed in one flat buffer, beside the backward pass.",
        "shard",
        "up to rounding",
        off="auto",
        excludes=("model.train=features",),
        choice="parallel.strategy",
        room="paceline.engine.buckets",
    ),
    TechniqueEntry(
        "fsdp",
        "Every process keeps a shard of each weight, gradient and state; weights are whole while they are used.",
        "shard",
        "up to rounding",
        off="auto",
        excludes=("model.train=features", "optimizer.type=adamw8bit", "channels_last"),
        choice="parallel.strategy",
    ),
    TechniqueEntry(
        "dp",
        "One process deals each batch to all its cards by torch's DataParallel: slow, for completeness.",
        "shard",
        "up to rounding",
        off="auto",
        needs=("device=cuda",),
        excludes=(
            "model.train=features",
            *("packing", "early_pooling", "fully_connected", "cudnn_benchmark", "fused_qkv", "fusion"),
            *("embedding_gradient", "recompute", "compile", "capture"),
        ),
        choice="parallel.strategy",
    ),
)
"""The ways of splitting a run, of which it has one at most."""

STAGES: tuple[str, ...] = get_args(Stage)


_ALL = (*CATALOGUE, *STRATEGIES)


def check_rules(recipe: Recipe, facts: Facts, catalogue: Iterable[TechniqueEntry] = _ALL) -> None:
    """Refuse techniques that cannot work together, with the rest of the recipe, or on this machine.

    Raises:
        RecipeError: names the setting, the rule it breaks, and the change that mends it.
    """
    entries = {entry.name: entry for entry in catalogue}
    for entry in entries.values():
        if not entry.is_on(recipe):
            continue
        what = f"{entry.setting} = {_written(_value(recipe, entry.setting))}"
        leave = f"--set {entry.setting}={_written(entry.off)}"
        for condition in entry.needs:
            if not _holds(condition, recipe, entries):
                raise RecipeError(what, f"needs {_told(condition, recipe, entries)}", leave)
        for condition in entry.excludes:
            if _holds(condition, recipe, entries):
                raise RecipeError(what, f"cannot work with {_told(condition, recipe, entries)}", leave)
        _check_machine(entry, what, leave, facts)


def _check_machine(entry: TechniqueEntry, what: str, leave: str, facts: Facts) -> None:
    missing = [name for name in entry.packages if facts.versions.get(name) is None]
    if missing:
        raise RecipeError(what, f"needs {', '.join(missing)}, not installed", f"pip install {' '.join(missing)}")
    if entry.capability is not None:
        have = facts.cards[0].compute_capability if facts.cards else None
        if have is None or have < entry.capability:
            major, minor = entry.capability
            found = "none is known here" if have is None else f"this one has {have[0]}.{have[1]}"
            raise RecipeError(what, f"needs a card of compute capability {major}.{minor} or above; {found}", leave)


def _holds(condition: str, recipe: Recipe, entries: dict[str, TechniqueEntry]) -> bool:
    path, equals, values = condition.partition("=")
    if not equals:
        return entries[path].is_on(recipe)
    return _written(_value(recipe, path)) in values.split("|")


def _told(condition: str, recipe: Recipe, entries: dict[str, TechniqueEntry]) -> str:
    """The condition for a person, beside what the recipe says."""
    path, equals, values = condition.partition("=")
    path = path if equals else entries[path].setting
    now = f"now {path} = {_written(_value(recipe, path))}"
    return f"{path} = {' or '.join(values.split('|'))} ({now})" if equals else f"{path} ({now})"


def _value(recipe: Recipe, path: str) -> Any:
    value: Any = recipe
    for key in path.split("."):
        value = getattr(value, key)
    return value


def _written(value: object) -> str:
    """A value as YAML and ``--set`` write it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
