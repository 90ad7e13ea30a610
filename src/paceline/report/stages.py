"""The memory of a run stage by stage as a page: a bar a stage, stacked, and the figures beside the prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from paceline._version import __version__
from paceline.contract.records import MemoryStages, StageRecord
from paceline.observe.formats import difference, duration, rate, size
from paceline.report.bars import Bar, Piece, bar_chart
from paceline.report.memory import bar, unit_of
from paceline.report.page import page_of

LABELS: Final = {
    "context": "context",
    "model": "model",
    "checks": "data and checks",
    "optimizer": "optimizer",
    "warm-up": "warm-up",
    "forward": "first forward",
    "backward": "first backward",
    "passes": "first passes, replayed",
    "update": "first update",
    "steady": "steady steps",
    "evaluation": "evaluation",
}
"""Stage -> what it is called."""

PREDICTED: Final = {
    "model": ("model",),
    "optimizer": ("optimizer",),
    "warm-up": ("forward", "backward"),
    "forward": ("forward",),
    "backward": ("backward",),
    "update": ("update",),
    "steady": ("forward", "backward", "update"),
    "evaluation": ("evaluation",),
}
"""Stage -> phases of a plan, the highest of which it is compared with."""

KEPT, PASSING, UNUSED, OUTSIDE = 6, 2, 0, 10
"""Colours of the style sheet."""

MADE_LATE: Final = 0.005
"""Share of the plan's peak: where the first update leaves more behind, that is the optimizer's states."""


@dataclass(frozen=True)
class Row:
    """A stage beside the stage before, and beside the plan. Sizes in bytes."""

    stage: StageRecord
    added: int
    """To what is in use of the GPU."""
    predicted: int | None
    """The predicted peak, see ``predicted``."""

    @property
    def name(self) -> str:
        """For people."""
        return LABELS.get(self.stage.name, self.stage.name)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a table: its name, and figures as text."""

    name: str
    figures: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rung:
    """What the page shows of one recipe."""

    title: str
    chart: Markup
    keys: tuple[Piece, ...]
    """The chart's legend: names and colours of its pieces, and what they came to at the highest."""
    stages: tuple[Line, ...]
    highest: tuple[Line, ...]
    speed: str
    problem: str
    plan_problem: str


def stages_page(name: str, gpu: str, ladder: Sequence[MemoryStages]) -> str:
    """One HTML file that stands alone, see ``page_of``."""
    rungs = [_rung(stages) for stages in ladder]
    return page_of("stages.html", {"name": name, "gpu": gpu, "rungs": rungs, "version": __version__})


def predicted(measured: MemoryStages, stage: StageRecord) -> int | None:
    """The peak in bytes that the plan has for a stage; None where it has none that is of the same thing.

    A plan's phases are the highest of the whole run. So they say nothing of first passes where the first update makes
    the optimizer's states, which later passes stand beside; nothing of steps that are replayed, whose memory was taken
    while they were captured; and nothing of checks that are not the run's peak, which a plan may leave out.
    """
    plan = measured.plan
    if plan is None:
        return None
    if stage.name == "checks":
        return plan.phases.get("preparation") if plan.moment == "preparation" else None
    ends = {each.name: each.allocated for each in measured.stages}
    replayed = "passes" in ends or measured.execution.get("steps", "").startswith("captured")
    late = ends.get("update", 0) - ends.get("backward", 0) > MADE_LATE * plan.allocated
    if (
        (stage.name == "warm-up" and not replayed)
        or (stage.name in ("forward", "backward", "steady") and replayed)
        or (stage.name in ("forward", "backward") and late)
    ):
        return None
    phases = [plan.phases[phase] for phase in PREDICTED.get(stage.name, ()) if phase in plan.phases]
    return max(phases, default=None)


def rows(measured: MemoryStages) -> Iterator[Row]:
    """The stages in order."""
    before = 0
    for stage in measured.stages:
        yield Row(stage, stage.in_use - before, predicted(measured, stage))
        before = stage.in_use


def highest(measured: MemoryStages) -> Iterator[tuple[str, int, int | None]]:
    """Name, bytes measured and bytes predicted of what a GPU has at the most."""
    plan, most = measured.plan, (measured.peak, measured.reserved, measured.context, measured.total)
    figures = (plan.allocated, plan.reserved, plan.outside, plan.total) if plan else (None,) * 4
    names = ("allocated by tensors", "reserved by torch", "context and kernels", "on the GPU")
    yield from zip(names, most, figures, strict=True)


def speed(measured: MemoryStages) -> str:
    """How fast the steady steps were; empty where none was made."""
    if measured.step_seconds is None or measured.samples_per_second is None:
        return ""
    whole = duration(measured.num_steps * measured.step_seconds)
    return (
        f"{1000 * measured.step_seconds:.1f} ms a step, {rate(measured.samples_per_second)} samples/s;"
        f" the recipe's {measured.num_steps:,} steps would take {whole}"
    )


def described(settings: Sequence[str]) -> str:
    """What these settings make of a recipe."""
    return f"with {' '.join(settings)}" if settings else "as it is"


def _rung(stages: MemoryStages) -> Rung:
    bars = [_bar(stage) for stage in stages.stages]
    if stages.plan is not None and bars:
        plan = stages.plan
        bars.append(
            bar(
                "plan",
                ("held and passing", plan.allocated, PASSING),
                ("reserved, unused", plan.reserved - plan.allocated, UNUSED),
                ("context and kernels", plan.outside, OUTSIDE),
            )
        )
    fullest = max(stages.stages, key=lambda stage: stage.in_use, default=None)
    unit, unit_name = unit_of(max(stages.total, stages.plan.total if stages.plan else 0))
    chart = bar_chart("Of the GPU's memory", bars, height=18, unit=unit, unit_name=unit_name, write=size)
    return Rung(
        title=described(stages.settings),
        chart=chart,
        keys=tuple(_bar(fullest).pieces) if fullest and chart else (),
        stages=tuple(_lines(stages)),
        highest=tuple(_highest(stages)) if stages.stages else (),
        speed=speed(stages),
        problem="; ".join(map(str.strip, stages.problem.splitlines())),
        plan_problem=stages.plan_problem,
    )


def _bar(stage: StageRecord) -> Bar:
    return bar(
        LABELS.get(stage.name, stage.name),
        ("held at the end", stage.allocated, KEPT),
        ("passing", stage.peak - stage.allocated, PASSING),
        ("reserved, unused", stage.reserved - stage.peak, UNUSED),
        ("context and kernels", stage.in_use - stage.reserved, OUTSIDE),
    )


def _lines(stages: MemoryStages) -> Iterator[Line]:
    for row in rows(stages):
        stage = row.stage
        sizes = (size(stage.in_use), signed(row.added, size), size(stage.allocated), size(stage.peak))
        yield Line(name=row.name, figures=(*sizes, *_beside(row.predicted, stage.peak)))


def _highest(stages: MemoryStages) -> Iterator[Line]:
    for name, measured, figure in highest(stages):
        yield Line(name=name, figures=(size(measured), *_beside(figure, measured)))


def _beside(figure: int | None, measured: int) -> tuple[str, str]:
    return ("", "") if figure is None else (size(figure), difference(figure, measured))


def signed(num_bytes: int, write: Callable[[int], str]) -> str:
    """The size with its sign: ``+1.25 GiB``."""
    return f"{'-' if num_bytes < 0 else '+'}{write(abs(num_bytes))}"
