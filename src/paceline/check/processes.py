"""Ranks of this machine, joined by gloo, that are kept from one claim to the next."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self, final

from paceline.check.claim import NotApplicable, Untried
from paceline.check.several import Job
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
        self._running: list[subprocess.Popen[str]] = []
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
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
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
            said = self._said(silent)
            self.close()
            raise Untried(f"rank {silent} of {self.size} gave no answer{said}")
        found: dict[str, Any] = answers[0]["done"]
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self._running:
            process.kill()
        for process in self._running:
            process.communicate()
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
            with (folder / f"said-{rank}").open("w") as said:
                self._running.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=said,
                        text=True,
                        env=environment,
                        process_group=0,
                    )
                )

    def _answers(self) -> dict[int, dict[str, Any]]:
        """Rank -> answer, until all have given one, one has failed, or there is no more time."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + SECONDS
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self._running):
                assert process.stdout is not None
                waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    waiting.unregister(key.fileobj)
                    stdout: Any = key.fileobj
                    line = stdout.readline()
                    if not line:
                        return answers
                    answers[key.data] = json.loads(line)
                    if "done" not in answers[key.data]:
                        # the others may find the same within a moment, or wait for this one for good
                        deadline = min(deadline, time.monotonic() + 1.0)
        return answers

    def _said(self, rank: int) -> str:
        """The last line that a rank wrote."""
        assert self._folder is not None
        lines = (Path(self._folder.name) / f"said-{rank}").read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
