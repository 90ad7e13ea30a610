"""What an update does beside the optimizer's own rule: each a field of ``optimizer``."""

from __future__ import annotations

from paceline.recipe.catalogue.speed import NO_STEP
from paceline.recipe.entries import TechniqueEntry

OPTIMIZER: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "ema",
        "Keep a moving average of the weights, measure it beside them, and save it.",
        "changes the result",
        off=None,
        execution=False,
        excludes=(NO_STEP,),
        inference="kept",
        memory="4 bytes a trained weight",
        place="optimizer.ema",
        example=0.999,
        room="paceline.optim.ema",
    ),
)
