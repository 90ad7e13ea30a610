"""Who watches a run, and which steps are traced."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.recipe.parts.part import EXECUTION, Part, SettingError
from paceline.recipe.windows import problem_of


class ObservePart(Part):
    """Who watches the run."""

    console: Literal["auto", "bar", "plain", "off"] = Field(
        "auto", json_schema_extra=EXECUTION, description="auto: a bar on a terminal, plain lines elsewhere."
    )
    log_every: int = Field(10, ge=1, json_schema_extra=EXECUTION, description="Steps between plain console lines.")
    metrics_every: int | None = Field(
        None,
        ge=1,
        json_schema_extra=EXECUTION,
        description="Steps between lines with the running loss and accuracy of the training, each the mean over these"
        " steps: on the console in place of log_every's, and in metrics.jsonl. Null: none.",
    )
    rank_losses: bool = Field(
        False,
        json_schema_extra=EXECUTION,
        description="With several ranks: each rank's own loss too, on the step line and in metrics.jsonl.",
    )
    tensorboard: bool = Field(
        False,
        json_schema_extra=EXECUTION,
        description="Write TensorBoard's files into the run folder; needs the extra tensorboard.",
    )
    report: bool = Field(True, json_schema_extra=EXECUTION, description="Write report.html at the end.")
    memory_plan: bool = Field(
        True,
        json_schema_extra=EXECUTION,
        description="On a GPU, predict the run's memory in a process beside it, and show both at the end.",
    )
    baseline: Literal["tfidf"] | None = Field(
        None,
        json_schema_extra=EXECUTION,
        description="tfidf: at the end, fit TF-IDF and logistic regression on the training texts, and tell its scores"
        " beside the model's. Null: none.",
    )


class TracePart(Part):
    """Which steps are looked into, and by whom: see docs/tracing.md."""

    steps: tuple[str, ...] = Field(
        (),
        json_schema_extra=EXECUTION,
        description="Windows of steps, cut as Python cuts a list of all of them: 90:100 (steps 91 to 100),"
        " last-epoch:-10 (the last ten of the last epoch), last-epoch (all of it). Windows that overlap are one. Empty:"
        " none.",
    )
    kind: Literal["kineto", "nsys"] = Field(
        "kineto",
        json_schema_extra=EXECUTION,
        description="kineto: torch's profiler, a Chrome trace a rank and a verdict. nsys: NVTX ranges between"
        " cudaProfilerStart and cudaProfilerStop, for Nsight Systems around the run.",
    )
    graph: Literal["launch", "keep"] = Field(
        "launch",
        json_schema_extra=EXECUTION,
        description="What becomes of captured steps in a window. launch: they run eagerly, kernel by kernel, so that"
        " each kernel is seen within the span that launched it. keep: they are replayed.",
    )
    memory: bool = Field(
        False,
        json_schema_extra=EXECUTION,
        description="Of kineto: allocations as a curve in the trace; on a GPU also a snapshot of torch's allocator.",
    )

    @field_validator("steps", mode="before")
    @classmethod
    def _windows(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            problem = next(filter(None, map(problem_of, value)), "")
            if problem:
                raise SettingError(problem, "trace.steps=[last-epoch:-10]")
        return value

    @field_validator("kind", mode="before")
    @classmethod
    def _one_kind(cls, value: object) -> object:
        if isinstance(value, list | tuple) or (isinstance(value, str) and {"kineto", "nsys"} <= set(value.split(","))):
            raise SettingError(
                "one of kineto and nsys: only one of them can listen to a GPU; run once with each", "trace.kind=kineto"
            )
        return value

    @model_validator(mode="after")
    def _effect(self) -> Self:
        if self.memory and self.kind == "nsys":
            raise SettingError(
                "memory has no effect with kind: nsys; --cuda-memory-usage=true is nsys' own", ".memory=false"
            )
        return self
