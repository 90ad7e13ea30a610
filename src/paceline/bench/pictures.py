"""Images as files that everybody reads: a folder a class, lossless, so that a beginning can be linked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import RecipeError
from paceline.contract.files import disk_errors
from paceline.data.dataset import Dataset, Images


def write_pictures(dataset: Dataset, ids: NDArray[np.int64], folder: Path) -> None:
    """``LABEL/0000012.png``: the number is the place in ``ids``, which a beginning is cut by.

    Raises:
        RecipeError: a label that no folder can be called.
        DiskFullError: no room.
    """
    from PIL import Image

    assert isinstance(dataset.inputs, Images)
    for name in dataset.label_names:
        if Path(name).name != name or name.startswith("."):
            raise RecipeError(f"the label {name!r}: no folder can be called so", "contenders read a folder a class")
        (folder / name).mkdir(parents=True, exist_ok=True)
    with disk_errors(folder):
        for place, sample in enumerate(ids):
            pixels = dataset.inputs.pixels[sample]
            image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
            image.save(folder / dataset.label_names[int(dataset.labels[sample])] / f"{place:07d}.png")


def link_pictures(source: Path, folder: Path, count: int) -> None:
    """The first ``count`` of ``write_pictures``, in a folder of their own; classes without any are left out."""
    shutil.rmtree(folder, ignore_errors=True)
    with disk_errors(folder):
        for file in sorted(source.glob("*/*.png")):
            if int(file.stem) < count:
                (folder / file.parent.name).mkdir(parents=True, exist_ok=True)
                os.link(file, folder / file.parent.name / file.name)
