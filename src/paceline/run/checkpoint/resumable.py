"""Whether a whole checkpoint also holds what a run goes on from: checksums say nothing of what was saved."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.contract.errors import CheckpointError
from paceline.run.checkpoint.manifest import STATE
from paceline.run.checkpoint.store import Checkpoint
from paceline.run.progress import Progress


class _Engine(BaseModel):
    applied: int
    loss_scale: dict[str, Any]
    numbers: dict[str, float]


class _Seconds(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]
    total: float


class _State(BaseModel):
    fingerprint: str
    recipe: dict[str, Any]
    engine: _Engine
    progress: Progress
    seconds: _Seconds


_FIX = "put a whole copy of it back, or start a new run with another --out"


def require_resumable(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose state is not that of a run.

    Raises:
        CheckpointError: names what is missing or of another kind.
    """
    why = "another version of paceline wrote it, or somebody changed it and its checksums"
    try:
        progress = _State.model_validate(dict(checkpoint.state)).progress
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(ascii(key)[1:-1] if isinstance(key, str) else str(key) for key in first["loc"])
        raise CheckpointError(f"{checkpoint.folder / STATE}: {place}: {first['msg']}", why, _FIX) from None
    counts = {"step": progress.step, "order.epoch": progress.order.epoch, "order.step": progress.order.step}
    for name, count in counts.items():
        if count < 0:
            raise CheckpointError(f"{checkpoint.folder / STATE}: progress.{name}: is below zero", why, _FIX)
