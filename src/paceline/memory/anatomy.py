"""From what a run allocates to what a GPU will show: the peak, and what it is made of.

What a GPU and its libraries take beside torch's tensors is measured once a kind of GPU, in ``constants.json``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import Gpu
from paceline.memory.expandable import ExpandableAllocator, Stretch
from paceline.memory.ledger import Allocation
from paceline.memory.subject import Subject
from paceline.memory.trace import Trace

MEASURED: Final = "NVIDIA H200"
"""Whose constants stand for those of later GPUs too."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What runs take beside their tensors, on one kind of GPU under one build of torch. Sizes in bytes."""

    source: str
    """Where they come from, for people."""
    context: int
    """What of the GPU's memory is gone before torch's allocator reserves anything: the driver's context, and the code
    of the kernels that a step loads."""
    communicator: int
    """Taken by NCCL beside it, where ranks exchange anything."""
    workspaces: tuple[int, ...]
    """Kept by matrix products from the first on, from the allocator's pool that they compute in: cuBLAS's, one for each
    thread, that of the forward and that of the backward pass."""

    def workspace(self, *, beside: bool) -> int:
        """The workspace of the thread that launches, or of the backward pass's own beside it; 0 where that one has
        none."""
        return self.workspaces[beside] if beside < len(self.workspaces) else 0


def constants_for(gpu: Gpu) -> Constants:
    """Return those of this kind of GPU, or of its generation."""
    shipped = json.loads((files("paceline.memory") / "constants.json").read_text(encoding="utf-8"))
    near = shipped[MEASURED if (gpu.compute_capability or (0, 0)) >= (9, 0) else "older"]
    have = shipped.get(gpu.name)
    source = near["source"] if have is None else have["source"]
    if have is None and near is shipped[MEASURED]:
        source = f"not measured on this GPU: those {source}"
    have = have or near
    return Constants(
        source=source,
        context=have["context"],
        communicator=have["communicator"],
        workspaces=tuple(have["workspaces"]),
    )


KINDS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("attention", ("attention", "softmax", "flash", "efficient", "bmm")),
    ("norms", ("norm",)),
    ("activation functions", ("gelu", "relu", "silu", "tanh", "sigmoid", "hardswish", "mish")),
    ("dropout", ("dropout", "bernoulli")),
    ("embeddings", ("embedding",)),
    ("convolutions", ("convolution", "conv1d", "conv2d", "conv3d")),
    ("pooling", ("pool",)),
    ("linear layers", ("mm", "linear", "addmv", "einsum")),
    ("sums", ("add", "mul", "sub", "div")),
    ("number formats and copies", ("copy", "clone", "cat", "index", "stack", "contiguous", "convert")),
)
"""Kind of layer -> parts of the names of the operators whose results it keeps; the first that fits."""

LEFT_OVER: Final = {"model": "buffers", "preparation": "data", "optimizer": "optimizer states", "batch": "batch"}
"""Phase -> what it leaves behind that has no name of its own."""


PRODUCTS: Final = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation"))
"""Operators that cuBLAS computes."""


def plan_of(trace: Trace, subject: Subject, gpu: Gpu) -> MemoryPlan:
    """Replay the trace through torch's allocator, as ``paceline`` starts it, and look at its fullest moment."""
    allocator, blocks = ExpandableAllocator(), dict[int, Stretch]()
    constants = constants_for(gpu)
    names = _names(trace)
    alive: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    phases: dict[str, int] = {}
    peak, at_peak, kept_at_peak, moment = 0, Counter[str](), Counter[str](), ""
    computing: set[tuple[Hashable, bool]] = set()
    for event in trace.events:
        if event is None:
            allocator.empty_cache()
            continue
        number = event if event >= 0 else ~event
        made = trace.allocations[number]
        if made.operator in PRODUCTS and (made.pool, made.beside) not in computing:
            # the first product of a thread in a pool makes its own, and it stays
            computing.add((made.pool, made.beside))
            if size := constants.workspace(beside=made.beside):
                alive["workspaces"] += size
                allocator.allocate(size, made.pool, made.stream)
        sign = 1 if event >= 0 else -1
        if event >= 0:
            blocks[number] = allocator.allocate(made.num_bytes, made.pool, made.stream)
        else:
            allocator.free(blocks.pop(number))
        alive[names[number]] += sign * made.num_bytes
        if names[number] == "activations":
            kept[kind_of(made.operator)] += sign * made.num_bytes
        if event >= 0:
            phases[made.phase] = max(phases.get(made.phase, 0), allocator.allocated)
            if allocator.allocated > peak:
                peak, moment = allocator.allocated, made.phase
                at_peak, kept_at_peak = alive.copy(), kept.copy()
    at_peak["rounding"] = peak - sum(at_peak.values())
    return MemoryPlan(
        gpu=gpu.name,
        capacity=gpu.memory_bytes,
        allocated=peak,
        reserved=allocator.peak_reserved,
        context=constants.context,
        communicator=constants.communicator if trace.world_size > 1 else 0,
        parts=_ranked(at_peak),
        activations=_ranked(kept_at_peak),
        moment=moment,
        phases=phases,
        samples=trace.samples,
        slots=trace.slots,
        num_parameters=trace.num_parameters,
        num_trained=trace.num_trained,
        assumed=(*subject.assumed, *_attention(trace), f"context and workspaces: {constants.source}"),
        execution=trace.execution,
        decisions=trace.decisions,
        normalises_batches=trace.normalises_batches,
        notices=subject.dataset.notices,
    )


def kind_of(operator: str) -> str:
    """The kind of layer that an operator's result belongs to, such as ``attention``."""
    name = operator.rpartition("::")[2].lower()
    return next((kind for kind, marks in KINDS if any(mark in name for mark in marks)), "other")


def _names(trace: Trace) -> Sequence[str]:
    """What each allocation counts as."""
    freed = {~event for event in trace.events if event is not None and event < 0}
    return [_name(made, number in freed) for number, made in enumerate(trace.allocations)]


def _name(made: Allocation, freed: bool) -> str:
    if made.name:
        return made.name
    if made.phase in ("forward", "evaluation"):
        return "activations"
    if made.phase == "batch":
        return "batch"
    if made.phase == "update" and not freed:
        return "optimizer states"  # made by the first update, as torch's optimizers do
    if not freed and made.phase in LEFT_OVER:
        return LEFT_OVER[made.phase]
    return "passing"


def _ranked(sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sorted(sizes.items(), key=lambda item: -item[1]) if size > 0}


def _attention(trace: Trace) -> tuple[str, ...]:
    # of packed rows the path says it; padded batches, and a last block that is pooled early, ask torch
    kernels = dict.fromkeys(filter(None, [trace.execution.get("attention"), *trace.attention]))
    return (f"attention by {' and '.join(kernels)}",) if kernels else ()
