"""The catalogue: what each technique and each way of splitting a run needs, excludes and preserves.

It is said here alone, without torch. ``recipe.rules`` takes refusals and the choices of ``auto`` from it,
``recipe.parts`` the words and defaults of fields, ``paceline techniques`` its listing, the memory plan the changes that
it suggests, ``evaluate`` and ``predict`` what they leave off, ``scripts/technique_rules.py`` the table on each page.

A technique is one file ``techniques/<name>.py``, one field of ``TechniquesPart``, one page
``docs/techniques/<name>.md``, one parity test ``tests/parity/test_<name>.py`` and one entry here; the architecture
tests hold the five together. The ways of splitting a run over ranks or GPUs are techniques too, of which a run has one
at most: the values of ``parallel.strategy``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from paceline.recipe.entries import OwnSetting, Rule, Saving, TechniqueEntry, Value, value_of, written

STRATEGY = "parallel.strategy"
"""The setting that names the way of splitting a run."""

_NO_STEP = Rule("model.train=features", "no step is made with train: features")
_OWN_KERNELS = Rule("device=cuda", "its kernels are for GPUs")
_NOT_ON_A_CPU = Rule("device=cuda", "not measured to pay on a CPU", only="auto")
_NOT_TRAINED = "no embedding is trained"
_COPIED = "DataParallel copies the model at every pass, and a copy would compute with the first GPU's weights"

CATALOGUE: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "packing",
        "Put the texts of a micro-batch one after the other in one row: no padding, no mask.",
        "layout",
        "up to rounding",
        auto="wherever packed and padded gradients of this model are found equal at the start",
        inference="open",
        memory="nothing is kept of padding; on a GPU each row may have some filler",
    ),
    TechniqueEntry(
        "early_pooling",
        "In the last block compute only the position of each text that the head reads.",
        "layout",
        "up to rounding",
        auto="of packed rows, wherever gradients with and without the other positions are found equal at the start",
        needs=(Rule("techniques.packing=auto|true", "it picks positions out of packed rows", only="asked"),),
        inference="auto",
        memory="the last block keeps keys and values of all positions, and else one position a text",
    ),
    TechniqueEntry(
        "channels_last",
        "Keep images and convolution weights with the channels last in memory.",
        "layout",
        "up to rounding",
        auto="for convolutions on a GPU",
        needs=(_NOT_ON_A_CPU,),
        inference="kept",
        memory="a copy of a batch's images that are not in this order yet",
    ),
    TechniqueEntry(
        "fully_connected",
        "Compute convolutions that put out one pixel as matrix products over the pixels they see.",
        "layout",
        "up to rounding",
        auto="on a GPU",
        needs=(_NOT_ON_A_CPU,),
    ),
    TechniqueEntry(
        "cudnn_benchmark",
        "Try all of cuDNN's kernels for each convolution of a step, and keep the quickest.",
        "numerics",
        "up to rounding",
        needs=(
            Rule("device=cuda", "cuDNN is for GPUs"),
            Rule("deterministic=false", "which kernel is the quickest may differ from start to start"),
        ),
        memory="what the kernels work in, which plans do not count",
    ),
    TechniqueEntry(
        "precision",
        "Compute in tf32, bf16, fp16, or only bf16.",
        "numerics",
        "up to rounding",
        auto="bf16 on GPUs that compute in it, fp32 elsewhere",
        off="fp32",
        # NVIDIA, CUDA programming guide, arithmetic by compute capability: bf16 and tf32 from 8.0, fp16 from 5.3
        values=(
            Value("tf32", (8, 0), "tf32 is a mode of the tensor cores of GPUs and has no effect on a CPU"),
            Value("bf16", (8, 0)),
            Value("fp16", (5, 3), "fp16 with loss scaling is for GPUs: CPUs compute it in software"),
            Value(
                "pure_bf16",
                (8, 0),
                words="weights, gradients and the optimizer's states too",
                preserves="changes the result",
            ),
        ),
        execution=False,
        inference="open",
        memory="bf16 and fp16 keep activations of matrix products in half the bytes, pure_bf16 all there is",
    ),
    TechniqueEntry(
        "fused_qkv",
        "Compute query, key and value of an attention layer in one matrix product.",
        "numerics",
        "up to rounding",
        auto="on a GPU",
        needs=(_NOT_ON_A_CPU,),
        memory="a joined copy of each attention layer's three weights",
    ),
    TechniqueEntry(
        "fusion",
        "Compute bias and GELU, and dropout, residual and LayerNorm, by one kernel each.",
        "numerics",
        "up to rounding",
        auto="on a GPU, in bf16 or fp16",
        takes="fewer passes over memory, and nothing to compile",
        needs=(
            _OWN_KERNELS,
            Rule(
                "techniques.precision=bf16|fp16",
                "its kernels are for autocast: products in bf16 or fp16 beside sums in fp32",
            ),
        ),
        excludes=(_NO_STEP,),
        packages=("triton",),
        capability=(8, 0),
    ),
    TechniqueEntry(
        "embedding_gradient",
        "Add up the gradients of embeddings by kernels of our own.",
        "numerics",
        "up to rounding",
        auto="on a GPU, where the step is not compiled",
        needs=(_OWN_KERNELS, Rule("model.train=all", _NOT_TRAINED, only="auto")),
        excludes=(
            Rule("model.train=head|features", _NOT_TRAINED),
            Rule("parallel.strategy=fsdp", "not measured beside shards", only="auto"),
            Rule("parallel.strategy=dp", _COPIED),
        ),
        packages=("triton",),
    ),
    TechniqueEntry(
        "recompute",
        "Recompute each block's activations in the backward pass instead of keeping them.",
        "memory",
        "bit-exact",
        excludes=(Rule("model.train=head|features", "no block has a backward pass"),),
        memory="of each block only the input is kept",
        # one forward pass more, where a step is worth three: Chen et al., arXiv 1604.06174
        saving=Saving("true", 1 / 3, "up to {slowdown:.0%} slower: one forward pass more"),
    ),
    TechniqueEntry(
        "compile",
        "Compile each block of the model for training.",
        "compile",
        "up to rounding",
        auto="on a GPU, when the run is long enough to win back the seconds of compiling",
        needs=(_NOT_ON_A_CPU,),
        excludes=(_NO_STEP,),
        packages=("triton",),
        memory="fused kernels keep fewer intermediate results",
    ),
    TechniqueEntry(
        "capture",
        "Capture the kernels of a step as CUDA graphs and replay them.",
        "capture",
        "bit-exact",
        auto="on a GPU",
        takes="replayed steps cost the host next to nothing",
        needs=(Rule("device=cuda", "CUDA graphs need a GPU"),),
        excludes=(
            _NO_STEP,
            Rule("parallel.offload=true", "the host waits for what travels between its memory and the GPU"),
            Rule("techniques.recompute=true", "recompute saves and restores the random numbers' state on the host"),
        ),
        room="paceline.engine.capture",
        memory="the graphs keep a pool of their own",
    ),
)
"""Every technique with a field of its own, in the order of application."""

_REDUCE_DTYPE = OwnSetting(
    "reduce_dtype",
    "number format of the gradients' all-reduce; bf16 halves the bytes and rounds each rank's share.",
    default="fp32",
)

STRATEGIES: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "ddp",
        "Every process keeps the model; gradients are summed in one flat buffer, beside the backward pass.",
        "shard",
        "up to rounding",
        auto="where weights, gradients and states fit a GPU",
        off="auto",
        excludes=(_NO_STEP,),
        memory="every process keeps all weights, gradients and states",
        choice=STRATEGY,
        room="paceline.strategies.ddp.strategy",
        settings=(
            OwnSetting(
                "bucket_mib",
                "MiB of gradients in one all-reduce; null: 192 over NVLink, where many small ones slow the"
                " backward pass down, else 25, which begin early.",
                least=1,
                stays=True,
            ),
            _REDUCE_DTYPE,
        ),
    ),
    TechniqueEntry(
        "fsdp",
        "Every process keeps a shard of each weight, gradient and state; weights are whole while they are used.",
        "shard",
        "up to rounding",
        auto="where weights, gradients and states do not fit a GPU",
        off="auto",
        excludes=(
            _NO_STEP,
            Rule("optimizer.type=adamw8bit", "its states are rounded in blocks that would cross shards"),
            Rule("techniques.channels_last=true", "a shard is cut from a weight in its usual order in memory"),
        ),
        memory="of N processes each keeps 1/N of weights, gradients and states",
        saving=Saving(
            "fsdp", 0.0, "each of {gpus} GPUs has its share of a step, and they exchange weights and gradients"
        ),
        shards=True,
        choice=STRATEGY,
        room="paceline.strategies.fsdp.strategy",
        settings=(
            OwnSetting(
                "shard_size",
                "processes that share one copy of the model, as those of one machine; null: all.",
                least=2,
                chooses=True,
            ),
            OwnSetting(
                "offload",
                "keep shards, their gradients and states in main memory, and update there.",
                default=False,
                chooses=True,
                needs=(Rule("device=cuda", "nothing moves on a CPU, whose memory the weights are in already"),),
            ),
            _REDUCE_DTYPE,
        ),
    ),
    TechniqueEntry(
        "dp",
        "One process splits each batch over all its GPUs by torch's DataParallel: slow, for completeness.",
        "shard",
        "up to rounding",
        off="auto",
        needs=(Rule("device=cuda", "it splits each batch over several GPUs"),),
        excludes=(
            _NO_STEP,
            Rule("techniques.packing=true", "a packed row cannot be split over several GPUs"),
            Rule("techniques.early_pooling=true", "it needs packed rows, which cannot be split", only="asked"),
            Rule("techniques.cudnn_benchmark=true", "torch keeps cuDNN's kernels for each GPU's thread by itself"),
            *(
                Rule(f"techniques.{name}=true", _COPIED)
                for name in ("fully_connected", "fused_qkv", "fusion", "recompute", "compile", "capture")
            ),
        ),
        memory="every GPU keeps all weights; the first also has states once and gradients three times",
        choice=STRATEGY,
        room="paceline.strategies.dp",
        one_process=True,
    ),
)
"""The ways of splitting a run, of which it has one at most."""

ENTRIES = (*CATALOGUE, *STRATEGIES)


def entry_of(name: str) -> TechniqueEntry:
    """The technique or strategy of this name."""
    return next(entry for entry in ENTRIES if entry.name == name)


def one_process(strategy: str) -> bool:
    """Whether one process has all GPUs of a run with this ``parallel.strategy``."""
    return any(entry.one_process for entry in STRATEGIES if entry.name == strategy)


def shards(strategy: str) -> bool:
    """Whether each process of a run with this ``parallel.strategy`` keeps a shard of the weights."""
    return any(entry.shards for entry in STRATEGIES if entry.name == strategy)


def told_strategies() -> str:
    """The description of ``parallel.strategy``."""
    each = [f"{one.name}: {one.summary[0].lower()}{one.summary[1:]}" for one in STRATEGIES]
    auto = "; ".join(f"{one.name} {one.auto}" for one in STRATEGIES if one.auto)
    return f"{' '.join(each)} auto: {auto}."


OWN_SETTINGS = {own.name: own for entry in STRATEGIES for own in entry.settings}
"""By name, the fields of ``parallel`` that have an effect with some strategies only."""


def users_of(own: OwnSetting) -> tuple[str, ...]:
    """The strategies with which a setting has an effect."""
    return tuple(entry.name for entry in STRATEGIES if own in entry.settings)


@cache
def exclusions(entry: TechniqueEntry) -> tuple[Rule, ...]:
    """What cannot be beside a technique: by the rules of its own entry, then by those of others about it.

    What an entry has for ``auto`` alone is about a technique that is left open, which a strategy in use is not.
    """
    theirs = (
        replace(rule, condition=f"{other.setting}={other.on}")
        for other in ENTRIES
        for rule in other.excludes
        if rule.path == entry.setting and entry.on in rule.values and (rule.is_for("asked") or other.choice)
    )
    return (*entry.excludes, *theirs)


_INFERENCE = {
    "off": "off",
    "auto": "decided anew",
    "kept": "as in training",
    "open": "as in training; may be set",
}


def told(entry: TechniqueEntry) -> Iterator[tuple[str, str]]:
    """An entry for people, line by line: what the line is of, and its text."""
    yield "preserves", "; ".join([entry.preserves, *(f"{value} changes the result" for value in entry.changing)])
    if entry.auto:
        yield "auto", entry.auto
    for words, rules in (("without", entry.needs), ("with", exclusions(entry))):
        yield from (
            ("auto", f"off {words} {line}") for line in _by_reason(rule for rule in rules if rule.only == "auto")
        )
    yield from (("needs", line) for line in _by_reason(rule for rule in entry.needs if rule.is_for("asked")))
    yield from (("needs", f"{package}, on a GPU") for package in entry.packages)
    if entry.capability is not None:
        yield "needs", capable(entry.capability)
    for value in entry.values:
        yield "needs", f"{value.name}: {capable(value.capability)}{'' if value.gpus_only else ', or a CPU'}"
    yield from (("excludes", line) for line in _by_reason(rule for rule in exclusions(entry) if rule.is_for("asked")))
    for own in entry.settings:
        yield "settings", "; needs ".join([own.setting, *_by_reason(own.needs)])
    yield "inference", _INFERENCE[entry.inference]
    if entry.memory:
        yield "memory", entry.memory


def _by_reason(rules: Iterable[Rule]) -> list[str]:
    """The conditions of each reason, and the reason."""
    conditions: dict[str, list[str]] = {}
    for rule in rules:
        conditions.setdefault(rule.why, []).append(rule.condition)
    return [f"{', '.join(found)}: {why}" for why, found in conditions.items()]


def capable(capability: tuple[int, int]) -> str:
    """A compute capability for people."""
    return "a GPU of compute capability {}.{} or above".format(*capability)


def opened(recipe: object) -> tuple[str, ...]:
    """Settings that leave open again what is on and may have been switched on by ``auto``."""
    entries = [entry for entry in CATALOGUE if entry.auto and value_of(recipe, entry.setting) is True]
    # shards may have been the only way that the model fits
    entries += [entry for entry in STRATEGIES if entry.auto and not entry.shards and entry.is_on(recipe)]
    return tuple(f"{entry.setting}=auto" for entry in entries)


def settings_for_inference() -> tuple[str, ...]:
    """What ``evaluate`` and ``predict`` set, whatever a model was trained with."""
    off = [f"{entry.setting}={written(entry.off)}" for entry in ENTRIES if entry.inference == "off"]
    anew = [f"{entry.setting}=auto" for entry in CATALOGUE if entry.inference == "auto"]
    return tuple(dict.fromkeys([*off, *anew]))  # strategies share one setting
