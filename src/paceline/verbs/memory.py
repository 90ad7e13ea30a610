"""``paceline memory``: what each stage of a run adds on a GPU, measured, beside what ``plan`` predicts."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from paceline.contract.errors import PacelineError, RecipeError, UserError, excerpt
from paceline.contract.plain import FORMERLY, plain
from paceline.contract.records import MemoryPlan, MemoryStages, StageRecord
from paceline.machine.facts import Facts, Gpu, this_machine
from paceline.memory.measure import measure, taken_by_others
from paceline.memory.predict import PlanFailed, Predictor
from paceline.observe.formats import columns, difference, printable, rate
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.techniques import one_process
from paceline.report.page import write_found
from paceline.report.stages import LABELS, described, highest, rows, signed, speed, stages_page
from paceline.verbs.plan_shown import gib

Trace = Callable[[Recipe], MemoryPlan]
"""What a chosen recipe is predicted to take, see ``Predictor.plan``."""

Measure = Callable[[Recipe, Callable[[StageRecord], None]], MemoryStages]
"""What it took, see ``measure.measure``."""

HEADINGS: Final = ("on the GPU", "added", "allocated", "peak", "predicted", "difference")


class NothingMeasured(PacelineError):
    """No stage could be measured, through a bug; holds its traceback."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The memory of a recipe on this machine's GPU, and of the recipe with changes."""

    name: str
    gpu: str = field(metadata={FORMERLY: "card"})
    ladder: tuple[MemoryStages, ...]
    """First the recipe as it is; each further one has one change, or several, more than the one before."""

    def plain(self) -> dict[str, Any]:
        """Nested plain data, sizes in bytes: what ``--json`` prints."""
        return {**plain(self), "ladder": [_plain(found) for found in self.ladder]}


def memory(
    recipe: Recipe,
    changes: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Anatomy:
    """Measure, stage by stage, what a run's first steps take of this machine's first GPU, beside the prediction.

    Each rung of the ladder is measured in a process of its own. What cannot run, or runs out of memory, says why, and
    the others go on.

    Args:
        recipe: the run, the ladder's first rung.
        changes: a further rung each: settings, blanks between them, that are added to all before.
        out: a folder for memory.json and report.html.
        progress: told what is going on, each time that it takes seconds.

    Raises:
        RecipeError: a change that is none, or a recipe that is not for a GPU.
        UserError: there is no GPU; or nothing at all could be measured.
    """
    rungs = ladder(recipe, changes)
    here = this_machine()
    for _, rung in rungs:
        _refuse(rung, here)
    gpu = here.gpus[0]
    with Predictor() as predictor:

        def trace(chosen: Recipe) -> MemoryPlan:
            return predictor.plan(chosen, gpu, read_data=True)

        def on_gpu(chosen: Recipe, heard: Callable[[StageRecord], None]) -> MemoryStages:
            return measure(chosen, others=taken_by_others(gpu), heard=heard)

        found = measured(rungs, gpu, here, on_gpu, trace, progress=progress)
    if out is not None:
        write(found, Path(out))
    return found


def ladder(recipe: Recipe, changes: Sequence[str]) -> list[tuple[tuple[str, ...], Recipe]]:
    """The recipe as it is, and with each change in addition to those before; settings and recipe of each rung.

    Raises:
        RecipeError: a change that is no setting of a recipe.
    """
    settings, rungs = tuple[str, ...](), [(tuple[str, ...](), recipe)]
    for change in changes:
        try:
            parts = shlex.split(change)
        except ValueError:
            parts = []
        if not parts or not all("=" in part for part in parts):
            why = "it is one setting or more, key=value, with blanks between them"
            raise RecipeError(f"--with {excerpt(change)}", why, "--with techniques.recompute=true")
        settings = (*settings, *parts)
        rungs.append((settings, recipe.with_settings(settings)))
    return rungs


def measured(
    rungs: Sequence[tuple[tuple[str, ...], Recipe]],
    gpu: Gpu,
    here: Facts,
    measure: Measure,
    trace: Trace,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Anatomy:
    """The ladder, rung by rung, as ``measure`` and ``trace`` find it.

    Raises:
        UserError: no stage of any rung could be measured.
        NothingMeasured: the same, through a bug.
    """
    found: list[MemoryStages] = []
    for settings, recipe in rungs:
        what = described(settings)

        def heard(stage: StageRecord, what: str = what) -> None:
            progress(f"measuring {what}: {LABELS.get(stage.name, stage.name)} done")

        try:
            chosen, _ = choose(recipe, here)
        except UserError as error:
            problem = MemoryStages(problem=str(error), batch_size=recipe.loop.batch_size)
            found.append(replace(problem, settings=settings))
            continue
        progress(f"measuring {what}")
        stages = replace(measure(chosen, heard), settings=settings)
        progress(f"predicting {what}")
        try:
            stages = replace(stages, plan=trace(chosen))
        except (UserError, PlanFailed) as error:
            # a bug's message is a traceback: its last line says what
            told = error.what if isinstance(error, UserError) else str(error).strip().rpartition("\n")[2]
            stages = replace(stages, plan_problem=told)
        found.append(stages)
    if not any(one.stages for one in found):
        first = found[0]
        raise NothingMeasured(f"{first.problem}\n{first.traceback}") if first.traceback else UserError(first.problem)
    return Anatomy(name=rungs[0][1].name, gpu=gpu.name, ladder=tuple(found))


def write(found: Anatomy, folder: Path) -> None:
    """memory.json and report.html; those of an earlier measurement are replaced.

    Raises:
        DiskFullError: no room.
        UserError: the folder cannot be written to.
    """
    write_found(folder, "memory.json", found.plain(), stages_page(found.name, found.gpu, found.ladder))


def shown(found: Anatomy) -> str:
    """The ladder as plain lines."""
    lines = [f"{printable(found.name)} on {printable(found.gpu)}, stage by stage", ""]
    for stages in found.ladder:
        lines += [*_rung(stages), ""]
    if len(found.ladder) > 1:
        lines += ["side by side", *_table(_side_by_side(found))]
    return "\n".join(lines).rstrip("\n") + "\n"


def _refuse(recipe: Recipe, here: Facts) -> None:
    """What no GPU here can measure."""
    plans = "paceline plan RECIPE --gpu h200 predicts it without a GPU"
    if recipe.device == "cpu":
        raise RecipeError("device = cpu", "it is a GPU's memory that is measured, and this run uses none", plans)
    if here.cuda_problem:
        raise UserError("there is no GPU to measure on", here.cuda_problem, plans)
    if recipe.model.train == "features":
        raise RecipeError("model.train = features", "no step is made, so there are no stages", "--set model.train=all")
    if one_process(recipe.parallel.strategy):
        why = "one GPU is measured, and it shares the work among several"
        raise RecipeError(f"parallel.strategy = {recipe.parallel.strategy}", why, "--set parallel.strategy=auto")
    if recipe.data.source == "memory":
        raise RecipeError("data.source: missing", "there are no rows to take steps on", "--data FILE")


def _rung(stages: MemoryStages) -> Iterator[str]:
    pieces = -(-stages.batch_size // stages.micro_batch_size) if stages.micro_batch_size else 0
    micro = f": {pieces} micro-batches of {stages.micro_batch_size}" if pieces > 1 else ""
    yield f"{described(stages.settings)} ({stages.batch_size} samples a step{micro})"
    if stages.stages:
        yield from _table(_stage_rows(stages))
        yield ""
        yield from _table(_figures(stages))
    if told := speed(stages):
        yield f"  speed: {told}"
    if stages.others:
        yield f"  left out: {gib(stages.others)} that other programs had of the GPU before"
    if stages.others is None and stages.stages:
        yield "  the GPU's figures hold what other programs have of it: nvidia-smi did not tell"
    for title, problem in (("stopped", stages.problem), ("not predicted", stages.plan_problem)):
        first, *others = problem.splitlines() or [""]
        if first:
            yield f"  {title}: {printable(first)}"
            yield from (f"  {printable(line)}" for line in others)


def _stage_rows(stages: MemoryStages) -> Iterator[Sequence[str]]:
    yield ("", *HEADINGS)
    write = functools.partial(gib, beside=stages.total)
    for row in rows(stages):
        stage, figure = row.stage, row.predicted
        yield (
            row.name,
            write(stage.in_use),
            signed(row.added, write),
            write(stage.allocated),
            write(stage.peak),
            *(() if figure is None else (write(figure), difference(figure, stage.peak))),
        )


def _figures(stages: MemoryStages) -> Iterator[Sequence[str]]:
    unit = stages.total
    yield ("at the highest", "measured", *(("predicted", "difference") if stages.plan else ()))
    for name, measured, figure in highest(stages):
        beside = () if figure is None else (gib(figure, unit), difference(figure, measured))
        yield (name, gib(measured, unit), *beside)


def _side_by_side(found: Anatomy) -> Iterator[Sequence[str]]:
    yield ("", "peak", "predicted", "on the GPU", "predicted", "ms a step", "samples/s", "")
    unit = max(stages.total for stages in found.ladder)
    before = 0
    for stages in found.ladder:
        # what is new in this rung
        name = "as it is" if not stages.settings else f"+ {' '.join(stages.settings[before:])}"
        before = len(stages.settings)
        plan = stages.plan
        yield (
            printable(name),
            gib(stages.peak, unit) if stages.stages else "",
            gib(plan.allocated, unit) if plan else "",
            gib(stages.total, unit) if stages.stages else "",
            gib(plan.total, unit) if plan else "",
            f"{1000 * stages.step_seconds:.1f}" if stages.step_seconds else "",
            rate(stages.samples_per_second) if stages.samples_per_second else "",
            printable(_in_short(stages.problem)),
        )


def _in_short(problem: str) -> str:
    """What and why of an error's three parts."""
    return ": ".join(line.strip().removeprefix("why: ") for line in problem.splitlines()[:2])


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from (f"  {line}" for line in columns(rows, left=(0, 7)))


def _plain(stages: MemoryStages) -> dict[str, Any]:
    told_of: dict[str, Any] = plain(stages)
    for row, told in zip(rows(stages), told_of["stages"], strict=True):
        told |= {"added": row.added, "predicted_peak": row.predicted}
    if stages.plan is not None:
        told_of["plan"]["total"] = stages.plan.total
    most = {"peak": stages.peak, "reserved": stages.reserved, "context": stages.context, "total": stages.total}
    return {**told_of, **most}
