"""What changes how samples and labels count: fields of ``task``, and of ``loop`` the one that draws samples."""

from __future__ import annotations

from paceline.recipe.catalogue.speed import NO_STEP
from paceline.recipe.entries import Rule, TechniqueEntry

_OF_CLASSES = Rule("task.type!=regression", "a number has no classes")
_NOT_OWN = Rule("task.loss=null|focal", "a function of yours is the whole loss, and would not see it")

LOSS: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "label_smoothing",
        "Take a share of each label's certainty and spread it over all labels.",
        "changes the result",
        off=0.0,
        execution=False,
        needs=(_OF_CLASSES, _NOT_OWN),
        excludes=(
            NO_STEP,
            Rule("task.loss=focal", "it is of one label's probability, not of several smoothed ones"),
        ),
        inference="kept",
        place="task.label_smoothing",
        example=0.1,
        room="paceline.tasks.label_smoothing",
    ),
    TechniqueEntry(
        "class_weights",
        "Weigh each sample's loss by its label, as the labels are rare or named.",
        "changes the result",
        off=None,
        execution=False,
        needs=(_OF_CLASSES, _NOT_OWN),
        excludes=(NO_STEP,),
        inference="kept",
        place="task.class_weights",
        room="paceline.tasks.class_weights",
    ),
    TechniqueEntry(
        "focal",
        "Scale each sample's loss down the surer the model is of the right label.",
        "changes the result",
        off=None,
        execution=False,
        needs=(_OF_CLASSES,),
        excludes=(NO_STEP,),
        inference="kept",
        choice="task.loss",
        room="paceline.tasks.focal",
    ),
    TechniqueEntry(
        "balanced_sampler",
        "Draw samples with replacement, those of every class equally often.",
        "changes the result",
        off=None,
        execution=False,
        needs=(
            _OF_CLASSES,
            Rule(
                "task.type!=multi_label",
                "a sample has any number of labels, and no one class by which it is drawn;"
                " task.class_weights=balanced weighs each label independently",
            ),
            Rule("loop.shuffle=true", "samples are drawn, so there is no order to keep"),
        ),
        excludes=(NO_STEP, Rule("task.class_weights!=null", "rare classes would be made up for twice")),
        place="loop.sampler",
        room="paceline.data.sampler",
    ),
    TechniqueEntry(
        "tuned_threshold",
        "Predict a label above the probability that has the best F1 on validation.",
        "changes the result",
        off=0.5,
        execution=False,
        needs=(_OF_CLASSES,),
        inference="open",
        place="task.threshold",
        room="paceline.tasks.threshold",
    ),
)
"""Losses, weights and thresholds for labels that are noisy, rare or hard."""
