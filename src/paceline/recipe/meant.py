"""What an unknown key was meant to be: by its meaning where another library has it, by its place where we have it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.contract.errors import RecipeError
from paceline.recipe.elsewhere import TABLE, VALUES, Name
from paceline.recipe.entries import written

MOST: int = 5
"""Keys that a message goes into; the rest is told once these are mended."""

ALIKE = 0.8
"""How near the letters of a key are to those of a known one when that is what was meant, whatever its meaning."""

_NAMES: Mapping[str, Name] = {name: entry for part in TABLE.values() for entry in part for name in entry.names}

_SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*(=.*)?")
"""How a setting is written in the table, as opposed to an option or a command."""


class Meant(NamedTuple):
    """What is said of one key."""

    why: str
    fix: str
    """Empty where there is nothing to do, or nothing that can be done."""
    note: str = ""
    """What is different; told of a key that is alone, since many would make no message that is read."""

    @property
    def in_full(self) -> str:
        """With the note."""
        return f"{self.why}: {self.note}" if self.note else self.why


def taught(unknown: Sequence[tuple[str, object]], known: Mapping[str, Collection[str]]) -> RecipeError | None:
    """The error for keys whose meaning is known; None where the first is none of them.

    Args:
        unknown: dotted path and value of each key that the recipe does not have.
        known: the last part of a path -> all dotted paths of the recipe that end so.
    """
    first = _of_key(*unknown[0], known)
    if not first:
        return None
    found = [*first, *(meant for key in unknown[1:] for meant in _of_key(*key, known))]
    whys = list(dict.fromkeys(meant.why for meant in found)) if len(found) > 1 else [first[0].in_full]
    fixes: dict[str, str] = {}
    for meant in found[:MOST]:
        fixes.setdefault(meant.fix.partition("=")[0], meant.fix)  # of two values of a setting the first
    more = f"; and {len(whys) - MOST} more such keys" if len(whys) > MOST else ""
    path, value = unknown[0]
    what = f"{path} = {value!r}: unknown key"
    return RecipeError(what, "; ".join(whys[:MOST]) + more, " ".join(filter(None, fixes.values())) or "leave it out")


def is_misspelt(key: str, siblings: Collection[str]) -> bool:
    """Whether a key that means nothing elsewhere is only a letter away from one beside it."""
    return _plain(key) not in _NAMES and bool(difflib.get_close_matches(key, list(siblings), n=1, cutoff=ALIKE))


def of_option(name: str) -> Meant | None:
    """What is said of an option such as ``learning_rate`` that another program's command line has."""
    entry = _NAMES.get(_plain(name))
    return None if entry is None else _elsewhere(name, entry, "VALUE")


def of_value(path: str, value: object) -> Meant | None:
    """What is said of a value that a setting of ours has elsewhere alone, such as ``zero_2`` for ``zero2``."""
    here = _here_of(path, written(value))
    return None if here is None else Meant(f"{written(value)} is {here} here", f"--set {here}")


def understood(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of ``--set`` in which values of elsewhere are those here, and a notice for each that was.

    Args:
        settings: ``PATH=VALUE``; what has no one meaning here is left as it is, to be refused.
    """
    kept, told = [], []
    for setting in settings:
        path, _, value = (part.strip() for part in setting.partition("="))
        here = _here_of(path, value)
        if here is None or here.endswith("=N"):
            kept.append(setting)
            continue
        kept += here.split(" --set ")
        told.append(f"{path}={value} is --set {here} here")
    return kept, told


def _here_of(path: str, value: str) -> str | None:
    plain = re.sub(r"zero_?(stage)?_?(?=[123])", "zero", _plain(value))
    return VALUES.get(path, {}).get(plain)


def _of_key(path: str, value: object, known: Mapping[str, Collection[str]]) -> list[Meant]:
    leaves = [(f"{path}{inner}", leaf) for inner, leaf in _leaves(value)]
    return [meant for leaf, found in leaves if (meant := _of_leaf(leaf, found, known)) is not None]


def _leaves(value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping) or not value:
        yield "", value
        return
    for key, inner in value.items():
        yield from ((f".{key}{rest}", leaf) for rest, leaf in _leaves(inner))


def _of_leaf(path: str, value: object, known: Mapping[str, Collection[str]]) -> Meant | None:
    """Looked for is the whole path, then what it ends with; then the same of the groups that it is in."""
    keys = path.split(".")
    for end in range(len(keys), 0, -1):
        for start in range(end):
            name = ".".join(keys[start:end])
            if (entry := _NAMES.get(_plain(name))) is not None:
                return _elsewhere(name, entry, value)
        ours = sorted((one for one in known.get(keys[end - 1], ()) if one != path), key=lambda one: one.count("."))
        # where several parts have a field of the name, the outer one is meant, if there is one such
        if end == len(keys) and ours and (len(ours) == 1 or ours[0].count(".") < ours[1].count(".")):
            return Meant(f"{path} is {ours[0]} here", f"--set {ours[0]}={written(value)}")
    return None


def _elsewhere(name: str, entry: Name, value: object) -> Meant:
    there = entry.values.get(written(value).lower())
    here = entry.here if there is None else there
    if there is None and not here:
        return Meant(f"{name} has no counterpart here", "", entry.note)
    if not here:
        return Meant(f"{name} = {written(value)} is how it is here by itself", "", entry.note)
    typed = here.replace("{}", written(value))
    told = f"{name} is {typed} here"
    if not is_setting(here):
        return Meant(told, typed, entry.note)
    if "=" not in here:
        typed = f"{here}={'VALUE' if entry.only and there is None else written(value)}"
    return Meant(told, f"--set {typed}", entry.note)


def is_setting(here: str) -> bool:
    """Whether what stands in the table is set in a recipe, and not typed as an option or a command."""
    return _SETTING.fullmatch(here) is not None


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
