"""How large the steps are: learning rates over the run and over the depth of the model, and what rounding leaves."""

from __future__ import annotations

from paceline.recipe.catalogue.speed import NO_STEP
from paceline.recipe.entries import Rule, TechniqueEntry

_SCHEDULE, _ROOM = "schedule.type", "paceline.optim.schedule"


def _schedule(name: str, summary: str) -> TechniqueEntry:
    """A schedule by name. ``evaluate`` and ``predict`` leave it as it is, beside the settings that are its own."""
    return TechniqueEntry(
        name,
        summary,
        "changes the result",
        off="linear",
        execution=False,
        excludes=(NO_STEP,),
        inference="kept",
        choice=_SCHEDULE,
        room=_ROOM,
    )


RATES: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "layer_decay",
        "Multiply the learning rate by this for each block down from the head.",
        "changes the result",
        off=None,
        execution=False,
        excludes=(Rule("model.train=head|features", "no block is trained"),),
        place="optimizer.layer_decay",
        example=0.9,
        room="paceline.optim.layer_decay",
    ),
    _schedule("one_cycle", "Let the rate rise from a small one, and fall to nearly nothing, along half cosines."),
    _schedule("cosine_restarts", "Let the rate fall along a cosine several times, each time from the top."),
    _schedule("inverse_sqrt", "Let the rate fall as one over the root of the step, whatever the run's length."),
)

ROUNDING: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "rounding",
        "Let weights in bf16 take small updates: by chance, or by a second number beside each.",
        "changes the result",
        off="nearest",
        execution=False,
        needs=(Rule("techniques.precision=pure_bf16", "other weights are fp32, and take the updates as they are"),),
        excludes=(
            NO_STEP,
            Rule("optimizer.type=adamw8bit|adamw4bit|adamwfp8", "its library changes the weights itself"),
            Rule("parallel.strategy=fsdp", "shards are updated by torch's optimizers, which round to nearest"),
        ),
        memory="kahan keeps 2 bytes a trained weight beside it",
        place="optimizer.rounding",
        room="paceline.optim.rounding",
    ),
)
