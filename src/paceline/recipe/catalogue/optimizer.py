"""What an update does beside the optimizer's own rule: each a field of ``optimizer``."""

from __future__ import annotations

from paceline.recipe.catalogue.speed import NO_STEP
from paceline.recipe.entries import Rule, TechniqueEntry

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
    TechniqueEntry(
        "muon",
        "Update matrices of hidden layers by momentum made orthogonal (Muon), all else by AdamW.",
        "changes the result",
        off="adamw",
        execution=False,
        excludes=(
            NO_STEP,
            Rule("optimizer.rounding!=nearest", "torch's Muon changes the weights itself"),
            Rule("parallel.strategy=fsdp|deepspeed", "a matrix is made orthogonal whole, and shards are parts of one"),
            Rule("parallel.tensor!=1", "a matrix is made orthogonal whole, and each process has a part of it"),
        ),
        inference="kept",
        memory="one state a hidden weight, in place of AdamW's two; a few copies of the largest matrix in bf16",
        choice="optimizer.type",
        room="paceline.optim.muon",
    ),
)
