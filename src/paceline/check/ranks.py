"""N ranks have the gradients and metrics of one, also where samples do not divide evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.check.claim import Broken, NotApplicable
from paceline.check.difference import Computed, Measured, same_up_to_rounding
from paceline.check.metrics import close
from paceline.check.processes import Ranks
from paceline.check.several import job_for, stepped
from paceline.check.subject import PLAIN_SGD, STEADY, Subject
from paceline.data.dataset import Dataset
from paceline.prepare.preparation import build_for
from paceline.recipe import Recipe
from paceline.seams import Mesh

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
