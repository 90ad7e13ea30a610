"""What changes the model: each a field where its subject is set."""

from __future__ import annotations

from paceline.recipe.catalogue.speed import NO_STEP
from paceline.recipe.entries import Rule, TechniqueEntry

MODEL: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "lora",
        "Train low-rank adapters beside the linear layers of the blocks, and the head.",
        "changes the result",
        off="all",
        execution=False,
        inference="kept",
        memory="gradients and states of adapters and head alone; each adapter keeps its input",
        choice="model.train",
    ),
    TechniqueEntry(
        "sync_batch_norm",
        "Batch norms take mean and variance over the micro-batches of all ranks (SyncBatchNorm).",
        "up to rounding",
        excludes=(
            NO_STEP,
            Rule("parallel.strategy=dp", "torch's DataParallel runs one thread a GPU, which cannot meet in a pass"),
            Rule("techniques.recompute=true", "a second forward pass would meet other ranks again"),
            Rule(
                "loop.on_oom=split",
                "ranks meet in every batch norm, and one that is out of memory leaves the others waiting",
            ),
        ),
        memory="nothing to speak of: sums a channel",
        place="parallel.sync_batch_norm",
    ),
    TechniqueEntry(
        "group_norm",
        "Replace batch norms over images by GroupNorm in so many groups, with their weights.",
        "changes the result",
        off=None,
        excludes=(
            Rule("model.train=head|features", "nothing would train the network for its other norms"),
            Rule("parallel.sync_batch_norm=true", "no batch norm is left"),
        ),
        inference="kept",
        place="model.group_norm",
        example=32,
        room="paceline.models.group_norm",
    ),
)
"""In the order of application."""
