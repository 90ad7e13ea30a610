"""How an image model wants its pixels: size, channels, mean and standard deviation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract.errors import RecipeError
from paceline.models.config import modality, read_json
from paceline.models.hub import CONFIG_FILES, fetch
from paceline.models.processor import Processor, open_processor
from paceline.recipe.parts import ModelPart, NormalisePart

if TYPE_CHECKING:
    from transformers import PretrainedConfig


NORMALISATIONS = {
    "imagenet": NormalisePart(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    "cifar10": NormalisePart(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
}
"""A channel, over the training images of a data set; ImageNet's as torchvision's models have it."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """The model's input is ``(pixels / 255 - mean) / std``, [n, channels, height, width]."""

    height: int
    width: int
    channels: int
    mean: tuple[float, ...]
    """One a channel, for pixels scaled to 0..1."""
    std: tuple[float, ...]
    processor: dict[str, Any] | None = None
    """Settings of the model's own image processor, where that made the pixels."""

    def written(self) -> dict[str, Any]:
        """The content of a transformers ``preprocessor_config.json`` that prepares images in the same way."""
        if self.processor is not None:
            return self.processor
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": self.height, "width": self.width},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }


def own_processor(part: ModelPart, config: PretrainedConfig | None, image_size: int | None) -> Processor | None:
    """The pretrained model's image processor; None where it has none, reads no images, or a size is asked for.

    Raises:
        ModelError: whatever ``fetch`` raises, or a processor that cannot be used.
    """
    if not part.source or image_size is not None or modality(part, config) != "image":
        return None
    folder = fetch(part.source, CONFIG_FILES, revision=part.revision)
    return open_processor(folder, f"model.source = {part.source}", trust_remote_code=part.trust_remote_code)


def image_settings(part: ModelPart, shape: tuple[int, int, int], processor: Processor | None = None) -> ImageSettings:
    """Settings for images of ``shape`` (height, width, channels): a pretrained model's own mean and deviation.

    Args:
        part: the recipe's ``model``.
        shape: of the pixels that the layout holds.
        processor: that made them; None: they were resized, or left as they are, without it.

    Raises:
        ModelError: whatever ``fetch`` raises, or a ``preprocessor_config.json`` that cannot be read.
    """
    height, width, channels = shape
    if processor is not None:
        return ImageSettings(
            height=height,
            width=width,
            channels=channels,
            mean=processor.mean,
            std=processor.std,
            processor=processor.settings(),
        )
    written = _preprocessor(part)
    mean, std = (_spread(written.get(key, 0.5), channels) for key in ("image_mean", "image_std"))
    if written.get("do_normalize") is False:
        mean, std = (0.0,) * channels, (1.0,) * channels
    return ImageSettings(height=height, width=width, channels=channels, mean=mean, std=std)


def normalised_by(settings: ImageSettings, wish: str | NormalisePart) -> ImageSettings:
    """The settings with the mean and deviation of ``data.normalise``.

    Raises:
        RecipeError: not one of each for every channel of the images.
    """
    if wish == "own":
        return settings
    chosen = NORMALISATIONS[wish] if isinstance(wish, str) else wish
    if len(chosen.mean) != settings.channels:
        told = wish if isinstance(wish, str) else f"mean = {list(wish.mean)}"
        raise RecipeError(
            f"data.normalise = {told}",
            f"it is of {len(chosen.mean)} channels, and the images have {settings.channels}",
            f"give mean and std with {settings.channels} number{'s' * (settings.channels > 1)} each, or leave it out",
        )
    processor = settings.processor
    if processor is not None:
        # some subtract a mean a second time
        floats = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "include_top": False}
        written = {name: value for name, value in floats.items() if name in processor or name != "include_top"}
        processor = {**processor, **written, "image_mean": list(chosen.mean), "image_std": list(chosen.std)}
    return replace(settings, mean=chosen.mean, std=chosen.std, processor=processor)


def preferred_size(part: ModelPart, config: PretrainedConfig | None) -> int | None:
    """Pixels a side that a model was trained on; None when it does not say, or reads texts."""
    if modality(part, config) == "text":  # which may have a part for images, too
        return None
    size = getattr(config, "image_size", None)
    if size is None and part.source:
        written = _preprocessor(part).get("size")
        size = (written.get("height") or written.get("shortest_edge")) if isinstance(written, dict) else written
    if isinstance(size, (list, tuple)):
        size = size[0] if len(set(size)) == 1 else None
    return size if isinstance(size, int) else None


def _preprocessor(part: ModelPart) -> dict[str, Any]:
    if not part.source:
        return {}
    path: Path = fetch(part.source, CONFIG_FILES, revision=part.revision) / "preprocessor_config.json"
    if not path.is_file():
        return {}
    written = read_json(path)
    return written if isinstance(written, dict) else {}


def _spread(value: float | list[float], channels: int) -> tuple[float, ...]:
    values = [value] if isinstance(value, (int, float)) else value
    if len(values) == channels:
        return tuple(float(v) for v in values)
    return (sum(values) / len(values),) * channels
