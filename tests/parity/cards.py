"""Runs the examples on the cards of techniques, as somebody would in a loop of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

CARDS = Path(__file__).resolve().parents[2] / "docs" / "techniques"


def run_example(name: str, **given: Any) -> dict[str, Any]:
    """Run the Python of ``docs/techniques/<name>.md`` with these names defined; returns all names after it."""
    text = (CARDS / f"{name}.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, f"{name}.md has no example"
    names = dict(given)
    for block in found:
        exec(compile(block, f"{name}.md", "exec"), names)
    return names
