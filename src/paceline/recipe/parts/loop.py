"""How long a run is, and when it evaluates and saves."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.recipe.parts.part import EXECUTION, Part, SettingError
from paceline.recipe.techniques import entry_of


class EarlyStoppingPart(Part):
    """Stop when the best metric has not improved for ``patience`` evaluations."""

    patience: int = Field(3, ge=1, description="Evaluations without improvement.")
    min_delta: float = Field(0.0, ge=0, description="Smallest change that counts as one.")


class LoopPart(Part):
    """How long the run is and when it evaluates and saves."""

    epochs: int = Field(3, ge=1, description="Passes over the training split.")
    max_steps: int | None = Field(None, ge=1, description="Ends the run after this many updates.")
    batch_size: int = Field(32, ge=1, description="Samples an update: the global batch.")
    micro_batch_size: int | None = Field(
        None, ge=1, json_schema_extra=EXECUTION, description="Samples a forward pass; null: the whole batch."
    )
    on_oom: Literal["fail", "split"] = Field(
        "fail",
        json_schema_extra=EXECUTION,
        description="When memory runs out. fail: the run ends and says what would fit. split: all ranks halve"
        " micro_batch_size, or evaluation_batch_size, say so, and make the step or the evaluation again.",
    )
    evaluation_batch_size: int | None = Field(
        None,
        ge=1,
        json_schema_extra=EXECUTION,
        description="Samples a forward pass of an evaluation; null: twice the micro-batch, on a GPU at least 128.",
    )
    drop_last: bool = Field(False, description="Leave out the last, smaller batch of an epoch.")
    shuffle: bool = Field(True, description="A new order of the samples each epoch, drawn from the seed.")
    sampler: Literal["balanced"] | None = Field(
        None,
        description=f"{entry_of('balanced_sampler').summary} An epoch draws as many as there are; null: each once.",
    )
    evaluate_every: Literal["epoch", "never"] | Annotated[int, Field(ge=1)] = Field(
        "epoch", description="An epoch, a number of steps, or never."
    )
    checkpoint_every: Literal["epoch", "never"] | Annotated[int, Field(ge=1)] = Field(
        "epoch", json_schema_extra=EXECUTION, description="An epoch, a number of steps, or never."
    )
    checkpoint_minutes: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        json_schema_extra=EXECUTION,
        description="Also whenever this long has passed since the last one, by the first rank's clock; null: no.",
    )
    keep_last: int = Field(
        1,
        ge=1,
        json_schema_extra=EXECUTION,
        description="Number of newest checkpoints kept, each with the best of its time.",
    )
    checkpoint_mirror: str | None = Field(
        None,
        min_length=1,
        json_schema_extra=EXECUTION,
        description="A path or a URL such as s3://bucket/runs: every committed checkpoint is copied to a folder there"
        " with the run folder's name, behind the run. paceline restore makes the run folder again from it. Null: none.",
    )
    best_metric: str = Field(
        "auto",
        description="auto: accuracy; f1 for multi-label; -loss for regression. A leading '-' means lower is better.",
    )
    save_best: bool = Field(True, description="The saved model is the best evaluated one, not the last.")
    save: Literal["auto", "weights", "ema", "best"] = Field(
        "auto",
        description="What the saved model is made of with optimizer.ema. weights: those that are trained. ema: their"
        " average. best: whichever has the better best_metric at the step that is saved. best_metric and"
        " early_stopping go by what would be saved. auto: ema where it is on, else weights.",
    )
    early_stopping: EarlyStoppingPart | None = Field(None, description="Null: the run goes to its end.")

    @property
    def evaluated_together(self) -> int:
        """Samples of a forward pass that nothing is learned from."""
        return self.evaluation_batch_size or self.batch_size

    @model_validator(mode="after")
    def _effect(self) -> Self:
        if self.early_stopping and self.evaluate_every == "never":
            raise SettingError("early_stopping has no effect with evaluate_every: never", ".evaluate_every=epoch")
        return self
