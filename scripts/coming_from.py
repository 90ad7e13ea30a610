"""Writes the tables of docs/coming-from.md from the names in the recipe: ``python scripts/coming_from.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.recipe.elsewhere import TABLE, TOLD, Name

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming-from.md"
BEGIN, END = "<!-- names: written by scripts/coming_from.py -->", "<!-- end of names -->"


def page(text: str) -> str:
    """``text`` of the page with its tables written anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.partition(END)[2]}"


def tables() -> str:
    """A section a library, a line for what is called one thing here."""
    return "\n".join(line for library, names in TABLE.items() for line in _section(library, names))


def _section(library: str, names: tuple[Name, ...]) -> Iterator[str]:
    yield from (f"## {library if library in TOLD else library[0].upper() + library[1:]}", "")
    if library in TOLD:
        yield from (*TOLD[library], "")
    yield from ("| there | here | |", "|---|---|---|")
    for name in names:
        there = ", ".join(f"`{each}`" for each in name.names)
        yield f"| {there} | {_here(name)} | {name.note.replace('|', chr(92) + '|')} |"
    yield ""


def _here(name: Name) -> str:
    told = [f"`{name.here.replace('{}', 'N')}`"] if name.here else ["nothing"]
    for there, here in name.values.items():
        told.append(f"`{there}`: `{here}`" if here else f"`{there}`: leave it out")
    return "; ".join(told)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
