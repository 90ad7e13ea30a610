"""``train: features``: the final layer's input computed once for every sample, and the layer solved for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.features import collect, fit_final_linear, write_into
from paceline.models.structure import final_linear
from paceline.prepare.preparation import Prepared
from paceline.run.job import Job
from paceline.run.progress import Progress
from paceline.seams import World


def fit_features(job: Job, progress: Progress, prepared: Prepared) -> Progress:
    """In place of steps: the final layer's input once for every training sample, and scikit-learn for the layer."""
    recipe, build, dataset, world = prepared.recipe, prepared.build, prepared.dataset, job.mesh.data
    linear = final_linear(build.model, build.task.num_outputs)
    ids = build.layout.sorted(dataset.splits["train"])
    size = job.evaluation_batch_size
    with job.watch.phase("train"):
        pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
        batches = (build.layout.collate(piece) for piece in pieces[world.rank :: world.size])
        features = _of_all_ranks(collect(build.model, linear, build.forward, batches), len(ids), size, world)
        with world.alone_first("fitting the last layer"):  # the others wait for as long as it takes
            if world.is_first:
                classifier, has_bias = recipe.model.classifier, linear.bias is not None
                fitted = fit_final_linear(
                    features, dataset.labels[ids], dataset.kind, classifier, build.task.num_outputs, bias=has_bias
                )
                write_into(linear, *fitted)
        world.broadcast_(list(linear.parameters()))
    sizes = [build.layout.size(piece) for piece in pieces]
    return replace(progress, samples=len(ids), tokens=sum(s.tokens for s in sizes), slots=sum(s.slots for s in sizes))


def _of_all_ranks(own: NDArray[np.float32], num_samples: int, size: int, world: World) -> NDArray[np.float32]:
    """Features [n, d] in the order of the samples, which ranks took in turn, ``size`` at a time."""
    if world.size == 1:
        return own
    found = torch.zeros(num_samples, own.shape[1])
    mine = np.arange(num_samples) // size % world.size == world.rank
    found[torch.from_numpy(mine)] = torch.from_numpy(own)
    return world.all_reduce(found).numpy()  # with zeros, so that no bit changes
