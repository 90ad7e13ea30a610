"""Suggestions for keys, values and options that the recipe does not have: by meaning first, else by place."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.contract.errors import RecipeError
from paceline.recipe.entries import written
from paceline.recipe.terms import Term, find_term, is_setting, plain, read_sections

MOST: int = 5
"""Keys that a message names; the others are named once these are mended."""


LONGEST = 200
"""Characters of a setting that a fix shows."""


class Suggestion(NamedTuple):
    """A reason and a fix for one key, value or option."""

    why: str
    settings: tuple[str, ...] = ()
    """Settings to set, ``PATH=VALUE`` each."""
    command: str = ""
    """An option, command or call to type in place of settings."""
    note: str = ""
    """A difference in meaning; shown of a key that is alone, since many would make no message that is read."""

    @property
    def fix(self) -> str:
        """The fix as it is typed; empty where there is nothing to do."""
        return self.command or typed(self.settings)

    @property
    def in_full(self) -> str:
        """The reason with the note."""
        return f"{self.why}: {self.note}" if self.note else self.why


def typed(settings: Sequence[str]) -> str:
    """Return settings as a shell takes them; VALUE for a value that cannot be typed."""
    shown = (one if one.isprintable() and len(one) <= LONGEST else f"{one.partition('=')[0]}=VALUE" for one in settings)
    return " ".join(f"--set {shlex.quote(one)}" for one in shown)


def suggest_keys(unknown: Sequence[tuple[str, object]], known: Mapping[str, Collection[str]]) -> RecipeError | None:
    """Return the error for unknown keys; None where nothing is known of the first.

    Args:
        unknown: dotted path and value of each key that the recipe does not have.
        known: the last part of a path -> all dotted paths of the recipe that end so.
    """
    keys = [[(f"{path}{inner}", leaf) for inner, leaf in leaves(value)] for path, value in unknown]
    others = {plain(path.rpartition(".")[2]): value for key in keys for path, value in key}
    of_keys = [[one for leaf in key if (one := _suggest_leaf(*leaf, others, known))] for key in keys]
    if not of_keys[0]:
        return None
    suggestions = [suggestion for of_key in of_keys for suggestion in of_key]
    whys = list(dict.fromkeys(one.why for one in suggestions)) if len(suggestions) > 1 else [suggestions[0].in_full]
    more = f"; and {len(whys) - MOST} more such keys" if len(whys) > MOST else ""
    settings: dict[str, str] = {}  # of two values of a setting the first
    for one in suggestions[:MOST]:
        for setting in one.settings:
            settings.setdefault(setting.partition("=")[0], setting)
    commands = dict.fromkeys(one.command for one in suggestions[:MOST] if one.command)
    fix = " ".join(filter(None, (typed([*settings.values()]), *commands)))
    path, value = unknown[0]
    return RecipeError(f"{path} = {value!r}: unknown key", "; ".join(whys[:MOST]) + more, fix or "leave it out")


def suggest_option(option: str, value: str = "VALUE") -> Suggestion | None:
    """Return what is known of an option such as ``--learning_rate``, without its dashes."""
    term = find_term(option)
    return None if term is None else _suggest_term(option, term, value, {})


def suggest_value(path: str, value: object) -> Suggestion | None:
    """Return what is known of a value that one of our settings has elsewhere, such as ``16-mixed``."""
    for section in read_sections():
        for term in section.terms:
            here = term.values.get(plain(written(value))) if term.here == path else None
            if here:
                reason = find_term(written(value)) or find_term(here.partition("=")[2])
                note = reason.note if reason is not None else ""
                return Suggestion(f"{written(value)} is {here} here", tuple(here.split(" --set ")), note=note)
    named = find_term(written(value))
    if named is None or named.here.partition("=")[0] != path or "=" not in named.here:
        return None
    return _suggest_term(written(value), named, True, {})


def translate_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Translate names of strategies elsewhere in ``--set parallel.strategy=NAME``; return a notice for each too.

    Args:
        settings: ``PATH=VALUE``; what has no one meaning here is left as it is, to be refused.
    """
    translated, notices = [], []
    for setting in settings:
        path, _, value = (part.strip() for part in setting.partition("="))
        suggestion = suggest_value(path, value) if path == "parallel.strategy" else None
        if suggestion is None or suggestion.settings == (f"{path}={value}",) or suggestion.settings[-1].endswith("=N"):
            translated.append(setting)
            continue
        translated += suggestion.settings
        notices.append(f"{path}={value} is {suggestion.fix} here")
    return translated, notices


def leaves(value: object) -> Iterator[tuple[str, object]]:
    """Yield the leaves of a nested value, with a dot in front of each key on their way."""
    if not isinstance(value, Mapping) or not value:
        yield "", value
        return
    for key, inner in value.items():
        yield from ((f".{key}{rest}", leaf) for rest, leaf in leaves(inner))


def _suggest_leaf(
    path: str, value: object, others: Mapping[str, object], known: Mapping[str, Collection[str]]
) -> Suggestion | None:
    """Look for the whole path, then for its ends; then for the same of the groups that it is in."""
    keys = path.split(".")
    ours = sorted((one for one in known.get(keys[-1], ()) if one != path), key=lambda one: one.count("."))
    # where several parts have a field of the name, the outer one is meant, if there is one such
    is_ours = bool(ours) and (len(ours) == 1 or ours[0].count(".") < ours[1].count("."))
    for end in range(len(keys), 0, -1):
        for start in range(end):
            name = ".".join(keys[start:end])
            term = find_term(name)
            # a word such as rank is a setting of ours before it is what PyTorch means by it
            if term is not None and (is_setting(term.here) or not is_ours):
                return _suggest_term(name, term, value, others)
        if end == len(keys) and is_ours:
            return Suggestion(f"{path} is {ours[0]} here", (f"{ours[0]}={written(value)}",))
    return None


def _suggest_term(name: str, term: Term, value: object, others: Mapping[str, object]) -> Suggestion:
    here = term.here_for(value, others)
    if not here and not term.here:
        return Suggestion(f"{name} has no counterpart here", note=term.note)
    if not here:
        return Suggestion(f"{name} = {written(value)} needs no setting here", note=term.note)
    if not is_setting(here):
        return Suggestion(f"{name} is {here} here", command=here, note=term.note)
    # where the value stays as it is, the reason does without it
    shown = term.here if "=" not in term.here and not term.values else here
    return Suggestion(f"{name} is {shown} here", tuple(here.partition(" (")[0].split(" --set ")), note=term.note)
