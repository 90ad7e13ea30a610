"""The tutorials' image loop, timed: Pillow transforms in worker processes, SGD, two numbers read back each step.

Settings: ``workers``, ``batch_size``, ``warm_up`` and ``measured``. The batches are those of order.npy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from resnet import resnet18
from torch.utils.data import DataLoader, Dataset
from workload import Settings, Window, read_spec, start, train_order

CROP = 4
"""Pixels of black on each side, out of which an image of the old size is cut."""


class Pictures(Dataset):
    def __init__(self, folder: Path, ids: np.ndarray) -> None:
        self.pixels, self.labels, self.ids = np.load(folder / "pixels.npy"), np.load(folder / "labels.npy"), ids
        self.transform = transform(self.pixels.shape[1])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = self.ids[index]
        return self.transform(Image.fromarray(self.pixels[sample])), int(self.labels[sample])


def transform(side: int) -> Callable[[Image.Image], torch.Tensor]:
    """Random crop and flip, scaled to -1..1: torchvision's where it is installed."""
    try:
        from torchvision import transforms
    except ImportError:
        return lambda image: _transformed(image, side)
    return transforms.Compose(
        [
            transforms.RandomCrop(side, padding=CROP),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ]
    )


def _transformed(image: Image.Image, side: int) -> torch.Tensor:
    left, top = random.randint(0, 2 * CROP), random.randint(0, 2 * CROP)
    image = ImageOps.expand(image, CROP).crop((left, top, left + side, top + side))
    if random.random() < 0.5:
        image = ImageOps.mirror(image)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return (pixels.float() / 255 - 0.5) / 0.5


def main(folder: Path, settings: Settings) -> None:
    torch.manual_seed(0)
    spec, window, workers = read_spec(folder), Window(settings), settings["workers"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = resnet18(spec["num_labels"]).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=spec["lr"], momentum=0.9, weight_decay=spec["weight_decay"])
    ids = train_order(folder, settings)
    loader = DataLoader(
        Pictures(folder, ids), batch_size=settings["batch_size"], num_workers=workers, drop_last=True
    )  # one long epoch: the tutorials' loop would start its workers anew after each
    running, right = 0.0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        logits = model(images)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        running += loss.item()
        right += (logits.argmax(1) == labels).sum().item()
        window.update(loss)
    window.report(folder, ids, model, train_accuracy=right / len(ids))


if __name__ == "__main__":
    start(main)
