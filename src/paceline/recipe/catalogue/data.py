"""What a model is given of its samples: settings of ``data``."""

from __future__ import annotations

from paceline.recipe.catalogue.speed import NO_STEP
from paceline.recipe.entries import Rule, TechniqueEntry

_MIXING = "paceline.data.mixing"
_WEIGHED = Rule("task.class_weights!=null", "the weights of a batch are those of its own labels, not of its partners'")
_BOTH = "the partners' images of each micro-batch, until both are mixed"

DATA: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "overflow",
        "Of texts longer than data.max_length keep another part than the beginning, or all in windows.",
        "changes the result",
        off="head",
        place="data.overflow",
        execution=False,
        inference="kept",
        memory="of windows, a text is as many sequences of its micro-batch as it has windows",
    ),
    TechniqueEntry(
        "mixup",
        "Train on weighted means of two images; the share comes from Beta(alpha, alpha), 0.2 as a rule.",
        "changes the result",
        off=0.0,
        excludes=(NO_STEP, _WEIGHED),
        place="data.augment.mixup",
        example=0.2,
        room=_MIXING,
        memory=_BOTH,
    ),
    TechniqueEntry(
        "cutmix",
        "Train on images with a box of another one; its area comes from Beta(alpha, alpha), 1 as a rule.",
        "changes the result",
        off=0.0,
        excludes=(NO_STEP, _WEIGHED),
        place="data.augment.cutmix",
        example=1.0,
        room=_MIXING,
        memory=_BOTH,
    ),
)
"""In the order of application."""
