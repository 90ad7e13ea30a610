"""What is learned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from paceline.recipe.entries import written
from paceline.recipe.parts.part import Part, SettingError
from paceline.recipe.tasks import task_names
from paceline.recipe.techniques import entry_of

if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[("auto", *sorted(task_names()))]

_BALANCED = "task.class_weights=balanced"


def _by_name(weights: object) -> object:
    """Labels that YAML reads as numbers or booleans are names all the same."""
    if isinstance(weights, Mapping):
        return {written(name): weight for name, weight in weights.items()}
    if weights not in ("balanced", None):
        raise SettingError(f"{weights!r} is neither balanced nor a weight for every label by its name", _BALANCED)
    return weights


ClassWeights = Annotated[Literal["balanced"] | dict[str, float] | None, BeforeValidator(_by_name)]
"""``balanced``, or label name -> weight."""


def _of(technique: str, default: Any, more: str, **limits: Any) -> Any:
    """The field of a technique, as the catalogue has it."""
    return Field(default, description=f"{entry_of(technique).summary} {more}", **limits)


class TaskPart(Part):
    """What is learned."""

    type: TaskName = Field("auto", description="auto reads it off the labels.")
    loss: str | None = Field(
        None,
        pattern=r"^(focal|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="focal (scaled down the surer the model is of the right label), or module:function(logits, labels)"
        " returning one loss a sample (shape [S] or [S, C]); null: cross-entropy, or the squared error.",
    )
    focal_gamma: float = Field(
        2.0, ge=0, allow_inf_nan=False, description="Of focal: how far a loss is scaled down; 0: not at all."
    )
    label_smoothing: float = _of(
        "label_smoothing", 0.0, "0.1, for example; 0: none. Multi-label: towards one half.", ge=0, lt=1
    )
    class_weights: ClassWeights = _of(
        "class_weights",
        None,
        "balanced: by the training split, n / (classes * count); or a weight for every label by its name. Multi-label:"
        " of a label where it is given, balanced those without it / those with it. Null: all the same.",
    )
    threshold: Literal["tuned"] | Annotated[float, Field(gt=0, lt=1, strict=True)] = _of(
        "tuned_threshold",
        0.5,
        "Or a probability, the same for all labels. Of multi-label, and of the second of two classes.",
    )
    metrics: tuple[str, ...] | None = Field(
        None,
        description="accuracy, f1, auroc, mse, ...; or module:function(scores, labels); null: the task's own.",
    )

    @field_validator("class_weights")
    @classmethod
    def _usable_weights(cls, value: ClassWeights) -> ClassWeights:
        for name, weight in value.items() if isinstance(value, dict) else ():
            if not (weight > 0 and math.isfinite(weight)):
                why = f"the weight of {name!r} is {weight:g}, and has to be a number above 0"
                raise SettingError(why, f"task.class_weights.{name}=1")
        if value == {}:
            raise SettingError("a weight for every label by its name, or balanced; null for none", _BALANCED)
        return value

    @model_validator(mode="after")
    def _effect(self) -> Self:
        # a default written out, as in a run's own recipe, is not a wish
        if self.focal_gamma != 2.0 and self.loss != "focal":
            raise SettingError(f"focal_gamma = {self.focal_gamma:g}: has no effect without loss: focal", ".loss=focal")
        return self

    @property
    def own_loss(self) -> str | None:
        """The function of the user's that is the loss, where there is one."""
        return None if self.loss == "focal" else self.loss
