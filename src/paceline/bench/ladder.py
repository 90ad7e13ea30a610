"""The ladder, cell by cell: what is measured already, what still fits, and what comes of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline._version import __version__
from paceline.bench import budget as budgets
from paceline.bench import work
from paceline.bench.cells import Bench, Cell, matmul_rate, measure, turns
from paceline.bench.folder import CELLS, NEEDS, make_room, read_plan, take, write_plan
from paceline.bench.records import CUT_OFF, Record, Records
from paceline.bench.rungs import EVERY, LADDERS, OURS, Rung, chosen, obstacle, without
from paceline.bench.standings import Standing, common_seeds, standings
from paceline.bench.work import Extent, Source
from paceline.contract.errors import DiskFullError, RunFolderError, UserError
from paceline.contract.files import write_atomically
from paceline.machine.facts import Facts, this_machine
from paceline.recipe import Recipe
from paceline.run_folder.origin import git_state

PROBED_STEPS = 8
PROBE = "probe"

BUSY = 1.5
"""Processes a processor that want to run, before a cell begins, above which figures are doubtful: with the cell before
it there is about one."""

FEWEST_HELDOUT = 256
"""Rows that a quality is measured on, where there are so many."""

NOT_WELL = ("failed", "hung", "rubbish", "refused")
"""Statuses of cells that are not run again; those that hung only with a longer limit."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What was asked for."""

    rungs: tuple[str, ...] = ()
    """Names, with ``*``; empty: all."""
    repeats: int = 3
    budget: float | None = None
    """Seconds for everything; None: no limit."""
    steps: int | None = None
    """Updates of a cell; None: as many as the recipe says, or as fit into the budget."""
    limit: float = 1800.0
    """Seconds after which a cell is ended that does not end by itself."""
    again: bool = False
    """Run once more what did not end well."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Where a bench stands: told after every cell."""

    rows: list[Standing]
    done: int
    total: int
    """Cells that are measured or will be."""
    running: str
    """The cell that is measured now; empty at the end."""
    left: float | None
    """Seconds of the budget."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """A finished bench, or one that was interrupted."""

    name: str
    folder: Path
    rows: list[Standing]
    about: dict[str, Any]
    """The machine, the extent of the work, versions; what repeats it."""
    notices: tuple[str, ...] = field(default=())


class Climb:
    """One bench in one folder.

    Args:
        recipe: the run.
        wanted: rungs, repeats, time.
        folder: takes everything; what is measured in it already is kept.
        tell: is given the outlook after every cell.
        say: is given lines for people: what is done before the first cell, what was cut and dropped.

    Attributes:
        found: what came of it, also where ``run`` was interrupted; None before the first cell.

    Raises:
        UserError: a rung that is none, a folder that holds something else, or is in use.
    """

    def __init__(
        self,
        recipe: Recipe,
        wanted: Wanted,
        folder: Path,
        *,
        tell: Callable[[Outlook], None] = lambda _: None,
        say: Callable[[str], None] = lambda _: None,
        facts: Callable[[], Facts] = this_machine,
        ladder: Sequence[Rung] | None = None,
    ) -> None:
        self._began = time.monotonic()
        self._recipe, self._wanted, self._folder = recipe, wanted, folder.resolve()
        self._tell, self._say = tell, say
        self.found: Ladder | None = None
        chosen(ladder or EVERY, wanted.rungs)  # a name that is none is told before a model is looked for
        self._facts = facts()
        every = ladder or LADDERS[_read_by(recipe)]
        unable = {rung.name for rung in every if obstacle(rung, self._facts)}
        self._rungs = chosen(without(every, unable), wanted.rungs)
        self._states: dict[str, tuple[str, str]] = {}
        self._repeats = wanted.repeats

    def run(self) -> Ladder:
        """Measure what is missing, as far as it fits.

        Raises:
            DiskFullError: no room even after caches are removed; what was measured is kept, and the same call goes on.
            UserError: no rung can run here, or not one cell fits into the budget.
        """
        with contextlib.ExitStack() as held:
            self._open(held)
            return self._climb()

    def _open(self, held: contextlib.ExitStack) -> None:
        take(self._folder, held)
        self._records = Records(self._folder / CELLS, partial(make_room, self._folder), needs=NEEDS)
        if self._wanted.again:
            self._records.forget(NOT_WELL)

    def _climb(self) -> Ladder:
        self._find_states()
        able = [rung for rung in self._rungs if rung.name not in self._states]
        if not able:
            why = "; ".join(dict.fromkeys(f"{name}: {told[1]}" for name, told in self._states.items()))
            raise UserError("bench: none of the rungs asked for can run here", why)
        plan = self._plan(able)
        self._bench = self._bench_of(Extent(**plan["extent"]))
        try:
            self._measure(turns(able, self._repeats))
        finally:  # also after Ctrl-C: what was measured is worth reading
            self.found = ladder = self._ladder(plan)
        if not any(row.state == "measured" for row in ladder.rows):
            self._refuse(ladder)
        return ladder

    def _refuse(self, ladder: Ladder) -> None:
        cut = [row for row in ladder.rows if row.state in (CUT_OFF, "dropped")]
        if cut:
            budget = self._wanted.budget or 0
            why = f"{cut[0].rung.name} was not done in the {budget:.0f} s"
            raise UserError("--budget: no time for one cell", why, f"--budget {2 * budget:.0f}s, or --steps 10")

    def _find_states(self) -> None:
        """Rungs that cannot run, on this machine or of this recipe."""
        lack = work.peers_lack(self._recipe)
        for rung in self._rungs:
            if problem := obstacle(rung, self._facts):
                self._states[rung.name] = problem
            elif lack and rung.contender != OURS:
                self._states[rung.name] = ("cannot", lack)

    # what is done

    def _plan(self, able: Sequence[Rung]) -> dict[str, Any]:
        """Extent of the work, kept in the folder, so that a bench goes on with the same work."""
        asked = {"recipe": self._recipe.resolved(), "steps": self._wanted.steps}
        plan = read_plan(self._folder)
        if plan is not None:
            if plan["asked"]["recipe"] != asked["recipe"] or asked["steps"] not in (None, plan["asked"]["steps"]):
                why = "its cells did other work; figures of both would stand in one table"
                raise RunFolderError(f"{self._folder}: a bench of another recipe", why, "choose another --out")
            self._source = Source(**plan["source"])
            self._repeats = min(self._repeats, plan["repeats"]) if plan["fitted"] else self._repeats
            return plan
        self._say("writing the rows and the model that every rung begins with")
        self._source = work.write_source(self._recipe, self._folder / "work")
        extent, fitted = work.whole(self._recipe, self._source), False
        if self._wanted.steps is not None:
            extent = self._cut(extent, self._wanted.steps)
        elif self._wanted.budget is not None:
            fitted_extent = self._fitted(extent, able)
            extent, fitted = fitted_extent, fitted_extent != extent
        rate = matmul_rate(self._folder)
        plan = {
            "paceline": __version__,
            "asked": asked,
            "source": asdict(self._source),
            "extent": asdict(extent),
            "repeats": self._repeats,
            "fitted": fitted,
            "matmul": dict(rate.fields) if rate else None,
            "machine": self._facts.plain(),
            "commit": git_state(Path(__file__).parent),
        }
        write_plan(self._folder, plan)
        return plan

    def _fitted(self, extent: Extent, able: Sequence[Rung]) -> Extent:
        """As many steps as let every rung have its turn, by a few steps of the first rung."""
        rung = next((each for each in able if not each.by_design), able[0])
        short = work.cut_to(
            self._recipe, self._source, min(PROBED_STEPS, extent.steps), 4 * self._recipe.loop.batch_size
        )
        if short.steps == extent.steps:
            return extent
        self._say(f"{PROBED_STEPS} steps of {rung.name}, to see how much fits")
        self._bench = self._bench_of(short)
        probe = Cell(replace(rung, name=PROBE), 0)
        record = self._record_of(probe)
        if record["status"] == CUT_OFF:
            budget = self._wanted.budget or 0
            why = f"{PROBED_STEPS} steps of {rung.name} were not done in the {budget:.0f} s"
            raise UserError("--budget: no time for one cell", why, f"--budget {4 * budget:.0f}s, or a smaller model")
        if record["status"] != "ok" or not record["samples_per_second"]:
            return extent  # the cell itself will say what is wrong
        left = self._left()
        assert left is not None
        steps, self._repeats = budgets.steps_that_fit(
            left,
            rungs=len(able),
            repeats=self._repeats,
            whole_seconds=record["whole_seconds"],
            probed_steps=short.steps,
            step_seconds=self._recipe.loop.batch_size / record["samples_per_second"],
        )
        if steps >= extent.steps:
            return extent
        found = self._cut(extent, steps)
        cells = "a cell" if self._repeats == 1 else f"{self._repeats} cells"
        self._say(f"cut to {found.steps} steps, and {cells} a rung, to fit the budget")
        return found

    def _cut(self, extent: Extent, steps: int) -> Extent:
        """So many steps, and a quarter as many held-out rows as they train on, where that is less than everything."""
        if steps >= extent.steps:
            return extent
        heldout = max(FEWEST_HELDOUT, steps * self._recipe.loop.batch_size // 4)
        return work.cut_to(self._recipe, self._source, steps, heldout)

    def _bench_of(self, extent: Extent) -> Bench:
        """Writes the files of this extent."""
        files = self._folder / "work"
        work.write_rows(files, extent)
        recipe = files / "recipe.yaml"
        ours = work.our_recipe(self._recipe, self._source, extent, files)
        write_atomically(recipe, ours.to_yaml().encode())
        gpus = () if self._facts.cuda_problem else self._facts.gpus
        return Bench(
            folder=self._folder,
            extent=extent,
            job=work.job(self._recipe, self._source, extent, files, workers=2 if gpus else 0),
            recipe=recipe,
            batch_size=self._recipe.loop.batch_size,
            gpus=len(gpus),
            gpu_uuids=tuple(gpu.uuid for gpu in gpus if gpu.uuid),
            seed=self._recipe.seed,
        )

    # cell by cell

    def _left(self) -> float | None:
        budget = self._wanted.budget
        return None if budget is None else max(0.0, self._began + budget - time.monotonic())

    def _measure(self, cells: Sequence[Cell]) -> None:
        first = cells[0].rung.name
        while missing := [cell for cell in cells if self._is_missing(cell)]:
            left, kept = self._left(), missing
            if left is not None:
                kept = budgets.fit(missing, self._seconds_of, left, lambda cell: cell.rung.name == first)
                self._drop(missing, kept)
            if not kept or left == 0:
                break
            cell = kept[0]
            self._tell(self._outlook(cell.name, len(kept), left))
            record = self._record_of(cell)
            self._records.add(record)
            if record["status"] == CUT_OFF:
                break
        self._tell(self._outlook("", 0, self._left()))

    def _record_of(self, cell: Cell) -> Record:
        """Measure it; once more where the disk is full and there is something to remove.

        Raises:
            DiskFullError: it is full even then.
        """
        try:
            return self._measured_now(cell)
        except DiskFullError:
            self._say(f"the disk is full; caches are removed, and {cell.name} is measured once more")
            make_room(self._folder)
            return self._measured_now(cell)

    def _measured_now(self, cell: Cell) -> Record:
        left = self._left()
        limit = self._wanted.limit if left is None else min(self._wanted.limit, left)
        return measure(cell, self._bench, limit_seconds=limit, out_of_time=limit != self._wanted.limit)

    def _is_missing(self, cell: Cell) -> bool:
        """Not measured; and no cell of its rung ended badly, which the others would too."""
        record = self._records.get(cell.rung.name, cell.repeat)
        failed = any(each["rung"] == cell.rung.name and self._would_again(each) for each in self._records)
        return not failed and (record is None or record["status"] != "ok")

    def _would_again(self, record: Record) -> bool:
        """Whether its cell ended badly, and has no more time now than it had."""
        if record["status"] == "hung":
            # rounded as the record is: what has just been ended by this limit had all of it
            return (record.get("whole_seconds") or 0.0) >= round(self._wanted.limit, 3)
        return record["status"] in NOT_WELL

    def _seconds_of(self, cell: Cell) -> float:
        return budgets.expected_seconds({"rung": cell.rung.name, "contender": cell.rung.contender}, self._records)

    def _drop(self, missing: Sequence[Cell], kept: Sequence[Cell]) -> None:
        """Say which rungs have no time; looked at anew before every cell, so one may come back."""
        there = set(kept)
        self._states = {name: told for name, told in self._states.items() if told[0] != "dropped"}
        for cell in missing:
            if cell not in there:
                seconds = self._seconds_of(cell)
                self._states[cell.rung.name] = ("dropped", f"no time in the budget for about {seconds:.0f} s more")

    def _outlook(self, running: str, missing: int, left: float | None) -> Outlook:
        done = sum(each["status"] == "ok" for each in self._records)
        return Outlook(rows=self._rows(), done=done, total=done + missing, running=running, left=left)

    def _rows(self) -> list[Standing]:
        heldout = self._bench.extent.heldout_rows
        return standings(self._rungs, self._records, self._states, heldout)

    def _ladder(self, plan: dict[str, Any]) -> Ladder:
        extent, notices = self._bench.extent, []
        full = work.whole(self._recipe, self._source)
        if extent.steps < full.steps:
            notices.append(f"{extent.steps:,} of the recipe's {full.steps:,} steps")
        dropped = [name for name, told in self._states.items() if told[0] == "dropped"]
        rows = self._rows()
        if any(row.verdict == "first" and row.n == 1 for row in rows):
            notices.append("one cell of the first rung has no spread: what differs is a guess; --repeats 3 measures it")
        if len({row.n for row in rows if row.n}) > 1:
            seeds = len(common_seeds(each for each in self._records if each["status"] == "ok"))
            of = "that of the one seed" if seeds == 1 else f"the median of the {seeds} seeds"
            told = (
                f"quality is {of} that all have"
                if seeds
                else "none has the seeds of all others, and quality is of other seeds"
            )
            notices.append(f"rungs have different numbers of cells (n): {told}")
        load = max((each.get("load") or 0.0 for each in self._records), default=0.0)
        if load > BUSY * self._facts.cpu_count:
            told = f"load {load:.1f} on {self._facts.cpu_count} CPUs"
            notices.append(f"other programs were at work ({told}): small differences say nothing")
        if dropped:
            notices.append(f"dropped for the budget, the longest first: {', '.join(dropped)}")
        about = {**plan, "extent": asdict(extent), "repeats": self._repeats, "rungs": [r.name for r in self._rungs]}
        return Ladder(name=self._recipe.name, folder=self._folder, rows=rows, about=about, notices=tuple(notices))


def _read_by(recipe: Recipe) -> str:
    """What the model reads: a ladder's key.

    Raises:
        ModelError: the model cannot be found, or classifies neither texts nor images.
    """
    from paceline.models.config import modality, read_config

    reads = modality(recipe.model, read_config(recipe.model))
    return reads if reads in LADDERS else "text"
