"""The table of terms: what words and settings are called elsewhere, and what they are called here.

The table is ``terms.yaml``. Errors, ``paceline techniques WORD`` and the pages of terms are made from it. The names are
those of PyTorch and its tutorials, transformers' TrainingArguments and example scripts, Lightning's Trainer and
callbacks, Accelerate's Accelerator and configuration, DeepSpeed's JSON, peft's LoraConfig, the training scripts of timm
and torchvision, and what scikit-learn, PyTorch, XGBoost and LightGBM have for rare labels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from paceline.recipe.entries import written

_TABLE = Path(__file__).with_name("terms.yaml")

_SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*(=.*)?")
"""A setting in the table, in contrast to an option, a command or a call."""

_HOLE = re.compile(r"\{(\w*)(?::([^ }][^}]*))?\}")
"""``{}``, the value; ``{other:7}``, the value of another key or 7."""


@dataclass(frozen=True)
class Term:
    """A word or setting elsewhere; the head of ``terms.yaml`` describes the fields."""

    names: tuple[str, ...]
    here: str
    values: Mapping[str, str]
    only: bool
    note: str
    zh: str
    page: str

    @property
    def shown_here(self) -> str:
        """Return what takes its place, with N for a value."""
        return _HOLE.sub(lambda hole: hole[2] or "N", self.here)

    @property
    def shown(self) -> str:
        """Return what takes its place, and what takes the place of single values."""
        own = [f"{there}: {value or 'leave it out'}" for there, value in self.values.items()]
        return "; ".join([self.shown_here or "nothing", *own])

    def here_for(self, value: object, others: Mapping[str, object] | None = None) -> str:
        """Return what takes the place of this term with a value; empty where nothing has to be set.

        Args:
            value: the value there, plain data.
            others: further unknown keys by their plain names, and their values.
        """
        text = ",".join(map(written, value)) if isinstance(value, (list, tuple)) else written(value)
        here = self.values.get("[]" if isinstance(value, (list, tuple)) else plain(text))
        if here is None:
            here = self.here
            if is_setting(here) and "=" not in here:
                here += "=VALUE" if self.only else f"={written(value)}"
        values = {"": text, **{name: written(other) for name, other in (others or {}).items()}}
        return _HOLE.sub(lambda hole: values.get(plain(hole[1]), hole[2] or "N"), here)


@dataclass(frozen=True)
class Section:
    """Terms of one field, or of one library."""

    title: str
    zh: str
    """The title in Chinese; empty for a library."""
    about: str
    terms: tuple[Term, ...]


@cache
def read_sections() -> tuple[Section, ...]:
    """Read the table, once in a process."""
    sections = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return tuple(
        Section(
            title=section["title"],
            zh=section.get("zh", ""),
            about=section.get("about", ""),
            terms=tuple(_read_term(names, entry) for names, entry in section["names"].items()),
        )
        for section in sections
    )


def find_term(name: str) -> Term | None:
    """Return the term of this name, in any spelling; None where there is none."""
    return _terms_by_name().get(plain(name))


def find_word(word: str) -> Term | None:
    """Return the term of a word as programs write it: ``torch.cuda.amp.GradScaler()`` is ``GradScaler``."""
    parts = word.removesuffix("()").split(".")
    ends = (find_term(".".join(parts[start:])) for start in range(len(parts)))
    return next((term for term in ends if term is not None), None)


def is_setting(here: str) -> bool:
    """Check whether ``here`` is set in a recipe, and not typed as an option, a command or a call."""
    return _SETTING.fullmatch(here) is not None


def plain(name: str) -> str:
    """Return a name without case and separators; of what has no letters only the case."""
    return re.sub(r"[-_\s]", "", name.lower()) if re.search(r"[^\W\d_]", name) else name.strip()


@cache
def _terms_by_name() -> Mapping[str, Term]:
    return {plain(name): term for section in read_sections() for term in section.terms for name in term.names}


def _read_term(names: str, entry: str | Mapping[str, Any]) -> Term:
    fields: Mapping[str, Any] = {"here": entry} if isinstance(entry, str) else entry
    here = fields.get("here", "")
    values = {plain(there): _in_full(here, value) for there, value in fields.get("values", {}).items()}
    return Term(
        names=tuple(name.strip() for name in names.split(",")),
        here=here,
        values=values,
        only=fields.get("only", False),
        note=fields.get("note", ""),
        zh=fields.get("zh", ""),
        page=fields.get("page", ""),
    )


def _in_full(here: str, value: str) -> str:
    """Return a value of the table with the setting that it is of, where it stands alone."""
    is_whole = not value or "=" in value or value.startswith(("--", "paceline "))
    return value if is_whole else f"{here.partition('=')[0]}={value}"
