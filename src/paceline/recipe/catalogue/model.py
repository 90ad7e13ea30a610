"""What changes the model itself, and with it the result."""

from __future__ import annotations

from paceline.recipe.entries import TechniqueEntry

MODEL: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "lora",
        "Train low-rank adapters beside the linear layers of the blocks, and the head.",
        "numerics",
        "changes the result",
        off="all",
        execution=False,
        inference="kept",
        memory="gradients and states of adapters and head alone; each adapter keeps its input",
        choice="model.train",
    ),
)
"""In the order of application."""
