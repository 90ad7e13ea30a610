"""How a model is measured and used."""

from __future__ import annotations

from paceline.recipe.entries import TechniqueEntry

EVALUATION: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "tta",
        "Average probabilities over views of a sample: flip, crop5, scales of images, windows of texts.",
        "changes the result",
        off=(),
        execution=False,
        inference="open",
        memory="one view of a batch at a time, beside the images themselves",
        place="techniques.tta",
        example="flip",
    ),
)
"""Each is a setting of its own."""
