"""A run's memory as predicted beside its memory as measured.

The prediction is made while the run goes on, by another process of low priority: never before the first update, which
a person waits for, and never so that the end of the run waits for long.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Final, final

import torch

from paceline.contract.errors import UserError
from paceline.contract.records import MemoryPlan, MemoryRecord, Observer, Record, StepRecord
from paceline.machine.facts import Gpu
from paceline.memory.gauge import taken_at_most
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.seams import World

LONGEST_WAIT_SECONDS: Final = 2.0
"""How long the end of a run waits for a plan, at most."""

WAIT_SHARE: Final = 0.1
"""How much longer a plan is waited for, as a share of the seconds that it has taken by then: a run of a few seconds is
not made longer for a plan that is nowhere near its end."""

NICENESS: Final = 19
"""The niceness of the process that plans: it gets the processors that the run leaves over."""


@final
class PlanBeside(Observer):
    """The plan of a run, begun with its first update and asked for at its end.

    Nothing that goes wrong in it stops the run: it is told in place of the plan.

    Args:
        recipe: as the run settled it.
        gpu: what the run's first rank computes on.
        world_size: ranks of the run.
        obstacle: why there can be no plan of this run; none is tried then.
        command: what makes the plan another time.
    """

    def __init__(
        self, recipe: Recipe, gpu: Gpu, *, world_size: int = 1, obstacle: str = "", command: str = "paceline plan"
    ) -> None:
        self._recipe, self._gpu, self._world_size = recipe, gpu, world_size
        self._obstacle, self._command = obstacle, command
        self._predictor = Predictor(niceness=NICENESS)
        self._found: Future[MemoryPlan | str] = Future()
        self._started_at = 0.0
        self._thread: threading.Thread | None = None

    def observe(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.start()

    def start(self) -> None:
        """Begin, once, and return at once."""
        if self._thread is not None or self._obstacle:
            return
        self._started_at = time.monotonic()
        self._thread = threading.Thread(target=self._plan, name="paceline-plan", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._found.set_result(f"no thread could be started for it: {error}")

    def result(self) -> MemoryPlan | str:
        """The plan, or why there is none; waits a tenth of the time that it has taken so far, never over 2 seconds."""
        if self._obstacle:
            return self._obstacle
        if self._thread is None:
            return "no step was made"
        spent = time.monotonic() - self._started_at
        try:
            return self._found.result(min(LONGEST_WAIT_SECONDS, WAIT_SHARE * spent))
        except TimeoutError:
            return f"it was still being made when the run ended; {self._command} makes it"

    def close(self) -> None:
        """End the process; a plan that is still being made is lost."""
        # again and again: the thread may be about to start the process
        while self._thread is not None and self._thread.is_alive():
            self._predictor.kill()
            self._thread.join(0.05)

    def _plan(self) -> None:
        with self._predictor:
            self._found.set_result(self._planned())
            self._predictor.kill()  # an interpreter takes a while to end by itself

    def _planned(self) -> MemoryPlan | str:
        try:
            plan = self._predictor.plan(self._recipe, self._gpu, world_size=self._world_size)
            return replace(plan, notices=())  # they are the run's own, which has told them
        except UserError as error:
            return f"{error.what}: {error.why}" if error.why else error.what
        except Exception as error:
            last = (str(error).splitlines() or [""])[-1]
            return f"it failed ({last or type(error).__name__}); {self._command} tells the whole of it"


def measured(device: torch.device, world: World, beside: PlanBeside | None) -> MemoryRecord | None:
    """What the run has taken of the fullest rank's GPU, and what was predicted; None without a GPU.

    A collective: all ranks call it.

    Args:
        device: of this rank.
        world: the ranks of the run.
        beside: None where no plan was asked for.
    """
    taken = world.gather(_taken(device) if device.type == "cuda" else [0, 0, 0])
    if device.type != "cuda":
        return None
    allocated, reserved, total = max(taken)
    found = beside.result() if beside else ""
    plan, problem = (found, "") if isinstance(found, MemoryPlan) else (None, found)
    return MemoryRecord(allocated=allocated, reserved=reserved, total=total, plan=plan, problem=problem)


def _taken(device: torch.device) -> list[int]:
    """Bytes: allocated and reserved at their peaks, and taken from the GPU when most was reserved."""
    highest = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return [*highest, taken_at_most(device)]
