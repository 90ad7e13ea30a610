"""Writes the table of rules on each technique's page from the catalogue: ``python scripts/technique_rules.py``."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.recipe.entries import TechniqueEntry, written
from paceline.recipe.techniques import ENTRIES, told

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- rules: written by scripts/technique_rules.py -->", "<!-- end of rules -->"

LABELS = {"auto": "`auto`", "inference": "`evaluate`, `predict`"}
"""Of lines whose name is a word of the recipe, or two verbs."""


def rewritten(text: str, entry: TechniqueEntry) -> str:
    """``text`` of the entry's page with its table written anew.

    Raises:
        ValueError: the page has no place for it.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"{entry.page}: write {BEGIN} and {END} where its rules should stand")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(entry)}\n{END}{rest.partition(END)[2]}"


def table(entry: TechniqueEntry) -> str:
    """A line for each rule."""
    setting = f"{entry.setting}={entry.on}" if entry.choice else f"{entry.setting}={written(entry.default)} by default"
    rows, before = ["| rule | |", "|---|---|"], ""
    for label, text in (("setting", setting), *told(entry)):
        coded = re.sub(r"[a-z_.]+!?=[\w|]+", r"`\g<0>`", text).replace("|", r"\|")
        rows.append(f"| {'' if label == before else LABELS.get(label, label)} | {coded} |")
        before = label
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    for each in ENTRIES:
        page = ROOT / each.page
        page.write_text(rewritten(page.read_text(encoding="utf-8"), each), encoding="utf-8")
