"""Ranks of this machine, joined by gloo, that are kept from one claim to the next."""

from __future__ import annotations

import os
import selectors
import tempfile
import time
from pathlib import Path
from typing import Any, Self, final

from paceline.check.claim import NotApplicable, Untried
from paceline.check.several import Job
from paceline.contract.child import Child
from paceline.contract.interpreter import python
from paceline.machine.cluster import LAUNCHER, RENDEZVOUS

SECONDS = 300.0
"""That a job may take; a rank that waits for another would wait longer."""


@final
class Ranks:
    """Processes on the CPU, started with the first job.

    Args:
        size: of their world.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._running: list[Child] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, job: Job) -> dict[str, Any]:
        """What the first rank answers.

        Raises:
            NotApplicable: the ranks refuse the recipe.
            Untried: one of them failed, ended or gave no answer.
        """
        if not self._running:
            self._start()
        for process in self._running:
            process.ask(job)
        answers = self._answers()
        for rank, answer in sorted(answers.items()):
            if "refused" in answer:
                self.close()  # the others may wait in a collective
                raise NotApplicable(answer["refused"])
            if "failed" in answer:
                self.close()
                raise Untried(f"rank {rank} of {self.size} failed: {answer['failed']}")
        if len(answers) < self.size:
            silent = next(rank for rank in range(self.size) if rank not in answers)
            said = self._running[silent].last_line()
            self.close()
            raise Untried(f"rank {silent} of {self.size} gave no answer{said}")
        found: dict[str, Any] = answers[0]["done"]
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self._running:
            process.kill()
        for process in self._running:
            process.close()
        self._running.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-ranks-")
        folder = Path(self._folder.name)
        left_out = {*RENDEZVOUS, LAUNCHER, "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
        kept = {name: text for name, text in os.environ.items() if name not in left_out}
        kept = {name: text for name, text in kept.items() if not name.startswith("TORCHELASTIC_")}
        # the processes share the cores, and need no GPU
        environment = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        for rank in range(self.size):
            command = python("-m", "paceline.check.rank", str(rank), str(self.size), f"file://{folder}/meet")
            self._running.append(Child(command, environment=environment))

    def _answers(self) -> dict[int, dict[str, Any]]:
        """Rank -> answer, until all have given one, one has failed, or there is no more time."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + SECONDS
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._running):
                waiting.register(process.answers, selectors.EVENT_READ, rank)
            while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    waiting.unregister(key.fileobj)
                    answer = self._running[key.data].answer()
                    if not answer:
                        return answers
                    answers[key.data] = answer
                    if "done" not in answers[key.data]:
                        # the others may find the same within a moment, or wait for this one for good
                        deadline = min(deadline, time.monotonic() + 1.0)
        return answers
