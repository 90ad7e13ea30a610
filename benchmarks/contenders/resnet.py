"""ResNet-18 for everybody: torchvision's where it is installed, else the same layers from transformers."""

from __future__ import annotations

import torch
from torch import nn


class Logits(nn.Module):
    """A transformers image classifier that returns its logits [samples, classes] as a plain tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(pixel_values=pixel_values).logits
        return logits


def resnet18(num_labels: int) -> nn.Module:
    """Random weights; input [samples, 3, height, width]."""
    try:
        from torchvision.models import resnet18 as torchvision_resnet18
    except ImportError:
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(
            num_labels=num_labels,
            embedding_size=64,
            hidden_sizes=[64, 128, 256, 512],
            depths=[2, 2, 2, 2],
            layer_type="basic",
        )
        return Logits(ResNetForImageClassification(config))
    model: nn.Module = torchvision_resnet18(num_classes=num_labels)
    return model
