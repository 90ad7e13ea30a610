"""What a model is given of its samples: settings of ``data``."""

from __future__ import annotations

from paceline.recipe.entries import TechniqueEntry

DATA: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "overflow",
        "Of texts longer than data.max_length keep another part than the beginning, or all in windows.",
        "layout",
        "changes the result",
        off="head",
        place="data.overflow",
        execution=False,
        inference="kept",
        memory="of windows, a text is as many sequences of its micro-batch as it has windows",
    ),
)
"""Each is a setting of its own, in the order of application."""
