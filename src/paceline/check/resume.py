"""A run that stops and goes on ends as one that never stopped."""

from __future__ import annotations

import shutil
from dataclasses import replace

import torch
from torch import Tensor

from paceline.check.claim import Broken
from paceline.check.difference import NOISE, copied, same_state
from paceline.check.subject import Subject
from paceline.contract.records import EvaluationRecord, Record, StepRecord
from paceline.contract.stop import Stop
from paceline.contract.stopwatch import Stopwatch
from paceline.recipe import Recipe
from paceline.run.checkpoint.store import Checkpoint, CheckpointStore
from paceline.run.job import Request, job_of
from paceline.run.loop import Loop
from paceline.run_folder import RunFolder
from paceline.seams import Build

KEPT = 100


def check(subject: Subject) -> str:
    """The run's own loop to the end; and from its checkpoint in the middle of the second epoch, in a new model."""
    subject.require_steps()
    recipe = subject.recipe
    precision, deterministic = recipe.techniques.precision, recipe.deterministic
    with subject.numbers(precision, deterministic=deterministic):
        whole, steps, told = _run(subject, "whole", None)
        stopped = max(1, steps // 2 + 1)
        checkpoint = _moved(subject, stopped)
        again, _, told_again = _run(subject, "resumed", checkpoint)
    exact = recipe.device == "cpu" or deterministic
    same_state(
        whole, again, f"resumed after step {stopped} of {steps} and uninterrupted", noise=0.0 if exact else NOISE
    )
    if exact:
        _same_records(told, told_again, stopped)
    return f"{steps} steps, resumed after step {stopped}: weights, optimizer, losses and evaluations are equal"


def _run(subject: Subject, name: str, checkpoint: Checkpoint | None) -> tuple[dict[str, Tensor], int, list[Record]]:
    """What the loop ends with, its steps and what it told."""
    recipe, build = _built(subject)
    folder = subject.folder / name
    folder.mkdir(exist_ok=True)
    told: list[Record] = []
    request = Request(
        recipe=recipe,
        decisions=(),
        facts=subject.facts,
        folder=RunFolder.follow(folder),
        rows=subject.rows,
        watch=Stopwatch(),
        checkpoint=checkpoint,
    )
    prepared = replace(subject.prepared, recipe=recipe, dataset=subject.dataset, build=build)
    job, progress = job_of(request, prepared, told.append, Stop())
    try:
        progress = Loop(job, progress, saved_step=checkpoint.step if checkpoint else None).run()
        tensors, state = job.assembled.engine.state()
        found = {**copied(tensors), "updates applied": torch.tensor(state["applied"])}
    finally:
        job.assembled.engine.close()
        job.store.close()
    return found, progress.step, told


def _built(subject: Subject) -> tuple[Recipe, Build]:
    evaluates = "epoch" if "validation" in subject.dataset.splits else "never"
    settings = [
        *subject.as_run,
        "loop.checkpoint_every=1",
        f"loop.keep_last={KEPT}",
        f"loop.evaluate_every={evaluates}",
        "loop.early_stopping=null",
        "loop.best_metric=auto",
        "trace={}",
        "task.metrics=null",
    ]
    return subject.build(*settings, still=False)


def _moved(subject: Subject, step: int) -> Checkpoint:
    """The checkpoint of a step by itself, as a run that was stopped there leaves it."""
    store = CheckpointStore(subject.folder / "whole" / "checkpoints", KEPT)
    if step not in store.steps():
        raise Broken(f"no checkpoint of step {step} was saved; there are {store.steps()}", tensor="checkpoint")
    target = subject.folder / "resumed" / "checkpoints"
    target.mkdir(parents=True)
    for folder in sorted(store.folder.iterdir()):
        # step-00000120.2 -> 120
        if folder.is_dir() and int(folder.name.partition("-")[2].partition(".")[0]) <= step:
            shutil.copytree(folder, target / folder.name)
    return CheckpointStore(target, KEPT).newest()


def _same_records(whole: list[Record], again: list[Record], stopped: int) -> None:
    expected = {record.step: record.loss for record in whole if isinstance(record, StepRecord)}
    for record in again:
        if isinstance(record, StepRecord):
            if record.step <= stopped:
                raise Broken(f"the resumed run makes step {record.step} again", tensor=f"step {record.step}")
            if record.loss != expected.get(record.step):
                told = f"the loss of step {record.step} is {record.loss} resumed, {expected.get(record.step)} without"
                raise Broken(told, tensor=f"loss of step {record.step}")
    made = {record.step for record in again if isinstance(record, StepRecord)}
    missing = next((step for step in sorted(expected) if step > stopped and step not in made), None)
    if missing is not None:
        raise Broken(f"the resumed run does not make step {missing}", tensor=f"step {missing}")
    evaluated = {record.step for record in again if isinstance(record, EvaluationRecord)}
    measured = {record.step: record.loss for record in whole if isinstance(record, EvaluationRecord)}
    for found in again:
        if isinstance(found, EvaluationRecord) and found.loss != measured.get(found.step):
            raise Broken(f"the evaluation of step {found.step} is another", tensor="evaluation")
    missing = next((step for step in sorted(measured) if step > stopped and step not in evaluated), None)
    if missing is not None:
        raise Broken(f"the resumed run does not evaluate after step {missing}", tensor="evaluation")
