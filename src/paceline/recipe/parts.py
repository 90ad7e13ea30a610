"""The parts of a recipe: frozen, torch-free, validated.

Every field is either *result-defining* (the default: changing it changes what is learned, so a resumed run refuses
it) or *execution* (marked ``EXECUTION``: how fast and where; it may change on resume and is recorded).
"""

from __future__ import annotations

import difflib
from encodings.aliases import aliases
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from paceline.recipe.techniques import OWN_SETTINGS, STRATEGIES, entry_of, told_strategies, users_of
from paceline.recipe.windows import problem_of

EXECUTION: dict[str, Any] = {"execution": True}
"""Marks a field that changes how a run is carried out, not what it learns."""

Reference = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""``package.module:function``, imported from the current folder or the environment."""

Columns = str | tuple[str, ...]

Beta = Annotated[float, Field(ge=0, lt=1)]
"""Share that a running mean keeps of itself at each step."""

Switch = Literal["auto"] | bool
"""``auto``: on where it is safe and pays, which is recorded with the reason."""


LARGEST = 1e30
"""Of rates and decays: far beyond it an update is no number in fp32; where exactly depends on the optimizer."""


def _within_fp32(value: float | None) -> float | None:
    if value is not None and value > LARGEST:
        raise ValueError(f"{value:g} is more than any optimizer can use, at most {LARGEST:g}")
    return value


def _share_or_count(value: float | None) -> float | None:
    if value is not None and value % 1 and not 0 < value < 1:
        raise ValueError(f"{value:g} is neither a share below 1 nor a whole number")
    return value


class Part(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


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
    vocabulary_size: int = Field(8000, ge=100, description="Size of a tokenizer trained on the training texts.")
    train: str = Field(
        "all",
        pattern=r"^(all|head|features|last:[1-9]\d*)$",
        description="all | head | last:K (the head and the last K blocks) | features (embed once, then fit a"
        " scikit-learn classifier).",
    )
    classifier: Literal["logistic", "svm"] = Field("logistic", description="Classifier on top of train: features.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.factory and (self.source or self.config):
            raise ValueError("factory builds the whole model: leave out source and config")
        if not (self.source or self.config or self.factory):
            raise ValueError("no model: set model.source (a Hub name or a folder), model.config or model.factory")
        if self.classifier != "logistic" and self.train != "features":
            raise ValueError(f"classifier: {self.classifier} has no effect without train: features")
        if self.config is not None and not self.source and "model_type" not in self.config:
            raise ValueError("model.config without model.source is a whole configuration and needs model_type")
        return self


class SplitsPart(Part):
    """How rows without a given split are divided: a share below 1, a number of rows from 1, or the rest (null)."""

    train: float | int | None = Field(None, ge=0, description="Null: everything that the others leave.")
    validation: float | int = Field(0.1, ge=0, description="Share or number of rows; 0 for none.")
    test: float | int = Field(0.1, ge=0, description="Share or number of rows; 0 for none.")
    seed: int = Field(0, ge=0, description="Of the split alone, so that runs with other seeds share their splits.")

    _usable = field_validator("train", "validation", "test")(_share_or_count)

    @model_validator(mode="after")
    def _sums(self) -> Self:
        shares = [v for v in (self.train, self.validation, self.test) if v is not None and 0 < v < 1]
        if sum(shares) > 1 + 1e-9 or (self.train is None and abs(sum(shares) - 1) < 1e-9):
            raise ValueError(f"shares add up to {sum(shares):g}, which leaves nothing for the rest")
        return self


class RandomPart(Part):
    """Shapes of ``builtin:random``, for memory and speed runs."""

    samples: int = Field(512, ge=2, description="Number of samples.")
    classes: int = Field(2, ge=1, description="Number of labels.")
    length: int | tuple[int, int] = Field(512, description="Tokens a sequence, or the range they are drawn from.")
    vocabulary: int = Field(30000, ge=200, description="Number of token ids; drawn from 100 up to it.")
    image: tuple[int, int, int] | None = Field(None, description="Height, width, channels: images, not tokens.")


class AugmentPart(Part):
    """Random changes of training images, drawn anew each time an image is seen; 0 or false: none."""

    flip: bool = Field(False, description="Mirror left and right, every second time.")
    crop: int = Field(0, ge=0, description="Shift by up to this many pixels each way; what is uncovered is black.")
    cutout: int = Field(0, ge=0, description="Blank a square of this many pixels a side.")

    @property
    def any(self) -> bool:
        """Whether anything is changed at all."""
        return self.flip or self.crop > 0 or self.cutout > 0


class DataPart(Part):
    """Where the labelled samples are and what their columns mean."""

    source: str = Field(
        "memory",
        description="Path of a csv, tsv, jsonl or json (also .gz), xlsx, parquet or arrow file, of a folder per class"
        " or of what save_to_disk left; hub:NAME; builtin:docstrings, builtin:digits, builtin:random; memory: rows"
        " given from Python.",
    )
    validation: str | None = Field(None, description="A file of its own for validation.")
    test: str | None = Field(None, description="A file of its own for the test.")
    text: str = Field("auto", description="Column of the text; auto finds it by name and prints the guess.")
    pair: str | None = Field("auto", description="Column of the second text of a pair; null for none.")
    label: Columns = Field("auto", description="Column of the label; several 0/1 columns for multi-label.")
    split: str | None = Field("auto", description="Column naming each row's split; null for none.")
    label_separator: str | None = Field(
        None, min_length=1, description="Splits a label cell into several labels (multi-label)."
    )
    encoding: str = Field(
        "auto", description="Encoding of text files, such as gb18030; auto tells it by the bytes and says which."
    )
    delimiter: str = Field(
        "auto", description="What separates the cells of a csv or tsv file, one character; auto looks at the header."
    )
    splits: SplitsPart = SplitsPart()
    max_length: int = Field(512, ge=4, description="Tokens kept of a sample; never more than the model's positions.")
    image_size: int | None = Field(None, ge=8, description="Images are resized to this many pixels a side.")
    on_bad_row: Literal["stop", "skip"] = Field(
        "stop",
        description="skip drops rows that cannot be used, counts them and writes them to a quarantine file.",
    )
    bad_rows_allowed: float = Field(
        0.01, ge=0, le=1, description="With on_bad_row: skip, the share of rows above which the run stops."
    )
    allow_single_class: bool = Field(False, description="Accept data in which every label is the same.")
    augment: AugmentPart = AugmentPart()
    pad_to_multiple_of: int | None = Field(
        None,
        ge=1,
        json_schema_extra=EXECUTION,
        description="Round lengths of padded batches and totals of packed rows up to a multiple of this; null: 1 where"
        " steps are eager, else by the length of the run, so that shapes come again.",
    )
    resident: Switch = Field(
        "auto",
        json_schema_extra=EXECUTION,
        description="Keep all samples on the GPU and gather batches there. auto: when they take at most a tenth of"
        " its memory.",
    )
    random: RandomPart = RandomPart()

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        if value == "auto":
            return value
        try:
            "a".encode(value)
        except (LookupError, ValueError):
            close = difflib.get_close_matches(value.lower().replace("-", "_"), sorted(aliases), n=1)
            hint = f"; did you mean {close[0]}?" if close else "; for example utf-8, gb18030, cp932, cp1252"
            raise ValueError(f"no text encoding {value!r}{hint}") from None
        return value

    @field_validator("delimiter")
    @classmethod
    def _usable_delimiter(cls, value: str) -> str:
        if value != "auto" and (len(value) != 1 or value in '"\r\n\0'):
            hint = "" if value else "; YAML needs quotes around | and #, as in --set 'data.delimiter=\"|\"'"
            raise ValueError(f"one character such as ';' or a tab, or auto; found {value!r}{hint}")
        return value


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


class SchedulePart(Part):
    """The learning rate over the run, as a factor of ``lr``."""

    type: str = Field(
        "linear",
        pattern=r"^(linear|cosine|constant|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description="linear or cosine decay to floor, constant, or module:function(step, total_steps) -> factor.",
    )
    warmup: float | int = Field(
        0.06,
        ge=0,
        description="Linear warm-up from 0: a share of all steps below 1, or a number of steps from 1.",
    )
    floor: float = Field(0.0, ge=0, le=1, description="Factor at the end of a decay.")

    _usable = field_validator("warmup")(_share_or_count)


class GroupPart(Part):
    """Settings of the parameters whose names match; the first group that matches a name takes it."""

    match: str = Field(description="Glob on parameter names, for example '*classifier*'.")
    lr: float | None = Field(None, gt=0, allow_inf_nan=False, description="Null: that of the optimizer.")
    weight_decay: float | None = Field(None, ge=0, description="Null: that of the optimizer.")
    schedule: SchedulePart | None = Field(None, description="As `schedule` below; null: that one.")

    _usable = field_validator("lr", "weight_decay")(_within_fp32)


class OptimizerPart(Part):
    """The update rule and its parameter groups."""

    type: Literal["adamw", "adam", "sgd", "adamw8bit"] = Field(
        "adamw", description="adamw8bit keeps its states in 8 bits; needs a GPU and bitsandbytes or torchao."
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
        description="Null: 0.01 with adamw and adamw8bit, which decay the weights apart from the gradient; else 0.",
    )
    decay_all: bool = Field(False, description="Decay biases and normalisation weights too.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="Of adam and adamw.")
    eps: float = Field(1e-8, gt=0, description="Of adam and adamw.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Of sgd.")
    nesterov: bool = Field(True, description="Of sgd.")
    clip_norm: float | None = Field(1.0, gt=0, description="Largest global gradient norm; null: no clipping.")
    groups: tuple[GroupPart, ...] = Field(
        (), description="Settings for parameters by name; empty: one setting for all."
    )

    _usable = field_validator("lr", "weight_decay")(_within_fp32)

    @property
    def decay(self) -> float:
        """Weight decay of groups that name none."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.type in ("adamw", "adamw8bit") else 0.0

    @property
    def decays(self) -> bool:
        """Whether any weight may decay."""
        return self.decay > 0 or any(group.weight_decay for group in self.groups)

    @model_validator(mode="after")
    def _effect(self) -> Self:
        idle = ("betas", "eps") if self.type == "sgd" else ("momentum", "nesterov")
        # a default written out, as in a run's own recipe, is not a wish
        wished = [name for name in idle if getattr(self, name) != type(self).model_fields[name].default]
        if wished:
            raise ValueError(f"{', '.join(wished)}: has no effect with type: {self.type}")
        if self.type == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum above 0")
        return self

    @model_validator(mode="after")
    def _scaling(self) -> Self:
        by_batch = self.lr_scaling in ("linear", "sqrt")
        if by_batch and self.lr_scaling_base is None:
            raise ValueError(
                f"lr_scaling = {self.lr_scaling} needs lr_scaling_base, the global batch that lr was chosen for;"
                " lr_scaling_base=32, for example"
            )
        if not by_batch and self.lr_scaling_base is not None:
            raise ValueError(f"lr_scaling_base: has no effect with lr_scaling: {self.lr_scaling}")
        if self.lr_scaling == 1:
            raise ValueError("lr_scaling = 1: has no effect; leave it out")
        return self


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
    evaluate_every: Literal["epoch", "never"] | Annotated[int, Field(ge=1)] = Field(
        "epoch", description="An epoch, a number of steps, or never."
    )
    checkpoint_every: Literal["epoch", "never"] | Annotated[int, Field(ge=1)] = Field(
        "epoch", json_schema_extra=EXECUTION, description="An epoch, a number of steps, or never."
    )
    keep_last: int = Field(
        1,
        ge=1,
        json_schema_extra=EXECUTION,
        description="Number of newest checkpoints kept, each with the best of its time.",
    )
    best_metric: str = Field(
        "auto",
        description="auto: accuracy; f1 for multi-label; -loss for regression. A leading '-' means lower is better.",
    )
    save_best: bool = Field(True, description="The saved model is the best evaluated one, not the last.")
    early_stopping: EarlyStoppingPart | None = Field(None, description="Null: the run goes to its end.")

    @model_validator(mode="after")
    def _effect(self) -> Self:
        if self.early_stopping and self.evaluate_every == "never":
            raise ValueError("early_stopping has no effect with evaluate_every: never")
        return self


def _technique(name: str) -> Any:
    """The field of a technique, as the catalogue has it."""
    entry = entry_of(name)
    return Field(entry.default, json_schema_extra=EXECUTION if entry.execution else None, description=entry.description)


class TechniquesPart(Part):
    """One field a technique; see ``paceline techniques``."""

    packing: Switch = _technique("packing")
    early_pooling: Switch = _technique("early_pooling")
    channels_last: Switch = _technique("channels_last")
    fully_connected: Switch = _technique("fully_connected")
    cudnn_benchmark: bool = _technique("cudnn_benchmark")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "pure_bf16"] = _technique("precision")
    fused_qkv: Switch = _technique("fused_qkv")
    fusion: Switch = _technique("fusion")
    embedding_gradient: Switch = _technique("embedding_gradient")
    recompute: bool = _technique("recompute")
    compile: Switch = _technique("compile")
    capture: Switch = _technique("capture")


def _own(name: str) -> Any:
    """The field of a setting that only some strategies have, as the catalogue has it."""
    own = OWN_SETTINGS[name]
    told = f"Of {' and '.join(users_of(own))}: {own.words}"
    return Field(own.default, ge=own.least, json_schema_extra=EXECUTION, description=told)


if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[("auto", *(entry.name for entry in STRATEGIES))]


class ParallelPart(Part):
    """How a run's processes share its work. With one process there is nothing to share: only ``dp`` has a meaning."""

    strategy: StrategyName = Field("auto", json_schema_extra=EXECUTION, description=told_strategies())
    backend: Literal["auto", "nccl", "gloo", "mpi"] = Field(
        "auto",
        json_schema_extra=EXECUTION,
        description="Carries what ranks exchange. auto: nccl between GPUs, gloo between CPUs; mpi where torch has it.",
    )
    reduce_dtype: Literal["fp32", "bf16"] = _own("reduce_dtype")
    bucket_mib: int | None = _own("bucket_mib")
    shard_size: int | None = _own("shard_size")
    offload: bool = _own("offload")

    @model_validator(mode="before")
    @classmethod
    def _without_the_gone(cls, given: Any) -> Any:
        """Recipes that older runs wrote name a setting that changed no result."""
        return {k: v for k, v in given.items() if k != "sum_words"} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _effect(self) -> Self:
        for name, own in OWN_SETTINGS.items():
            users = users_of(own)
            if self.strategy not in ("auto", *users) and getattr(self, name) != own.default:
                told = f"{name}: has no effect with strategy: {self.strategy}"
                raise ValueError(f"{told}; set strategy: {' or '.join(users)}")
        return self


class ObservePart(Part):
    """Who watches the run."""

    console: Literal["auto", "bar", "plain", "off"] = Field(
        "auto", json_schema_extra=EXECUTION, description="auto: a bar on a terminal, plain lines elsewhere."
    )
    log_every: int = Field(10, ge=1, json_schema_extra=EXECUTION, description="Steps between plain console lines.")
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
                raise ValueError(problem)
        return value

    @field_validator("kind", mode="before")
    @classmethod
    def _one_kind(cls, value: object) -> object:
        if isinstance(value, list | tuple) or (isinstance(value, str) and {"kineto", "nsys"} <= set(value.split(","))):
            raise ValueError("one of kineto and nsys: only one of them can listen to a GPU; run once with each")
        return value

    @model_validator(mode="after")
    def _effect(self) -> Self:
        if self.memory and self.kind == "nsys":
            raise ValueError("memory has no effect with kind: nsys; --cuda-memory-usage=true is nsys' own")
        return self
