"""N ranks have the gradients and metrics of one, also where samples do not divide evenly.

They are processes of this machine, joined by gloo, and are kept from one claim to the next.
"""

from __future__ import annotations

import os
import selectors
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.check.claim import Broken, NotApplicable, Untried
from paceline.check.difference import Computed, Measured, same_up_to_rounding
from paceline.check.metrics import close
from paceline.check.several import Job, job_for, stepped
from paceline.check.subject import PLAIN_SGD, STEADY, Subject
from paceline.contract.child import Child
from paceline.contract.interpreter import python
from paceline.data.dataset import Dataset
from paceline.machine.cluster import LAUNCHER, RENDEZVOUS
from paceline.prepare.preparation import build_for
from paceline.recipe import Recipe
from paceline.seams import Mesh

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


SIZE = 2

ON_A_CPU = (
    "device=cpu",
    "data.resident=false",
    "parallel.backend=auto",
)


def check(subject: Subject) -> str:
    """An epoch of uneven steps, the last of which has a sample for one rank alone, and an evaluation."""
    told, away = compared(subject, ())
    dataset, batch = uneven(subject)
    count = len(dataset.splits["train"])
    return (
        f"{SIZE} processes on the CPU, {count} samples in steps of {batch}, the last of {count % batch or batch}{told};"
        f" losses, norms and weights differ by {away:.1e} of their norm at most"
    )


def uneven(subject: Subject) -> tuple[Dataset, int]:
    """Samples whose last step has one alone, in batches that two ranks do not share evenly."""
    count = len(subject.train)
    batch = min(7, (count - 1) // 2)
    batch -= batch > 3 and batch % 2 == 0
    if batch < SIZE:
        raise NotApplicable(f"{count} training samples are too few for two ranks")
    few = subject.train[: 2 * batch + 1]
    return replace(subject.dataset, splits={**subject.dataset.splits, "train": few}), batch


def settings_for(subject: Subject, settings: Sequence[str], size: int) -> Recipe:
    """The recipe of the comparison on so many ranks, on the CPU.

    Raises:
        RecipeError: it cannot be had.
    """
    _, batch = uneven(subject)
    plain = (*subject.calm, *ON_A_CPU, PLAIN_SGD, STEADY, f"loop.batch_size={batch}", "loop.micro_batch_size=2")
    return subject.with_settings([*plain, "parallel={}", *settings], size)


def compared(subject: Subject, settings: Sequence[str]) -> tuple[str, float]:
    """Steps and evaluation on two ranks beside those of one; what else is told, and the largest difference.

    Args:
        settings: of the ranks alone: how they share the work.

    Raises:
        NotApplicable: the recipe cannot be had on two ranks.
        RecipeError: the same.
    """
    subject.require_steps()
    if subject.rows is not None:
        raise NotApplicable("the rows are in this process's memory, and ranks are processes of their own")
    dataset, _ = uneven(subject)
    recipe, alone = settings_for(subject, settings, SIZE), settings_for(subject, (), 1)
    split = subject.held_out[0]
    weights = subject.folder / "weights.safetensors"
    state = subject.pristine.state_dict()
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, weights)
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def compute(double: bool) -> Computed:
        out = subject.folder / "out.safetensors"
        job = job_for(recipe, dataset, subject.images, weights=weights, split=split, double=double, out=out)
        found = ranks_of(subject).ask(job)
        model = subject.model(still=True, double=double)
        build = build_for(alone, model, dataset, torch.device("cpu"), subject.images)
        expected, after = stepped(alone, build, dataset, Mesh(), split)
        seen.append((expected, found))
        return _measured(expected, after, state), _measured(found, _read(out), state)

    with subject.numbers():
        away = same_up_to_rounding(compute, f"{SIZE} ranks and one")
    for metric, value in seen[-1][0]["evaluation"].items():
        try:
            close(metric, value, seen[-1][1]["evaluation"][metric])
        except Broken as error:
            found = seen[-1][1]["evaluation"][metric]
            told = f"{metric} of {split} is {found:.6g} on {SIZE} ranks, and {value:.6g} on one"
            raise Broken(told, tensor=metric, away=error.away) from None
    metrics = ", ".join(metric for metric in seen[-1][0]["evaluation"] if metric != "samples")
    return f"; {metrics} of {split} are equal", away


def ranks_of(subject: Subject) -> Ranks:
    """The processes, which serve all claims."""
    found = subject.kept.get("ranks")
    if found is None:
        found = subject.kept["ranks"] = subject.closing.enter_context(Ranks(SIZE))
    ranks: Ranks = found
    return ranks


def _read(out: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(out).items()}


def _measured(told: dict[str, Any], weights: dict[str, Tensor], before: dict[str, Tensor]) -> Measured:
    numbered = {
        kind: {f"step {step + 1}": torch.tensor(value, dtype=torch.float64) for step, value in enumerate(told[kind])}
        for kind in ("losses", "norms")
    }
    change = {
        name: tensor.double() - before[name].double()
        for name, tensor in weights.items()
        if name in before and tensor.is_floating_point()
    }
    return {"loss": numbered["losses"], "gradient's norm": numbered["norms"], "change": change}
