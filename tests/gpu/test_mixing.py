"""mixup and cutmix beside torchvision's, from the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from paceline.data.mixing import mixed, mixed_batch
from paceline.seams import Alone, Mix
from tests.gpu.test_ddp import made


def test_a_captured_step_mixes_as_an_eager_one() -> None:
    """Share and partners' labels change from step to step, and one graph is replayed."""
    weights = []
    for capture in (False, True):
        run = made(Alone(), capture)
        for step in range(12):
            ids = (np.arange(8) + 8 * step) % 64
            mix = Mix(0.1 + 0.05 * step) if step % 2 else Mix(0.75, (0, 4, 2, 6))
            batch, other = run.build.layout.collate(ids), run.build.layout.collate(np.roll(ids, 1))
            run.engine.accumulate_batches([mixed_batch(batch, other, mix)], 8, step=step)
            run.engine.update()
        assert run.engine.replays is capture
        weights.append({name: tensor.clone() for name, tensor in run.engine.whole().items()})
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


def test_what_torchvision_drew_gives_its_images_and_labels() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2", reason="needs torchvision")
    images = torch.randn(8, 3, 16, 12, device="cuda")
    labels = torch.arange(8, device="cuda")
    both = nn.functional.one_hot(labels, 8).float()
    for kind in (v2.MixUp(alpha=0.4, num_classes=8), v2.CutMix(alpha=1.0, num_classes=8)):
        for seed in range(10):
            torch.manual_seed(seed)
            given = kind.make_params([images])
            torch.manual_seed(seed)
            theirs, soft = kind(images, labels)
            if "box" in given:
                left, top, right, bottom = given["box"]
                mix = Mix(given["lam_adjusted"], (top, bottom, left, right))
            else:
                mix = Mix(given["lam"])
            assert torch.equal(mixed(images, images.roll(1, 0), mix), theirs)
            torch.testing.assert_close(both * mix.share + both.roll(1, 0) * (1 - mix.share), soft)
