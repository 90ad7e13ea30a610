"""What is learned."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.recipe.parts.part import Part, Reference


class TaskPart(Part):
    """What is learned."""

    type: Literal["auto", "classification", "multi_label", "regression"] = Field(
        "auto", description="auto reads it off the labels."
    )
    loss: Reference | None = Field(
        None, description="module:function(logits, labels) returning one loss a sample (shape [S] or [S, C])."
    )
    metrics: tuple[str, ...] | None = Field(
        None,
        description="accuracy, f1, auroc, mse, ...; or module:function(scores, labels); null: the task's own.",
    )
