"""mixup and cutmix beside torchvision's, from the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.data.mixing import mixed
from paceline.seams import Mix

v2 = pytest.importorskip("torchvision.transforms.v2", reason="needs torchvision")


def test_what_torchvision_drew_gives_its_images_and_labels() -> None:
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
