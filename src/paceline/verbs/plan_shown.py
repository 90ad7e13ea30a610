"""A plan as people read it, on a terminal, in pipes and in files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.contract.records import MemoryPlan
from paceline.memory.search import LargestMicroBatch
from paceline.observe.formats import amount, printable, share
from paceline.recipe.choose import num_processes
from paceline.recipe.techniques import one_process
from paceline.verbs.plan import Plan, model_name, typed

GIB: Final = 2**30
MIB: Final = 2**20

SHOWN_CHANGES: Final = 3

SMALL_SHARE: Final = 0.001
"""Share of the peak; smaller parts are shown together."""

MOMENTS: Final = {
    "model": "when the model is loaded",
    "preparation": "in the checks before the first step",
    "optimizer": "when the optimizer is made",
    "batch": "when a batch is put together",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "update": "in the update",
    "evaluation": "in an evaluation",
}
"""Phase of the run -> when that is, for people."""

Rows = list[tuple[str, str]]
"""Label and value; either may be empty."""


def shown(plan: Plan) -> str:
    """The plan as plain lines, for pipes and files."""
    lines = []
    for title, rows in sections(plan):
        width = max((len(label) for label, _ in rows), default=0)
        lines += [title, *(f"  {label:<{width}}  {value}".rstrip() for label, value in rows), ""]
    return "\n".join(lines)


def draw(plan: Plan, console: Console) -> None:
    """The plan on a terminal: long lines are folded beside their labels."""
    colour = {True: "bold green", False: "bold red", None: "bold"}[plan.fits]
    for title, rows in sections(plan):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for label, value in rows:
            grid.add_row(Text(f"  {label}", "dim"), Text(value))
        console.print(Text(title, colour if title == verdict(plan) else "bold"), grid, Text())


def sections(plan: Plan) -> Iterator[tuple[str, Rows]]:
    """Titles, and what stands below them."""
    memory = plan.memory
    yield f"{printable(plan.recipe.name)} on {_gpus(plan)}", list(_headline(plan))
    yield f"alive at the peak, {MOMENTS.get(memory.moment, memory.moment)}", list(_anatomy(memory))
    yield verdict(plan), list(_on_the_gpu(plan))
    if plan.largest is not None:
        yield "largest micro-batch that fits", _largest_told(plan, plan.largest)
    if plan.fits is False:
        yield "what would make it fit, the cheapest first", list(_changes_told(plan))
    yield "what train would choose there", list(_chosen(plan))
    if memory.notices:
        yield "notices of the data", [("", printable(notice)) for notice in memory.notices]
    yield "the textbook, and what is taken for granted", list(_beside(plan))


def verdict(plan: Plan) -> str:
    """Whether it fits, in a line."""
    if plan.spare_bytes is None:
        return "whether it fits is not known: the memory of this GPU is not"
    return f"fits, with {gib(plan.spare_bytes)} to spare" if plan.fits else f"does not fit, by {gib(-plan.spare_bytes)}"


def gib(num_bytes: int, beside: int = 0, width: int = 0) -> str:
    """Bytes as people compare them: ``12.34 GiB``; in MiB where they and what they stand ``beside`` are less than 1."""
    unit, name = (GIB, "GiB") if max(num_bytes, beside) >= GIB else (MIB, "MiB")
    return f"{num_bytes / unit:{width},.2f} {name}"


def _headline(plan: Plan) -> Iterator[tuple[str, str]]:
    memory, loop = plan.memory, plan.recipe.loop
    parameters, trained = amount(memory.num_parameters), amount(memory.num_trained)
    of = f"{parameters} parameters, all trained" if trained == parameters else f"{trained} of {parameters} trained"
    yield "model", f"{printable(model_name(plan.recipe))}: {of}"
    positions = "" if memory.slots == memory.samples else f", {memory.slots:,} token positions"
    if plan.recipe.model.train == "features":
        yield "batch", f"{memory.samples:,} samples that go through the model at once{positions}"
        yield "step", f"none: {plan.recipe.techniques.precision}, without gradients"
        return
    yield "micro-batch", f"{memory.samples:,} of the global batch of {loop.batch_size:,} samples{positions}"
    yield "step", f"{plan.recipe.techniques.precision}, {plan.recipe.optimizer.type}"


def _anatomy(memory: MemoryPlan) -> Iterator[tuple[str, str]]:
    told, least = 0, SMALL_SHARE * memory.allocated

    def row(num_bytes: int) -> str:
        return f"{gib(num_bytes, memory.allocated, 8)}  {share(num_bytes / max(memory.allocated, 1)):>6}"

    for name, num_bytes in memory.parts.items():
        if num_bytes < least:
            continue
        told += num_bytes
        yield name, row(num_bytes)
        if name == "activations":
            for kind, part in memory.activations.items():
                if part >= least:
                    yield f"  {kind}", row(part)
    if memory.allocated - told >= least:
        yield "all else", row(memory.allocated - told)
    yield "allocated", row(memory.allocated)
    highest = [f"{phase} {gib(num_bytes, memory.allocated)}" for phase, num_bytes in memory.phases.items()]
    yield "by phase", f"at most: {', '.join(highest)}"


def _on_the_gpu(plan: Plan) -> Iterator[tuple[str, str]]:
    memory = plan.memory
    for name, num_bytes, remark in (
        ("allocated", memory.allocated, "by tensors, at the peak"),
        ("reserved", memory.reserved, "by torch, which keeps what was freed"),
        ("context", memory.context, "by the driver, code of kernels included"),
        ("NCCL", memory.communicator, "by what carries gradients and weights between ranks"),
        ("total", memory.total, "as nvidia-smi will show it"),
    ):
        if name == "NCCL" and not num_bytes:
            continue
        yield name, f"{gib(num_bytes, memory.total, 9)}  {remark}"
    if memory.capacity is not None and plan.usable_bytes is not None:
        remark = f"{gib(plan.usable_bytes)} counted on: CUDA gives programs up to 2 % less, a plan may be 2 % too low"
        yield "GPU", f"{gib(memory.capacity, width=9)}  {remark}"


def _largest_told(plan: Plan, largest: LargestMicroBatch) -> Rows:
    batch = plan.recipe.loop.batch_size
    if largest.plan is None:
        return [("samples", f"none: not even {largest.too_large:,} of {batch:,} at a time")]
    positions = f", {largest.plan.slots:,} positions" if largest.plan.slots != largest.plan.samples else ""
    told = f"{largest.samples:,} of {batch:,}{positions}, take {gib(largest.plan.total)}"
    if largest.too_large is not None:
        told += f"; {largest.too_large:,} do not fit"
    elif num_processes(plan.recipe, plan.gpus) > 1:
        told += ": a GPU's share of the batch"
    else:
        told += ": the whole batch" if largest.samples == batch else ": all training samples"
    return [("samples", told), *([("set", typed(plan.largest_settings))] if plan.largest_settings else [])]


def _changes_told(plan: Plan) -> Iterator[tuple[str, str]]:
    for number, made in enumerate(plan.changes[:SHOWN_CHANGES], 1):
        change = made.change
        spare = (plan.usable_bytes or 0) - made.plan.total
        then = f"fits, {gib(spare)} to spare" if made.fits else f"still {gib(-spare)} too much"
        yield f"{number}.", typed(change.settings, change.gpus)
        yield "", f"saves {gib(made.saving_bytes)}: {gib(made.plan.total)} in all, {then}"
        yield "", f"{change.speed}; result: {change.preserves}"
    if not any(made.fits for made in plan.changes):
        yield "", "none is enough: a GPU with more memory, shorter texts or smaller images, or a smaller model"


def _chosen(plan: Plan) -> Iterator[tuple[str, str]]:
    for index, decision in enumerate(plan.decisions):
        told = f"{decision.setting} = {decision.value}: {decision.reason}"
        yield "chosen" if index == 0 else "", printable(told)


def _beside(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "formula", f"{gib(plan.formula.total_bytes)} by the {plan.formula.label}"
    for index, text in enumerate(plan.memory.assumed):
        yield "assumed" if index == 0 else "", printable(text)


def _gpus(plan: Plan) -> str:
    name = printable(plan.memory.gpu)
    which = "the first" if one_process(plan.recipe.parallel.strategy) else "one"
    return name if plan.gpus == 1 else f"{which} of {plan.gpus} x {name}"
