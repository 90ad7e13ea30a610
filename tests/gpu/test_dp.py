"""torch's DataParallel over two GPUs trains as one GPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from paceline.prepare.assemble import assemble, assemble_build
from paceline.seams import Mesh
from paceline.strategies import strategy_for
from paceline.tasks import task_for
from tests.parity import driving, reference

STEPS = 5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize(("number_format", "tolerance"), [("fp32", 1e-3), ("bf16", 2e-2)])
def test_two_gpus_train_as_one(number_format: str, tolerance: float) -> None:
    chosen = driving.recipe(techniques={**driving.PLAIN, "precision": number_format}, loop={"batch_size": 7})
    chosen = chosen.with_settings(["device=cuda"])
    original, device, data = reference.tiny_model(dropout=0.0), torch.device("cuda", 0), driving.dataset()
    losses = []
    for split in (False, True):
        model = copy.deepcopy(original)
        build = assemble_build(
            chosen,
            model,
            data,
            task_for(data.kind, data.label_names, chosen.task),
            device,
            blocks=list(model.distilbert.transformer.layer),
            normalisation=((0.5,) * 3, (0.5,) * 3),
        )
        if split:
            build = strategy_for(chosen.with_settings(["parallel.strategy=dp"]), Mesh()).prepare(build)
        run = assemble(chosen, build, STEPS)
        losses.append(driving.train(run, chosen, STEPS))
        assert np.isfinite(losses[-1]).all()
        assert not any(name.startswith("module.") for name in run.engine.whole())
        run.engine.close()
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)
