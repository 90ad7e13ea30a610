"""A run's memory before the run, from a process beside this one. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Final, final

from paceline.contract import errors
from paceline.contract.child import Child
from paceline.contract.errors import DataError, PacelineError
from paceline.contract.interpreter import python
from paceline.contract.records import Decision, MemoryPlan
from paceline.machine.facts import Gpu
from paceline.recipe import Recipe

ENDING_SECONDS: Final = 10.0
"""How long a process that gave no answer may take to end."""


class PlanFailed(PacelineError):
    """The tracing process failed in a way that nobody foresaw; holds its traceback."""


@final
class Predictor:
    """Plans runs in one process, started with the first plan and ended with the context.

    The first plan takes seconds longer than the others: torch and transformers are imported for it.

    Args:
        niceness: of that process, as of nice(1): 0, or up to 19, where everything else goes first.
    """

    def __init__(self, *, niceness: int = 0) -> None:
        self._niceness = niceness
        self._child: Child | None = None

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is not None:
            self.kill()  # nobody waits for what is being traced
        self.close()

    def plan(self, recipe: Recipe, gpu: Gpu, *, read_data: bool = False, world_size: int = 1) -> MemoryPlan:
        """What one rank of a run takes on ``gpu``.

        Args:
            recipe: as ``choose`` made it for a machine with such GPUs.
            read_data: read and encode the data as a run would; else those are used that were encoded before.
            world_size: ranks that share each batch; with ``parallel.strategy: dp``, GPUs of the one rank.

        Raises:
            UserError: what ``train`` would say of the recipe; or the step cannot be traced.
            RecipeError: nobody can plan a run with its strategy.
            PlanFailed: a bug.
        """
        asked = {
            "recipe": recipe.plain(),
            "gpu": dataclasses.asdict(gpu),
            "read_data": read_data,
            "world_size": world_size,
        }
        return _plan_from(self._answer_to(asked))

    def require_cut(self, recipe: Recipe, world_size: int) -> None:
        """Refuse a model that so many ranks cannot share, see ``cutting.require_cut``.

        Raises:
            RecipeError: as every rank would, once it has read the model.
            PlanFailed: a bug.
        """
        _require_answer(self._answer_to({"recipe": recipe.plain(), "cut_over": world_size}))

    def _answer_to(self, asked: dict[str, Any]) -> dict[str, Any]:
        child = self.start()
        child.ask(asked)
        answer = child.answer()
        if not answer:
            code, reason = child.wait(ENDING_SECONDS), child.last_line()
            self.close()
            raise PlanFailed(f"the tracing process ended without an answer (exit code {code}){reason}")
        return answer

    def start(self) -> Child:
        """Start the process, which imports what plans need as soon as it is there; a plan starts it by itself."""
        if self._child is None or not self._child.is_alive:
            self.close()
            # without GPUs: it must not take memory from one, nor wait for a driver
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
            command = python("-m", "paceline.memory.worker")
            self._child = Child(command, environment=environment, niceness=self._niceness)
        return self._child

    def close(self) -> None:
        """End the process; another plan starts a new one."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def kill(self) -> None:
        """End the process at once, with what it forked; a plan that another thread is waiting for fails."""
        child = self._child
        if child is not None and child.is_alive:
            child.kill()


def _plan_from(found: dict[str, Any]) -> MemoryPlan:
    _require_answer(found)
    plan = found["plan"]
    decisions = tuple(Decision(**decision) for decision in plan["decisions"])
    told = {name: tuple(plan[name]) for name in ("assumed", "notices")}
    return MemoryPlan(**{**plan, **told, "decisions": decisions})


def _require_answer(found: dict[str, Any]) -> None:
    """Raise what the process has raised."""
    if "error" in found:
        name, what, why, fix = found["error"]
        if name == DataError.__name__:
            raise DataError(what, why=why, fix=fix)
        raise getattr(errors, name)(what, why, fix)
    if "bug" in found:
        raise PlanFailed(found["bug"])
