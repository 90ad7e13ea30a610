"""``paceline techniques``: the catalogue, and what of it this machine can do."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from paceline.contract.errors import RecipeError, nearest
from paceline.machine.facts import Facts, this_machine
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.elsewhere import TABLE, TOLD
from paceline.recipe.entries import TechniqueEntry, value_of, written
from paceline.recipe.rules import missing_packages
from paceline.recipe.techniques import ENTRIES, GROUPS, told


def techniques(name: str | None = None) -> tuple[TechniqueEntry, ...]:
    """Print every technique in a line each, or all there is to know about one.

    Args:
        name: of the one; None: all. Or of a library whose ways are others here, such as ``apex``.

    Returns:
        The entries that were printed; none for a library.

    Raises:
        RecipeError: no technique has this name.
    """
    library = next((one for one in TOLD if name and one.lower() == name.lower()), None)
    if library is not None:
        sys.stdout.write("\n".join(_of_library(library)) + "\n")
        return ()
    facts = this_machine()
    entries = ENTRIES if name is None else (_named(name),)
    sections = _listed(facts) if name is None else [_shown(entries[0], facts)]
    sys.stdout.write("\n\n".join([_machine(facts), *sections]) + "\n")
    return entries


def _of_library(library: str) -> Iterator[str]:
    """What another library is here, and its names."""
    yield f"{library}: {' '.join(TOLD[library])}"
    for name in TABLE[library]:
        ways = [f"{there}: {here}" for there, here in name.values.items() if here] or [name.here or "nothing"]
        here = "; ".join(ways).replace("{}", "N")
        yield f"  {', '.join(name.names)}: {here}{f' ({name.note})' if name.note else ''}"
    yield "page: docs/coming-from.md"


def _named(name: str) -> TechniqueEntry:
    found = [entry for entry in ENTRIES if name in (entry.name, entry.setting)]
    if not found:
        raise RecipeError(
            f"techniques {name}",
            f"no technique has this name; {nearest(name, (entry.name for entry in ENTRIES))}",
            "paceline techniques, which lists them",
        )
    return found[0]


def _listed(facts: Facts) -> Iterator[str]:
    """A section for each group, and how to read on."""
    rows = {entry.name: (_default_here(entry, facts), _marked(entry)) for entry in ENTRIES}
    names, states = max(map(len, rows)), max(len(state) for state, _ in rows.values())
    for heading, group in GROUPS.items():
        lines = [f"  {entry.name:<{names}}  {rows[entry.name][0]:<{states}}  {rows[entry.name][1]}" for entry in group]
        yield "\n".join([heading, *lines])
    yield "* changes the result.  paceline techniques NAME tells what one needs, excludes and preserves."


def _marked(entry: TechniqueEntry) -> str:
    return f"{entry.summary}{' *' if entry.preserves == 'changes the result' else ''}"


def _default_here(entry: TechniqueEntry, facts: Facts) -> str:
    """What a run on this machine has that does not name it: on, off, a value, or auto where model and data decide."""
    values = _settable(entry)
    if values and all(unavailable(entry, value, facts) for value in values):
        return "not here"
    if entry.choice:
        return "auto" if entry.auto else "off"
    if entry.default != "auto":
        return "off"
    chosen = value_of(_chosen(facts)[0], entry.setting)
    return {True: "on", False: "off"}.get(chosen, written(chosen))


def unavailable(entry: TechniqueEntry, value: object, facts: Facts) -> str | None:
    """Why a technique cannot be set to ``value`` on this machine, whatever is trained; None when it can.

    Another setting that it needs is set too: whether that is so is up to who writes the recipe.
    """
    beside = [f"{rule.path}={rule.values[0]}" for rule in entry.needs if entry.place and not rule.is_negated]
    try:
        chosen, _ = _chosen(facts, *beside, f"{entry.setting}={written(value)}")
    except RecipeError as error:
        # that a GPU is needed says little where one is there and cannot be used
        needs_gpu = facts.cuda_problem is not None and "device" in error.why
        return f"no GPU can be used: {facts.cuda_problem}" if needs_gpu else error.why
    # one process has no use for a strategy, and so does not ask for its package
    return next((f"needs {name}, which is not installed" for name in missing_packages(entry, chosen, facts)), None)


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
    lines = [
        ("setting", _setting(entry)),
        *_here(entry, facts),
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


def _setting(entry: TechniqueEntry) -> str:
    field = field_at(entry.setting)
    values = _values(field.annotation)
    if entry.choice or entry.example is not True or not values:
        return f"{entry.setting} = {written(_settable(entry)[0])}  (default {written(field.default)})"
    return f"{entry.setting} = {' | '.join(map(written, values))}  (default {written(field.default)})"


def _here(entry: TechniqueEntry, facts: Facts) -> Iterator[tuple[str, str]]:
    """What can be set here, what cannot and why, and what ``auto`` makes of it."""
    values = _settable(entry)
    refused = {value: reason for value in values if (reason := unavailable(entry, value, facts))}
    if not refused:
        yield "here", f"available, as {entry.setting}={entry.name}" if entry.choice else "available"
    elif len(refused) == len(values):
        yield "here", f"not available: {'; '.join(dict.fromkeys(refused.values()))}"
    else:
        yield "here", f"available: {', '.join(written(value) for value in values if value not in refused)}"
        for value, reason in refused.items():
            yield "here", f"not {written(value)}: {reason}"
    if entry.default == "auto" and not entry.choice:
        recipe, reasons = _chosen(facts)
        chosen = written(value_of(recipe, entry.setting))
        known = f"{chosen}: {reasons.get(entry.setting)}"
        yield "auto", known if chosen != "auto" else "decided when model and data are known"


def field_at(path: str) -> Any:
    """The recipe's field at a dotted path."""
    *parts, name = path.split(".")
    owner: type[BaseModel] = Recipe
    for part in parts:
        annotation = owner.model_fields[part].annotation
        # a part may be optional
        owner = next(one for one in (annotation, *get_args(annotation)) if hasattr(one, "model_fields"))
    return owner.model_fields[name]


def _settable(entry: TechniqueEntry) -> list[Any]:
    """Values that switch it on."""
    if entry.choice:
        return [entry.name]
    values = [value for value in _values(field_at(entry.setting).annotation) if value not in ("auto", entry.off)]
    return [entry.example] if entry.example is not True else values


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
