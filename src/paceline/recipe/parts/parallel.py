"""How the processes of a run share its work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.recipe.catalogue.strategies import STRATEGIES
from paceline.recipe.parts.part import EXECUTION, Part, SettingError
from paceline.recipe.techniques import AXIS_SETTINGS, OWN_SETTINGS, axis_of, entry_of, told_strategies, users_of


def _own(name: str) -> Any:
    """The field of a setting that only some strategies have, as the catalogue has it."""
    own = OWN_SETTINGS[name]
    told = f"Of {' and '.join(users_of(own))}: {own.words}"
    return Field(own.default, ge=own.least, le=own.most, json_schema_extra=EXECUTION, description=told)


if TYPE_CHECKING:
    StrategyName = str
    Offload = str
    Schedule = str
else:
    StrategyName = Literal[("auto", *(entry.name for entry in STRATEGIES))]
    Offload = Literal[OWN_SETTINGS["offload"].values]
    Schedule = Literal[AXIS_SETTINGS["schedule"].values]

NVME = "nvme"
"""What DeepSpeed's own configuration calls a disk."""

_FORMERLY = {True: "parameters", False: "none"}
"""What ``offload`` was when it was there or not."""


class ParallelPart(Part):
    """How a run's processes share its work. With one process only ``dp`` and ``deepspeed`` have a meaning."""

    strategy: StrategyName = Field("auto", json_schema_extra=EXECUTION, description=told_strategies())
    backend: Literal["auto", "nccl", "gloo", "mpi"] = Field(
        "auto",
        json_schema_extra=EXECUTION,
        description="Carries what ranks exchange. auto: nccl between GPUs, gloo between CPUs; mpi where torch has it.",
    )
    reduce_dtype: Literal["fp32", "bf16"] = _own("reduce_dtype")
    bucket_mib: int | None = _own("bucket_mib")
    tensor: int = Field(
        1,
        ge=1,
        json_schema_extra=EXECUTION,
        description=f"{entry_of('tensor').description} N: so many do. 1: none does.",
    )
    pipeline: int = Field(
        1,
        ge=1,
        json_schema_extra=EXECUTION,
        description=f"{entry_of('pipeline').description} N: so many do. 1: none does.",
    )
    schedule: Schedule = Field(
        "1f1b", json_schema_extra=EXECUTION, description=f"Of pipeline: {AXIS_SETTINGS['schedule'].words}"
    )
    shard_size: int | None = _own("shard_size")
    stage: int | None = _own("stage")
    offload: Offload = _own("offload")
    offload_folder: str | None = _own("offload_folder")
    sync_batch_norm: bool = Field(
        False, json_schema_extra=EXECUTION, description=entry_of("sync_batch_norm").description
    )

    @model_validator(mode="before")
    @classmethod
    def _without_the_gone(cls, given: Any) -> Any:
        """Recipes that older runs wrote name a setting that changed no result, and offload as true or false."""
        if not isinstance(given, dict):
            return given
        kept = {k: v for k, v in given.items() if k != "sum_words"}
        if isinstance(kept.get("offload"), bool):
            kept["offload"] = _FORMERLY[kept["offload"]]
        away = str(kept.get("offload"))
        if "/" in away or away == NVME:
            what = "is a folder" if "/" in away else "is a disk"
            folder = away if "/" in away else "FOLDER"
            told = "offload says what goes, and offload_folder where to"
            raise SettingError(f"offload: {what}; {told}", ".offload=optimizer", f".offload_folder={folder}")
        return kept

    @model_validator(mode="after")
    def _effect(self) -> Self:
        for name, own in OWN_SETTINGS.items():
            users = users_of(own)
            if self.strategy not in ("auto", *users) and getattr(self, name) != own.default:
                told = f"{name}: has no effect with strategy: {self.strategy}"
                raise SettingError(f"{told}; it is of {' and '.join(users)}", f".strategy={users[0]}")
        for name, own in AXIS_SETTINGS.items():
            axis = axis_of(own).setting.rpartition(".")[2]
            if getattr(self, axis) == 1 and getattr(self, name) != own.default:
                raise SettingError(f"{name}: has no effect with {axis}: 1", f".{axis}={axis_of(own).example}")
        return self
