"""``paceline techniques``: the catalogue, and what of it this machine can do."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from paceline.contract.errors import RecipeError
from paceline.machine.facts import Facts, this_machine
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.entries import TechniqueEntry, written
from paceline.recipe.parts import ParallelPart, TechniquesPart
from paceline.recipe.techniques import ENTRIES, told


def techniques() -> tuple[TechniqueEntry, ...]:
    """Print every technique with its settings, whether it works here, what it needs, excludes and preserves.

    Returns:
        The catalogue, and the ways of splitting a run.
    """
    facts = this_machine()
    sections = [_machine(facts), *(_shown(entry, facts) for entry in ENTRIES)]
    sys.stdout.write("\n\n".join(sections) + "\n")
    return ENTRIES


def unavailable(entry: TechniqueEntry, value: object, facts: Facts) -> str | None:
    """Why a technique cannot be set to ``value`` on this machine, whatever is trained; None when it can."""
    try:
        _chosen(facts, f"{entry.setting}={written(value)}")
    except RecipeError as error:
        # that a GPU is needed says little where one is there and cannot be used
        needs_gpu = facts.cuda_problem is not None and "device" in error.why
        return f"no GPU can be used: {facts.cuda_problem}" if needs_gpu else error.why
    return None


def _chosen(facts: Facts, *settings: str) -> tuple[Recipe, dict[str, str]]:
    """What would become of a recipe with nothing but these settings, and the reasons by setting."""
    plain = Recipe.parse({"model": {"source": "any"}, "data": {"source": "any.csv"}})
    recipe, decisions = choose(plain.with_settings(settings), facts)
    return recipe, {decision.setting: decision.reason for decision in decisions}


def _machine(facts: Facts) -> str:
    names = [f"{gpu.name} (compute capability {_dotted(gpu.compute_capability)})" for gpu in facts.gpus]
    versions = [f"{name} {facts.versions.get(name) or 'not installed'}" for name in ("torch", "triton")]
    built = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built without CUDA"
    problem = f"; no GPU can be used: {facts.cuda_problem}" if facts.cuda_problem else ""
    return f"this machine: {', '.join([*names, *versions])} ({built}){problem}".replace(") (", ", ")


def _shown(entry: TechniqueEntry, facts: Facts) -> str:
    part, name = (ParallelPart, "strategy") if entry.choice else (TechniquesPart, entry.name)
    field = part.model_fields[name]
    values = " | ".join(map(written, _values(field.annotation)))
    lines = [
        ("setting", f"{entry.setting} = {values}  (default {written(field.default)})"),
        *_here(entry, field, facts),
        # what auto makes of it is told above, as it is on this machine
        *((label, text) for label, text in told(entry) if label != "auto"),
        ("page", entry.page),
    ]
    labels = [label for label, _ in lines]
    shown = ("" if label == before else label for label, before in zip(labels, ["", *labels], strict=False))
    return "\n".join(
        [
            f"{entry.name}: {entry.summary}",
            *(f"  {label:<10} {text}" for label, (_, text) in zip(shown, lines, strict=True)),
        ]
    )


def _here(entry: TechniqueEntry, field: Any, facts: Facts) -> Iterator[tuple[str, str]]:
    """What can be set here, what cannot and why, and what ``auto`` makes of it."""
    if entry.choice:
        reason = unavailable(entry, entry.name, facts)
        yield "here", f"not available: {reason}" if reason else f"available, as {entry.setting}={entry.name}"
        return
    values = [value for value in _values(field.annotation) if value not in ("auto", entry.off)]
    refused = {value: reason for value in values if (reason := unavailable(entry, value, facts))}
    if not refused:
        yield "here", "available"
    elif len(refused) == len(values):
        yield "here", f"not available: {'; '.join(dict.fromkeys(refused.values()))}"
    else:
        yield "here", f"available: {', '.join(written(value) for value in values if value not in refused)}"
        for value, reason in refused.items():
            yield "here", f"not {written(value)}: {reason}"
    if field.default == "auto":
        recipe, reasons = _chosen(facts)
        chosen = written(getattr(recipe.techniques, entry.name))
        known = f"{chosen}: {reasons.get(entry.setting)}"
        yield "auto", known if chosen != "auto" else "decided when model and data are known"


def _values(annotation: Any) -> list[Any]:
    """The values that a field takes."""
    if annotation is bool:
        return [True, False]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return [value for member in get_args(annotation) for value in _values(member)]
    return [None] if annotation is types.NoneType else []


def _dotted(capability: tuple[int, int] | None) -> str:
    return "{}.{}".format(*capability) if capability else "unknown"
