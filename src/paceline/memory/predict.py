"""A run's memory before the run, from a process beside this one. Nothing here needs torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
from typing import IO, Any, final

from paceline.contract import errors
from paceline.contract.errors import DataError, PacelineError
from paceline.contract.interpreter import python
from paceline.contract.records import Decision, MemoryPlan
from paceline.machine.facts import Gpu
from paceline.recipe import Recipe


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
        self._process: subprocess.Popen[str] | None = None
        self._printed: IO[bytes] | None = None
        """Standard error of the process."""

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
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            process.communicate()
            reason = self._last_line()
            self.close()
            raise PlanFailed(f"the tracing process ended without an answer (exit code {process.returncode}){reason}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_line(self) -> str:
        """Return the last line of the process's standard error, after a colon; empty where it wrote none."""
        assert self._printed is not None
        self._printed.seek(0)
        lines = self._printed.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def start(self) -> subprocess.Popen[str]:
        """The process, which imports what plans need as soon as it is there; a plan starts it by itself."""
        if self._process is None or self._process.poll() is not None:
            if self._printed is None:
                self._printed = tempfile.TemporaryFile()  # noqa: SIM115
            self._printed.truncate(0)
            self._process = _started(self._niceness, self._printed)
        return self._process

    def close(self) -> None:
        """End the process; another plan starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: its pipes are closed already
                process.communicate()
            process.wait()
        if self._printed is not None:
            self._printed.close()
            self._printed = None

    def kill(self) -> None:
        """End the process at once, with what it forked; a plan that another thread is waiting for fails."""
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _started(niceness: int, printed: IO[bytes]) -> subprocess.Popen[str]:
    # without GPUs: it must not take memory from one, nor wait for a driver
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        python("-m", "paceline.memory.worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=printed,
        text=True,
        env=environment,
        process_group=0,  # Ctrl-C is for the run, which ends this one with all that it forked
    )
    if niceness:
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, process.pid, niceness)
    return process


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
