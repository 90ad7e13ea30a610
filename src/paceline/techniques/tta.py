"""Test-time augmentation: what a model says of several views of a sample, averaged in probability.

Views are of one size, the images' own, so that any model takes them. They are computed one after the other: the memory
is that of one.

Shapes: S samples, C channels, H height, W width, K classes.
Source: Krizhevsky, Sutskever and Hinton, ImageNet Classification with Deep Convolutional Neural Networks, NeurIPS 2012,
section 4.1: the softmax of five crops and their mirror images, averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.seams import Batch, Build, LayoutKind, Task

SETTING = "techniques.tta"

SCALES = (1.0, 0.9, 1.1)
"""How much larger ``scales`` makes what is seen."""

SHIFT = 8
"""``crop5`` moves an image by this part of its shorter side: an eighth, as a padding of 4 is of 32 pixels."""

View = Callable[[Tensor], Tensor]
"""Images [S, C, H, W] -> as many of the same shape."""

_softmax: View = partial(torch.softmax, dim=-1)


def views(images: Tensor, names: Sequence[str]) -> list[Tensor]:
    """Views of a batch of images; the images themselves are the first.

    Args:
        images: [S, C, H, W], normalised or not.
        names: of ``flip`` (two: as it is, and mirrored), ``crop5`` (five: as it is, and moved by an eighth towards each
            corner) and ``scales`` (three: as it is, smaller and larger by a tenth). Of several, every combination. What
            an image does not cover is filled with its nearest pixel.

    Returns:
        Tensors [S, C, H, W], on the images' device.

    Raises:
        ValueError: a name that is none of these.
    """
    return [view(images) for view in changes(names)]


def averaged(
    infer: Callable[[Tensor], Tensor],
    images: Tensor,
    names: Sequence[str],
    probabilities: Callable[[Tensor], Tensor] = _softmax,
) -> Tensor:
    """The mean of the probabilities of an image's views, in fp32.

    Args:
        infer: [S, C, H, W] -> logits [S, K]; in evaluation mode.
        images, names: as ``views`` has them.
        probabilities: of logits; ``torch.sigmoid`` where labels are independent.

    Returns:
        [S, K].
    """
    each = changes(names)
    total: Tensor | None = None
    for view in each:
        found = probabilities(infer(view(images)).float())
        total = found if total is None else total + found
    assert total is not None, "there is always the image itself"
    return total / len(each)


def changes(names: Sequence[str]) -> list[View]:
    """The views that ``names`` make, as functions of a batch."""
    if unknown := [name for name in names if name not in _VIEWS]:
        raise ValueError(f"{unknown[0]}: views of images are {', '.join(_VIEWS)}")
    found: list[tuple[View, ...]] = [()]
    for name, several in _VIEWS.items():
        if name in names:
            found = [(*before, view) for before in found for view in several]
    return [partial(_changed, views=each) for each in found]


def apply(build: Build, names: Sequence[str]) -> Build:
    """The build whose model, in evaluation mode, is given every view; training passes stay as they are.

    Args:
        build: of images; or of texts, where ``windows`` alone are named and are joined already.

    Raises:
        RecipeError: views of images are asked for of texts, or windows of images.
    """
    require_kin(names, are_images=build.layout_kind is LayoutKind.IMAGES)
    if build.layout_kind is not LayoutKind.IMAGES:
        return build
    before, task = build.forward, build.task

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            return before(model, batch)
        (name, images), *_ = batch.inputs.items()

        def infer(view: Tensor) -> Tensor:
            return before(model, replace(batch, inputs={**batch.inputs, name: view}))

        return task.logits(averaged(infer, images, names, task.probabilities))

    told = f"{SETTING} = {', '.join(names)}: each image is computed {len(changes(names))} times"
    return replace(build, forward=forward, notices=(*build.notices, told))


def of_windows(task: Task, mean: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[[Tensor, Tensor, int], Tensor]:
    """What joins the logits of a text's windows by the mean of their probabilities.

    Args:
        mean: rows, the text of each and the number of texts -> the mean over each text's rows.
    """

    def join(logits: Tensor, windows: Tensor, num_texts: int) -> Tensor:
        return task.logits(mean(task.probabilities(logits), windows, num_texts))

    return join


def require_kin(names: Sequence[str], *, are_images: bool) -> None:
    """Refuse views of images for texts, and windows for images.

    Raises:
        RecipeError: names the first of them.
    """
    strange = [name for name in names if (name == "windows") is are_images]
    if not strange:
        return
    kept = [name for name in names if name not in strange]
    others = "flip, crop5 or scales" if are_images else "windows"
    raise RecipeError(
        f"{SETTING} = {strange[0]}: no view of {'an image' if are_images else 'a text'}",
        f"the data are {'images' if are_images else 'texts'}, whose views are {others}",
        f"--tta {','.join(kept)}" if kept else f"leave it out, or --tta {'flip' if are_images else 'windows'}",
    )


def _changed(images: Tensor, views: Sequence[View]) -> Tensor:
    changed = images
    for view in views:
        changed = view(changed)
    # as the images lie in memory, which models that look at them by ``view`` depend on
    return images if changed is images else torch.empty_like(images).copy_(changed)


def _as_it_is(images: Tensor) -> Tensor:
    return images


def _moved(images: Tensor, down: int, right: int) -> Tensor:
    """What a crop of the same size sees that is moved by an eighth: 1 down or right, -1 up or left."""
    height, width = images.shape[-2:]
    by = max(1, min(height, width) // SHIFT)
    return _cut(F.pad(images, (by, by, by, by), "replicate"), by * (1 + down), by * (1 + right), height, width)


def _scaled(images: Tensor, scale: float) -> Tensor:
    """Resized, then cut to its middle or filled up around."""
    height, width = images.shape[-2:]
    size = [max(1, round(side * scale)) for side in (height, width)]
    resized = F.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)
    missing = [max(0, side - found) for side, found in zip((height, width), size, strict=True)]
    top, left = (gap // 2 for gap in missing)
    filled = F.pad(resized, (left, missing[1] - left, top, missing[0] - top), "replicate")
    return _cut(filled, (filled.shape[-2] - height) // 2, (filled.shape[-1] - width) // 2, height, width)


def _cut(images: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    return images[..., top : top + height, left : left + width]


_VIEWS: Mapping[str, tuple[View, ...]] = {
    "scales": tuple(_as_it_is if scale == 1 else partial(_scaled, scale=scale) for scale in SCALES),
    "crop5": (_as_it_is, *(partial(_moved, down=down, right=right) for down in (-1, 1) for right in (-1, 1))),
    "flip": (_as_it_is, partial(torch.flip, dims=(-1,))),
}
"""By name, in the order in which they are applied."""
