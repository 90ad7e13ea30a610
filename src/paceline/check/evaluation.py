"""An evaluation does not depend on its batch size."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.check.claim import Broken
from paceline.check.difference import Computed, same_up_to_rounding
from paceline.check.metrics import close
from paceline.check.subject import Subject
from paceline.engine.evaluate import evaluate, inference
from paceline.seams import Build, Ids


def check(subject: Subject) -> str:
    """Logits of each sample alone and among others; loss and metrics in batches of several sizes."""
    name, ids = subject.held_out
    sizes = sorted({1, 2, max(1, len(ids) - 1), len(ids)})

    def compute(double: bool) -> Computed:
        _, build = subject.build(*subject.calm, double=double)
        return {"logits": _logits(build, ids, 1)}, {"logits": _logits(build, ids, len(ids))}

    with subject.numbers(), torch.no_grad():
        away = same_up_to_rounding(compute, "alone and beside others")
        _, build = subject.build(*subject.calm)
        found = [evaluate(inference(build), build, name, ids, size, step=0, epoch=0) for size in sizes]
    first = {"loss": found[0].loss, **found[0].metrics}
    for size, each in zip(sizes[1:], found[1:], strict=True):
        if each.samples != len(ids):
            raise Broken(f"in batches of {size} {each.samples} samples were counted, not {len(ids)}", tensor="samples")
        for metric, value in {"loss": each.loss, **each.metrics}.items():
            try:
                close(metric, first[metric], value)
            except Broken:
                told = f"{metric} is {value:.6g} in batches of {size}, and {first[metric]:.6g} one by one"
                raise Broken(told, tensor=metric, away=abs(value - first[metric])) from None
    told = ", ".join(map(str, sizes))
    return f"{len(ids)} samples in batches of {told}; logits differ by {away:.1e} of their norm at most"


def _logits(build: Build, ids: Ids, size: int) -> dict[str, Tensor]:
    """Logits of each sample, by its number, from batches of so many."""
    infer, found = inference(build), dict[int, Tensor]()
    for piece in build.layout.batches(ids, size):
        found |= dict(zip(piece.tolist(), infer(build.layout.collate(piece)).double(), strict=True))
    return {f"sample {sample}": found[sample] for sample in sorted(found)}
