"""Memory as it was predicted beside memory as it was measured: two charts, and the figures next to one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from paceline.contract.records import MemoryPlan, MemoryRecord
from paceline.observe.formats import difference, size
from paceline.report.bars import Bar, Piece, bar_chart

PARTS = {
    "parameters": 6,
    "gradients": 7,
    "optimizer states": 3,
    "average": 13,
    "data": 1,
    "batch": 1,
    "activations": 2,
    "passing": 4,
    "workspaces": 5,
    "buffers": 8,
    "rounding": 9,
}
"""Colours of the style sheet, by what a plan calls its parts; in the order of a bar, what stays before what passes."""
OTHER, UNUSED, OUTSIDE, ALLOCATED, KIND, NCCL = 8, 0, 10, 11, 2, 12


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A line of the table."""

    name: str
    predicted: str
    measured: str
    difference: str
    """By how much the prediction is off, in percent of what was measured."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What the section shows; without a plan, most is empty."""

    bars: tuple[Bar, ...]
    """Predicted and measured, or the latter alone."""
    charts: tuple[Markup, ...]
    figures: tuple[Figure, ...]
    peak: str
    """When that is, and of which micro-batch."""
    facts: tuple[str, ...]
    """Sentences: the highest of each phase, and what was assumed."""
    problem: str


def memory(record: MemoryRecord) -> Memory:
    """The section about a run's memory."""
    plan, bars = record.plan, _bars(record)
    unit, unit_name = unit_of(record.total)
    charts = [bar_chart("Of the GPU's memory", bars, height=56, unit=unit, unit_name=unit_name, write=size)]
    if plan:
        charts.append(_activations(plan))
    return Memory(
        bars=bars,
        charts=tuple(chart for chart in charts if chart),
        figures=tuple(_figures(plan, record)) if plan else (),
        peak=_peak(plan) if plan else "",
        facts=tuple(_facts(plan)) if plan else (),
        problem=record.problem,
    )


def _bars(record: MemoryRecord) -> tuple[Bar, ...]:
    unused, outside = "reserved, unused", "context"
    measured = bar(
        "measured",
        ("allocated", record.allocated, ALLOCATED),
        (unused, record.reserved - record.allocated, UNUSED),
        (f"{outside} and other programs", record.total - record.reserved, OUTSIDE),
    )
    plan = record.plan
    if plan is None:
        return (measured,)
    predicted = bar(
        "predicted",
        *((name, plan.parts[name], PARTS.get(name, OTHER)) for name in sorted(plan.parts, key=_place)),
        (unused, plan.reserved - plan.allocated, UNUSED),
        (outside, plan.context, OUTSIDE),
        ("NCCL", plan.communicator, NCCL),
    )
    return predicted, measured


def bar(name: str, *pieces: tuple[str, int, int]) -> Bar:
    """A bar of those (name, bytes, colour) that there are."""
    there = [Piece(name=piece, value=value, colour=colour) for piece, value, colour in pieces if value > 0]
    return Bar(name=name, pieces=there)


def _place(part: str) -> int:
    """Where it stands in a bar; what a plan may name some day comes last."""
    return list(PARTS).index(part) if part in PARTS else len(PARTS)


def _activations(plan: MemoryPlan) -> Markup:
    bars = [
        bar(kind, (kind, value, KIND)) for kind, value in sorted(plan.activations.items(), key=lambda item: -item[1])
    ]
    unit, unit_name = unit_of(max(plan.activations.values(), default=0))
    title = "Activations at the peak, by kind of layer"
    return bar_chart(title, bars, height=16, unit=unit, unit_name=unit_name, write=size)


def unit_of(largest: float) -> tuple[float, str]:
    """Bytes of the unit that ``largest`` is written in, and its name."""
    name = size(largest).split(" ")[1]
    return 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(name), name


def _figures(plan: MemoryPlan, record: MemoryRecord) -> Iterator[Figure]:
    rows = (
        ("allocated", plan.allocated, record.allocated),
        ("reserved", plan.reserved, record.reserved),
        ("context, NCCL, with other programs", plan.outside, record.total - record.reserved),
        ("on the GPU", plan.total, record.total),
    )
    for name, predicted, measured in rows:
        yield Figure(
            name=name,
            predicted=size(predicted),
            measured=size(measured),
            difference=difference(predicted, measured),
        )


def _peak(plan: MemoryPlan) -> str:
    positions = f", {plan.slots:,} positions" if plan.slots != plan.samples else ""
    samples = f"{plan.samples:,} sample{'s' * (plan.samples != 1)}"
    return f"Peak: {plan.moment}. Largest micro-batch: {samples}{positions}."


def _facts(plan: MemoryPlan) -> Iterator[str]:
    if plan.capacity:
        yield f"{size(plan.total)} of the {size(plan.capacity)} of {plan.gpu}, {plan.total / plan.capacity:.0%}"
    if plan.phases:
        yield "highest in each phase: " + ", ".join(f"{phase} {size(most)}" for phase, most in plan.phases.items())
    yield from plan.assumed
