"""What a run tells the world: immutable records, and the observers that receive them.

Records flow one way, from the loop to the observers. An observer never holds the loop, the model or the engine.
Numbers in records are plain Python numbers: whoever makes a record has already waited for the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.contract.plain import FORMERLY


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A setting that paceline chose, and why. ``setting`` is the recipe's dotted path."""

    setting: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What truncation takes of the training texts."""

    max_length: int
    texts: float
    """Share of texts that lose tokens."""
    tokens: float
    """Share of all tokens that are lost, special ones counted."""


@dataclass(frozen=True, kw_only=True)
class TextLengths:
    """Lengths of the training texts in tokens, before truncation, special tokens included."""

    max_length: int
    """``data.max_length``, as carried out."""
    median: int
    p95: int
    """95 % of texts are no longer."""
    longest: int
    histogram: tuple[int, ...]
    """Texts by length, in bins of equal width from 0; the last one also takes all that are longer."""
    histogram_end: int
    cut: Cut
    others: tuple[Cut, ...]
    """What other values of ``data.max_length`` would take; empty where nothing is cut."""
    overflow: str = "head"
    """``data.overflow``: what is kept of a text that is longer."""
    windows: int = 1
    """The most windows that a text has."""
    max_windows: int | None = None
    """``data.max_windows``."""


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """The training samples before the first step."""

    labels: Mapping[str, int]
    """Samples by label, the most frequent first, at most 100; empty for regression."""
    lengths: TextLengths | None
    """None for images."""
    vocabulary_size: int | None = None
    """Tokens that the tokenizer knows, those added to it included; None for images."""
    max_positions: int | None = None
    """Tokens of a text that the model takes at most; None: any number, or not known."""
    num_labels: int = 0
    """Labels in all, those that ``labels`` leaves out included; 0 for regression, and in records of older releases."""


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """The run is about to take its first step. ``recipe`` is the resolved recipe as plain data."""

    name: str
    folder: str
    device: str
    """For example ``cpu (2 threads)`` or ``NVIDIA H200``."""
    recipe: Mapping[str, Any]
    decisions: tuple[Decision, ...]
    num_parameters: int
    num_trained_parameters: int
    samples: Mapping[str, int]
    """Number of samples of each split."""
    label_names: tuple[str, ...]
    first_step: int
    """0, or the step that the run resumes after."""
    total_steps: int
    steps_per_epoch: int
    group_names: tuple[str, ...]
    """Names of the optimizer's parameter groups, in the order of ``StepRecord.learning_rates``."""
    data: DataRecord | None = None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer update, delivered a little late: the device was never waited for on its account."""

    step: int
    """Number of this update in the run, from 1."""
    epoch: int
    """Epoch that the update belongs to, from 0."""
    loss: float
    """Mean loss per counted label over the global batch; with class weights, their weighted mean."""
    gradient_norm: float
    """Global norm before clipping, loss scaling removed."""
    learning_rates: tuple[float, ...]
    """One per parameter group, as applied by this update."""
    samples: int
    tokens: int
    """Real tokens (or pixels' images: equal to ``samples``) of the global batch."""
    slots: int
    """Token positions that were computed, padding included; ``1 - tokens / slots`` is the padding share."""
    correct: float | None
    """Number of right predictions in the batch, from the training forward pass; None for regression."""
    counted: int
    """Number of labels of the batch, which the loss was divided by where no class has a weight."""
    skipped: bool
    """True when the gradient was not finite under fp16 loss scaling and nothing was changed."""
    seconds: float
    """Wall time from the previous step's end to this one's; waiting for the device is seen with a delay."""
    peak_bytes: int | None
    """Highest allocated device memory so far, looked at every 50 steps; None on a CPU."""
    loss_scale: float | None = None
    """What fp16 multiplied the loss by in this step; None without loss scaling."""
    zero_share: float | None = None
    """Share of the gradients that are exactly 0 under fp16, those of embeddings left out: what underflows, and what is
    0 by itself, as behind a ReLU. None without loss scaling, and with shards."""
    rank_losses: tuple[float, ...] | None = None
    """Mean loss per label of each rank's own share of the batch, NaN where it has none; ``observe.rank_losses``."""


@dataclass(frozen=True, kw_only=True)
class MetricsRecord:
    """Running loss and accuracy, from the training forward passes of the newest steps: ``observe.metrics_every``."""

    step: int
    """The last of the steps."""
    epoch: int
    steps: int
    """How many steps the means are over; fewer than ``metrics_every`` after a resume."""
    metrics: Mapping[str, float]
    """Means per label: loss, and accuracy but for regression; empty where every step was skipped."""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """What fp16's loss scaling did in a run."""

    lowest: float
    highest: float
    last: float
    """Scale of the last step."""
    skipped: int = 0
    """Steps whose gradients overflowed, so that nothing was changed."""
    counted: int = 0
    """Steps whose gradients that are 0 were counted."""
    zero_share: float | None = None
    """Mean of ``StepRecord.zero_share`` over these; None where none was counted."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One pass over a split without training."""

    split: str
    step: int
    epoch: int
    loss: float
    metrics: Mapping[str, float]
    samples: int
    seconds: float
    confusion: tuple[tuple[int, ...], ...] | None = None
    """Counts [true label][predicted label] for single-label classification of at most 100 classes."""
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    """Loss and accuracy over the training samples since the last evaluation, without a second forward pass."""
    of: str = "weights"
    """What loss, metrics and confusion are of: ``weights``, those that are trained, or ``ema``, their average."""
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Loss and metrics of ``weights`` and of ``ema``; empty where no average is kept."""
    notices: tuple[str, ...] = ()
    """Sentences on the metrics: which are undefined (NaN), or leave classes out, and why."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint was committed to disk."""

    step: int
    folder: str
    num_bytes: int
    seconds: float
    is_best: bool


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something that a person should read: a fallback, a guess, a warning."""

    message: str
    level: str = "info"
    """``info`` or ``warning``."""


@dataclass(frozen=True, kw_only=True)
class TraceRecord:
    """What was read from the trace of a window of steps, at the end of the run."""

    folder: str
    """The window's folder: it holds traces and what they do not say themselves, see ``paceline.tracing``."""
    first_step: int
    last_step: int
    told: str
    """Time budget and verdict, as lines for people; or why there is none."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory that one rank takes on a GPU, predicted without it. All sizes in bytes."""

    gpu: str = field(metadata={FORMERLY: "card"})
    capacity: int | None
    """All of the GPU's memory."""
    allocated: int
    """What ``torch.cuda.max_memory_allocated`` will say."""
    reserved: int
    """What ``torch.cuda.max_memory_reserved`` will say."""
    context: int
    """Taken from the GPU without torch's allocator: the driver's context and the code of kernels."""
    parts: Mapping[str, int]
    """What is alive when ``allocated`` is at its peak, largest first; they add up to it: parameters, gradients,
    optimizer states, data, activations, passing (what lives for an operator or two), workspaces, rounding, ..."""
    activations: Mapping[str, int]
    """The part of that name, by kind of layer."""
    moment: str
    """When that is: forward, backward, update, evaluation, ..."""
    phases: Mapping[str, int]
    """The highest ``allocated`` in each phase of the run."""
    samples: int
    """Samples of the largest micro-batch."""
    slots: int
    """Its token positions, padding and filler included; of images their number."""
    num_parameters: int
    num_trained: int
    assumed: tuple[str, ...]
    """What was taken for granted, for people."""
    execution: Mapping[str, str] = field(metadata={FORMERLY: "path"})
    """How the steps are carried out, see ``RunRecord.execution``."""
    decisions: tuple[Decision, ...] = ()
    communicator: int = 0
    """Taken like ``context`` by NCCL, whose buffers carry what ranks exchange; 0: there is nothing to exchange."""
    normalises_batches: bool = False
    """Whether what becomes of a sample depends on the others of its micro-batch: by batch normalisation."""
    notices: tuple[str, ...] = ()
    """What a run would tell of the data; none where they were not read."""

    @property
    def outside(self) -> int:
        """Taken from the GPU without torch's allocator."""
        return self.context + self.communicator

    @property
    def total(self) -> int:
        """What nvidia-smi will show of this process."""
        return self.reserved + self.outside


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """The memory that a run took on the fullest rank's GPU, and what was predicted of it. All sizes in bytes."""

    allocated: int
    """``torch.cuda.max_memory_allocated``: tensors, at their peak."""
    reserved: int
    """``torch.cuda.max_memory_reserved``: what torch's allocator took for them, cached blocks included."""
    total: int
    """What of the GPU's memory was taken when most was reserved: by contexts and other programs too."""
    plan: MemoryPlan | None = None
    """The prediction for one rank; it knows of no other programs."""
    problem: str = ""
    """Why there is no plan; empty also where none was asked for."""


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """A stage of a run's memory, measured when all work of the stage was done. Sizes in bytes."""

    name: str
    """context, model, checks, optimizer, warm-up, forward, backward, update, steady, evaluation; or passes: forward
    and backward in one, where steps are replayed and nobody can look between the two."""
    allocated: int
    """By tensors, at the end."""
    peak: int
    """By tensors, at the highest."""
    reserved: int
    """By torch's allocator, at the most."""
    in_use: int
    """What of the GPU's memory was taken when most was reserved: also by the driver and the code of kernels, without
    what other programs had taken before."""


@dataclass(frozen=True, kw_only=True)
class MemoryStages:
    """A run's memory on a GPU, stage by stage, and what was predicted. A run that could not go on has fewer stages."""

    settings: tuple[str, ...] = ()
    """What was changed in the recipe: all changes, one after the other."""
    stages: tuple[StageRecord, ...] = ()
    others: int | None = None
    """Bytes that other programs had of the GPU before; None where that is not known, so that ``in_use`` has them."""
    batch_size: int = 0
    micro_batch_size: int = 0
    num_steps: int = 0
    """Steps of the recipe's whole run."""
    step_seconds: float | None = None
    """Mean of some steps that nothing waited in; None where none was made."""
    samples_per_second: float | None = None
    execution: Mapping[str, str] = field(default_factory=dict, metadata={FORMERLY: "path"})
    """See ``RunRecord.execution``."""
    problem: str = ""
    """Why it went no further."""
    traceback: str = ""
    """Where the problem is a bug's."""
    plan: MemoryPlan | None = None
    plan_problem: str = ""
    """Why there is no plan."""

    @property
    def peak(self) -> int:
        """Bytes by tensors, at the highest of all stages."""
        return max((stage.peak for stage in self.stages), default=0)

    @property
    def reserved(self) -> int:
        """Bytes by torch's allocator, at the most."""
        return max((stage.reserved for stage in self.stages), default=0)

    @property
    def context(self) -> int:
        """Bytes by the driver and the code of kernels, at the most."""
        return max((stage.in_use - stage.reserved for stage in self.stages), default=0)

    @property
    def total(self) -> int:
        """Bytes of the GPU, at the most."""
        return max((stage.in_use for stage in self.stages), default=0)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A whole run: what ``paceline.train`` returns and what ``summary.json`` holds."""

    name: str
    folder: str
    status: str
    """``finished``, ``stopped early`` or ``preempted``."""
    steps: int
    applied_steps: int
    """Updates that changed the weights: ``steps`` less those skipped by fp16 loss scaling."""
    epochs: float
    seconds: Mapping[str, float]
    """Wall seconds by phase, which add up to ``total``: start (of the process, on the command line), import, data,
    model, compile, capture, train, evaluate, checkpoint, save, and other for what is none of them."""
    samples_per_second: float
    """Training samples over the seconds spent training, evaluation and saving excluded."""
    tokens_per_second: float
    padding_share: float
    best_step: int | None
    evaluations: tuple[EvaluationRecord, ...]
    final: Mapping[str, Mapping[str, float]]
    """Metrics and loss of the saved model by split, for example ``final["test"]["accuracy"]``."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Label -> the probability above which it is predicted, where that is not one half."""
    peak_bytes: int | None
    decisions: tuple[Decision, ...]
    notices: tuple[str, ...] = ()
    first_update_seconds: float | None = None
    """From the start (of the process, on the command line; of the call, from Python) to the end of the first update
    that this process made; None when it made none."""
    overlapped_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase that threads worked beside the phases of ``seconds``, such as reading data during imports."""
    execution: Mapping[str, str] = field(default_factory=dict, metadata={FORMERLY: "path"})
    """How the steps are carried out, a word or reason a stage: layout, attention, compile, capture, data."""
    memory: MemoryRecord | None = None
    """None on a CPU."""
    data: DataRecord | None = None
    """None in summaries of older releases."""
    baseline: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics by split as ``final`` has them, of ``observe.baseline``; empty without one."""
    saved_step: int | None = None
    """Step of the saved model; None in summaries of older releases."""
    saved: str = "weights"
    """What the saved model is made of: ``weights``, those that were trained, or ``ema``, their average."""
    final_scores: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    """By split, ``EvaluationRecord.scores`` of the saved step; empty where no average is kept."""
    loss_scaling: LossScaling | None = None
    """None without fp16."""


Record = (
    RunStarted | StepRecord | MetricsRecord | EvaluationRecord | CheckpointRecord | Notice | TraceRecord | RunRecord
)


class Observer(ABC):
    """Receives every record of a run, in order, on one thread."""

    @abstractmethod
    def observe(self, record: Record) -> None:
        """Take note of ``record``; kinds an observer does not know are ignored by it."""

    @abstractmethod
    def close(self) -> None:
        """Release files and the terminal; called once, also when the run failed."""
