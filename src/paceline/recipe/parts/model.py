"""Which model is fine-tuned, and how much of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.recipe.parts.part import EXECUTION, Part, Reference, SettingError
from paceline.recipe.techniques import entry_of


class LoraPart(Part):
    """Adapters of ``train: lora``."""

    rank: int = Field(8, ge=1, description="Of each adapter: the width between its two matrices.")
    alpha: int = Field(16, ge=1, description="An adapter's result is multiplied by alpha / rank.")
    targets: Literal["auto"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        "auto",
        description="auto: all linear layers of the blocks; else those whose names end so, such as [q_lin, v_lin].",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Of what goes into an adapter.")
    dora: bool = Field(False, description="Train the length of each row of a weight apart from its direction (DoRA).")
    merge: bool = Field(
        False,
        json_schema_extra=EXECUTION,
        description="Save whole weights with the adapters added in, which load in plain transformers; else the adapters"
        " as peft has them, which need the base model.",
    )


class ModelPart(Part):
    """Which model is fine-tuned, and how much of it."""

    source: str | None = Field(None, description="Hub name or folder of a pretrained model.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    config: dict[str, Any] | None = Field(
        None,
        description="With source: settings of its configuration to override. Alone: a whole configuration with"
        " model_type; the weights are then random.",
    )
    factory: Reference | None = Field(
        None, description="package.module:function returning an nn.Module; called with num_labels=N."
    )
    tokenizer: str = Field(
        "auto",
        description="auto: the model's own, or one trained on the training texts when the weights are random;"
        " otherwise a Hub name or folder.",
    )
    vocabulary_size: int = Field(
        8000, ge=100, le=1_000_000, description="Size of a tokenizer trained on the training texts."
    )
    train: str = Field(
        "all",
        pattern=r"^(all|head|lora|features|last:[1-9]\d*)$",
        description="all | head | last:K (the head and the last K blocks) | lora (adapters and the head) | features"
        " (embed once, then fit a scikit-learn classifier).",
    )
    lora: LoraPart = LoraPart()
    classifier: Literal["logistic", "svm"] = Field("logistic", description="Classifier on top of train: features.")
    group_norm: int | None = Field(None, ge=1, description=entry_of("group_norm").description)
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.factory and (self.source or self.config):
            raise SettingError(
                "factory builds the whole model: leave out source and config", ".source=null", ".config=null"
            )
        if not (self.source or self.config or self.factory):
            raise SettingError(
                "no model: set model.source (a Hub name or a folder), model.config or model.factory", ".source=NAME"
            )
        if self.classifier != "logistic" and self.train != "features":
            raise SettingError(
                f"classifier: {self.classifier} has no effect without train: features", ".train=features"
            )
        if self.train != "lora" and (
            set_ := [n for n, f in LoraPart.model_fields.items() if getattr(self.lora, n) != f.default]
        ):
            raise SettingError(f"lora.{set_[0]} has no effect with train: {self.train}", ".train=lora")
        if self.train == "lora" and not (self.source or self.lora.merge):
            raise SettingError(
                "train: lora saves adapters for the model of model.source, and there is none", ".lora.merge=true"
            )
        if self.config is not None and not self.source and "model_type" not in self.config:
            raise SettingError(
                "model.config without model.source is a whole configuration and needs model_type",
                ".config.model_type=bert",
            )
        return self
