"""``paceline techniques``: the catalogue, and what of it this machine can do."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from paceline.contract.errors import RecipeError, close_words, nearest
from paceline.machine.facts import Facts, this_machine
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.entries import TechniqueEntry, value_of, written
from paceline.recipe.explain import setting_paths
from paceline.recipe.rules import missing_packages
from paceline.recipe.techniques import ENTRIES, GROUPS, told
from paceline.recipe.terms import Section, Term, find_word, plain, read_sections


def techniques(name: str | None = None) -> tuple[TechniqueEntry, ...]:
    """Print every technique in a line each, or all there is to know about one.

    Args:
        name: of a technique, or of its setting; None: all. Or a word that is another one here, such as ``GradScaler``;
            a library whose names are known, such as ``apex``; a setting of the recipe.

    Returns:
        The entries that were printed; none for a word without a technique.

    Raises:
        RecipeError: no technique and no word has this name.
    """
    facts = this_machine()
    if name is None:
        sys.stdout.write("\n\n".join([_machine(facts), *_listed(facts)]) + "\n")
        return ENTRIES
    entry = next((entry for entry in ENTRIES if plain(name) in (plain(entry.name), plain(entry.setting))), None)
    described, entry = ([], entry) if entry else _describe_word(name)
    sections = [_machine(facts), _shown(entry, facts)] if entry else []
    sys.stdout.write("\n\n".join(["\n".join(described)] * bool(described) + sections) + "\n")
    return (entry,) if entry else ()


def _describe_word(word: str) -> tuple[list[str], TechniqueEntry | None]:
    """Return the lines about a library, a word of the table of terms, or a setting; with the technique of a word.

    Raises:
        RecipeError: it is none of them.
    """
    library = next((one for one in read_sections() if one.about and plain(one.title) == plain(word)), None)
    if library is not None:
        return [*_library_lines(library)], None
    if (term := find_word(word)) is not None:
        is_chinese = re.search("[\u4e00-\u9fff]", word) is not None
        note = term.zh if is_chinese else term.note
        page = f"page: docs/{term.page or 'coming-from.md'}"
        return [f"{word}: {term.shown}", *(f"  {line}" for line in (note, page) if line)], _entry_of(term)
    for path in setting_paths(Recipe):
        if word in (path, path.rpartition(".")[2]):
            return [f"{path}: {field_at(path).description}", "  page: docs/recipes.md"], None
    techniques = [entry.name for entry in ENTRIES]
    words = (name for section in read_sections() for term in section.terms for name in term.names)
    near = nearest(word, close_words(word, [*techniques, *words]) or techniques)
    why = f"no technique, and no word that is known, has this name; {near}"
    raise RecipeError(f"techniques {word}", why, "paceline techniques, which lists them")


def _library_lines(library: Section) -> Iterator[str]:
    yield f"{library.title}: {library.about}"
    for term in library.terms:
        yield f"  {', '.join(term.names)}: {term.shown}{f' ({term.note})' if term.note else ''}"
    yield "page: docs/coming-from.md"


def _entry_of(term: Term) -> TechniqueEntry | None:
    """Return the technique whose setting takes the place of a term; None where there is none."""
    path, _, value = term.here.partition(" ")[0].partition("=")
    return next((one for one in ENTRIES if one.setting == path and (not one.choice or one.name == value)), None)


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
