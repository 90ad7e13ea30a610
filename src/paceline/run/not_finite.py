"""A loss or gradient that is no number: the samples to blame, or that training has diverged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from paceline.contract.errors import NonFiniteError
from paceline.data.dataset import Dataset
from paceline.prepare.assemble import Assembled
from paceline.seams import Ids


def not_finite(
    assembled: Assembled, dataset: Dataset, samples: Ids, *, step: int, epoch: int, loss: float, norm: float, lr: float
) -> NonFiniteError:
    """The error of a step whose update was not made.

    Args:
        samples: of the step. step: from 1. epoch: from 0.
        loss, norm: what was found; one of them is not finite.
        lr: the recipe's.
    """
    tried = [int(i) for i in samples]
    others = [int(i) for i in np.setdiff1d(dataset.splits["train"], samples)[:8]]
    # ranks see this at different steps, so that no pass may be run which needs all of them
    sharded = assembled.build.meets_in_forward
    bad = [] if sharded else [i for i in tried if not _is_fine(assembled, i)]
    # a model that is beyond repair fails on every sample
    rows_to_blame = bool(bad) and (not others or any(_is_fine(assembled, i) for i in others))
    named = bad if rows_to_blame else tried
    places = _places(dataset, named)
    what = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
    known = (
        "single samples cannot be tried where ranks meet in every pass"
        if sharded
        else "it is not single samples, so training has diverged"
    )
    return NonFiniteError(
        f"step {step} (epoch {epoch + 1}): {what}",
        f"{len(bad)} of its {len(tried)} samples give such a loss or gradient on their own: {places}"
        if rows_to_blame
        else f"{known}; those of the step: {places}",
        "look at these rows" if rows_to_blame else f"--set optimizer.lr={lr / 10:g}",
        step=step,
        epoch=epoch,
        sample_ids=named,
    )


def _places(dataset: Dataset, samples: Sequence[int]) -> str:
    return ", ".join(dataset.origins.of(i) for i in samples[:8]) + (" …" if len(samples) > 8 else "")


def _is_fine(assembled: Assembled, sample: int) -> bool:
    """Whether a sample alone gives a finite loss and finite gradients."""
    build = assembled.build
    build.model.eval()
    batch = build.layout.collate(np.array([sample]))
    loss = build.task.loss_sum(build.forward(build.model, batch), batch)
    parameters = [parameter for group in assembled.groups for parameter in group.parameters]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return all(bool(found.isfinite().all()) for found in (loss, *gradients) if found is not None)
