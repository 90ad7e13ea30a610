"""The update rule, its schedule and its parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from paceline.recipe.parts.part import Beta, Part, SettingError, share_or_count, within_fp32
from paceline.recipe.techniques import entry_of

SCHEDULES = ("linear", "cosine", "constant", "cosine_restarts", "one_cycle", "inverse_sqrt")
"""Schedules by name."""

LOW_BIT = {"adamw8bit": ("bitsandbytes", "torchao"), "adamw4bit": ("torchao",), "adamwfp8": ("torchao",)}
"""Types with states of few bits -> libraries that have them, the one to be taken first in front."""

_OF_SOME_SCHEDULES = {
    "floor": ("linear", "cosine", "cosine_restarts", "one_cycle"),
    "cycles": ("cosine_restarts",),
    "div_factor": ("one_cycle",),
    "timescale": ("inverse_sqrt",),
}
"""Settings of a schedule -> the types with which they have an effect."""


class SchedulePart(Part):
    """The learning rate over the run, as a factor of ``lr``."""

    type: str = Field(
        "linear",
        pattern=rf"^({'|'.join(SCHEDULES)}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="linear or cosine decay to floor; constant; cosine_restarts: a cosine decay, cycles times;"
        " one_cycle: up from lr / div_factor and down to floor; inverse_sqrt: lr / sqrt(step); or module:function(step,"
        " total_steps) -> factor.",
    )
    warmup: float | int = Field(
        0.06,
        ge=0,
        description="Linear warm-up from 0: a share of all steps below 1, or a number of steps from 1. Of one_cycle the"
        " rise, 0.3 where nothing is said.",
    )
    floor: float = Field(
        0.0, ge=0, le=1, description="Factor at the end of a decay; of one_cycle 4e-6 where nothing is said."
    )
    cycles: int = Field(2, ge=2, description="Of cosine_restarts: decays, each from lr to floor.")
    div_factor: float = Field(
        25.0, gt=1, allow_inf_nan=False, description="Of one_cycle: the rate rises from lr / div_factor."
    )
    timescale: int | None = Field(
        None,
        ge=1,
        description="Of inverse_sqrt: steps from which the decay counts; null: those of the warm-up, else 10,000.",
    )

    _usable = field_validator("warmup")(share_or_count)

    @model_validator(mode="before")
    @classmethod
    def _as_torch_has_it(cls, given: Any) -> Any:
        """The ends of one cycle where nothing is said, as torch's OneCycleLR has them."""
        if isinstance(given, Mapping) and given.get("type") == "one_cycle":
            return {"warmup": 0.3, "floor": 4e-6, **given}
        return given

    @model_validator(mode="after")
    def _effect(self) -> Self:
        for name, users in _OF_SOME_SCHEDULES.items():
            # a default written out, as in a run's own recipe, is not a wish
            if self.type not in users and getattr(self, name) != type(self).model_fields[name].default:
                raise SettingError(
                    f"{name}: has no effect with type: {self.type}; it is of {', '.join(users)}", f".type={users[0]}"
                )
        return self


class GroupPart(Part):
    """Settings of the parameters whose names match; the first group that matches a name takes it."""

    match: str = Field(description="Glob on parameter names, for example '*classifier*'.")
    lr: float | None = Field(None, gt=0, allow_inf_nan=False, description="Null: that of the optimizer.")
    weight_decay: float | None = Field(None, ge=0, description="Null: that of the optimizer.")
    schedule: SchedulePart | None = Field(None, description="As `schedule` below; null: that one.")

    _usable = field_validator("lr", "weight_decay")(within_fp32)


class EmaPart(Part):
    """A moving average of the trained weights."""

    decay: float = Field(
        gt=0, lt=1, description="What the average keeps of itself at each update; `ema: 0.999` sets it alone."
    )
    warmup: bool = Field(
        False,
        description="The decay is at most (1 + n) / (10 + n) after n averages: the first steps are soon forgotten.",
    )
    every: int = Field(1, ge=1, description="Applied steps from one average to the next.")
    from_start: bool = Field(
        False,
        description="The average begins with the weights before the first step. false: with those after it, as in"
        " torch's AveragedModel.",
    )

    @field_validator("decay", mode="before")
    @classmethod
    def _between(cls, value: object) -> object:
        if isinstance(value, (int, float)) and not 0 < value < 1:
            raise SettingError(f"{value} does not lie between 0 and 1; 0.999, for example", "optimizer.ema.decay=0.999")
        return value

    def __str__(self) -> str:
        """As YAML writes it."""
        told = ", ".join(
            f"{key}: {str(value).lower()}" for key, value in self.model_dump(exclude_defaults=True).items()
        )
        return str(self.decay) if told.startswith("decay") and "," not in told else f"{{{told}}}"


def _decay_alone(value: object) -> object:
    """A number as the part that it stands for."""
    if isinstance(value, (bool, str)):
        raise SettingError(f"{str(value).lower()} is no decay; 0.999, for example, or null", "optimizer.ema=0.999")
    return {"decay": value} if isinstance(value, (int, float)) else value


class LossScalePart(Part):
    """Loss scaling of fp16, in the words of torch.amp.GradScaler and with its defaults."""

    init_scale: float = Field(
        65536.0, gt=0, allow_inf_nan=False, description="The first scale: a loss is multiplied by it before backward."
    )
    growth_factor: float = Field(
        2.0, gt=1, allow_inf_nan=False, description="Multiplies the scale after growth_interval good steps in a row."
    )
    backoff_factor: float = Field(
        0.5, gt=0, lt=1, description="Multiplies the scale after a step whose gradients overflow, which is skipped."
    )
    growth_interval: int = Field(2000, ge=1, lt=2**31, description="Good steps in a row after which the scale grows.")

    _usable = field_validator("init_scale", "growth_factor")(within_fp32)


class OptimizerPart(Part):
    """The update rule and its parameter groups."""

    type: Literal["adamw", "adam", "sgd", "muon", "adamw8bit", "adamw4bit", "adamwfp8"] = Field(
        "adamw",
        description=f"muon: {entry_of('muon').summary} adamw8bit keeps its states in 8 bits; needs a GPU"
        " and bitsandbytes or torchao. adamw4bit keeps"
        " them in 4 bits and adamwfp8 in fp8 (compute capability 8.9); both need a GPU and torchao.",
    )
    low_bit: Literal["auto", "bitsandbytes", "torchao"] = Field(
        "auto",
        description="Library of adamw8bit, adamw4bit and adamwfp8; auto: the first that is installed and has it,"
        " bitsandbytes before torchao.",
    )
    lr: float = Field(5e-5, gt=0, allow_inf_nan=False, description="Largest learning rate, before lr_scaling.")
    lr_scaling: Literal["none", "linear", "sqrt"] | Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] = (
        Field(
            "none",
            description="Multiplies every group's learning rate: linear, by loop.batch_size / lr_scaling_base (Goyal et"
            " al. 2017, for sgd with a warm-up); sqrt, by its root (Krizhevsky 2014; Hoffer et al. 2017); or a factor.",
        )
    )
    lr_scaling_base: int | None = Field(
        None, ge=1, description="The global batch that lr was chosen for; needed with linear and sqrt."
    )
    weight_decay: float | None = Field(
        None,
        ge=0,
        description="Null: 0.01 with adamw of any kind, which decays the weights apart from the gradient; else 0.",
    )
    decay_all: bool = Field(False, description="Decay biases and normalisation weights too.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="Of adam and adamw, and of muon's adamw.")
    eps: float = Field(1e-8, gt=0, description="Of adam and adamw, and of muon's adamw.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Of sgd and muon.")
    nesterov: bool = Field(True, description="Of sgd and muon.")
    clip_norm: float | None = Field(1.0, gt=0, description="Largest global gradient norm; null: no clipping.")
    ema: Annotated[EmaPart | None, BeforeValidator(_decay_alone, json_schema_input_type=float | EmaPart | None)] = (
        Field(None, description=entry_of("ema").description)
    )
    loss_scale: LossScalePart = LossScalePart()
    rounding: Literal["nearest", "stochastic", "kahan"] = Field(
        "nearest", description=f"{entry_of('rounding').summary} With pure_bf16."
    )
    layer_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=f"{entry_of('layer_decay').summary} A group's own lr is left as it is.",
    )
    groups: tuple[GroupPart, ...] = Field(
        (), description="Settings for parameters by name; empty: one setting for all."
    )

    _usable = field_validator("lr", "weight_decay")(within_fp32)

    @property
    def decay(self) -> float:
        """Weight decay of groups that name none."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.type in ("adamw", "muon", *LOW_BIT) else 0.0

    @property
    def decays(self) -> bool:
        """Whether any weight may decay."""
        return self.decay > 0 or any(group.weight_decay for group in self.groups)

    @model_validator(mode="after")
    def _effect(self) -> Self:
        idle = {"sgd": ("betas", "eps"), "muon": ()}.get(self.type, ("momentum", "nesterov"))
        # a default written out, as in a run's own recipe, is not a wish
        wished = [name for name in idle if getattr(self, name) != type(self).model_fields[name].default]
        if wished:
            kind = "adamw" if self.type == "sgd" else "sgd"
            raise SettingError(f"{', '.join(wished)}: has no effect with type: {self.type}", f".type={kind}")
        if self.type == "sgd" and self.nesterov and self.momentum == 0:
            raise SettingError("nesterov needs momentum above 0", ".nesterov=false")
        return self

    @model_validator(mode="after")
    def _library(self) -> Self:
        having = LOW_BIT.get(self.type, ())
        if self.low_bit != "auto" and not having:
            raise SettingError(
                f"low_bit: has no effect with type: {self.type}; it is of {', '.join(LOW_BIT)}", ".low_bit=auto"
            )
        if self.low_bit not in ("auto", *having):
            raise SettingError(
                f"low_bit: {self.low_bit} has no {self.type}; low_bit={having[0]} has it", f".low_bit={having[0]}"
            )
        return self

    @model_validator(mode="after")
    def _scaling(self) -> Self:
        by_batch = self.lr_scaling in ("linear", "sqrt")
        if by_batch and self.lr_scaling_base is None:
            raise SettingError(
                f"lr_scaling = {self.lr_scaling} needs lr_scaling_base, the global batch that lr was chosen for;"
                " lr_scaling_base=32, for example",
                ".lr_scaling_base=32",
            )
        if not by_batch and self.lr_scaling_base is not None:
            raise SettingError(
                f"lr_scaling_base: has no effect with lr_scaling: {self.lr_scaling}", ".lr_scaling=linear"
            )
        if self.lr_scaling == 1:
            raise SettingError("lr_scaling = 1: has no effect; leave it out", ".lr_scaling=none")
        return self
