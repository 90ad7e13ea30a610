"""A classifier that was trained elsewhere, ready for use: a folder as transformers saves it, or a Hub name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.contract.errors import ModelError
from paceline.models.config import max_positions, modality, read_config
from paceline.models.heads import head_of, kind_of
from paceline.models.hub import ADAPTERS, CONFIG_FILES, WEIGHT_FILES, fetch
from paceline.models.images import ImageSettings, image_settings, own_processor, preferred_size
from paceline.models.load import from_folder, no_safetensors
from paceline.models.processor import Processor
from paceline.models.saved import FILE, LoadedModel, SavedModel, load_saved
from paceline.models.tokenizers import tokenizer_source
from paceline.recipe.parts import ModelPart

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LONGEST: Final = 512
"""Tokens kept of a text where neither tokenizer nor model has a limit: as ``data.max_length`` is by default."""

_UNLIMITED: Final = 10**9
"""From here on a ``model_max_length`` is transformers' word for none."""


def names_a_model(path: Path) -> bool:
    """Whether a model is meant: a folder that holds one, or NAME or OWNER/NAME of the Hub where no such folder is."""
    if path.exists():
        return any((path / name).is_file() for name in ("config.json", ADAPTERS))
    name = r"[\w-][\w.-]*"
    if re.fullmatch(name, str(path)):
        return True
    return re.fullmatch(f"{name}/{name}", str(path)) is not None and not path.parent.exists()


def load_pretrained(source: Path, *, pairs: bool, trust_remote_code: bool = False) -> LoadedModel:
    """A classifier, its tokenizer and what ``paceline.json`` would say of them, on the CPU, in fp32.

    Label names are ``id2label``'s. What is learned is ``problem_type``; where a configuration has none it is
    regression with one output, else classification, as transformers has it. Texts are cut to the tokenizer's
    ``model_max_length``, at most to the model's positions, on its ``truncation_side``.

    Args:
        source: folder or Hub name.
        pairs: whether a sample is two texts, which no configuration says.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        ModelError: no such model, or it has no head that was trained; and whatever ``fetch`` raises.
    """
    if (source / FILE).is_file():
        return load_saved(source, trust_remote_code=trust_remote_code)
    part = ModelPart(source=str(source), trust_remote_code=trust_remote_code)
    config = read_config(part)
    assert config is not None, "only a factory has none"
    reads = modality(part, config)
    folder = fetch(str(source), CONFIG_FILES + WEIGHT_FILES, code=trust_remote_code)
    if not any(folder.glob("*.safetensors")):
        raise no_safetensors(part, folder)
    kind = kind_of(config)
    chosen = head_of(kind).auto_class(reads)
    model, account = from_folder(folder, config, chosen, trust_remote_code=trust_remote_code)
    absent = sorted({*account["missing_keys"], *(name for name, *_ in account["mismatched_keys"])})
    if absent:
        why = f"{absent[0]} is not among its weights: it was trained for something else"
        raise ModelError(f"{source}: is no trained classifier", why, f"paceline train --model {source} --data FILE")
    tokenizer, max_length, overflow = None, None, None
    if reads == "text":
        tokenizer = tokenizer_source(part, config, None).get(())
        longest = min(tokenizer.model_max_length, max_positions(config) or _UNLIMITED)
        max_length = longest if longest < _UNLIMITED else LONGEST
        overflow = {"overflow": "tail"} if tokenizer.truncation_side == "left" else None
    processor = own_processor(part, config, None)
    saved = SavedModel(
        label_names=tuple(str(config.id2label[index]) for index in range(config.num_labels)),
        kind=kind,
        modality=reads,
        max_length=max_length,
        overflow=overflow,
        pairs=pairs,
        image=_image(part, config, processor) if reads == "image" else None,
    )
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, saved=saved, processor=processor)


def _image(part: ModelPart, config: PretrainedConfig, processor: Processor | None) -> ImageSettings:
    if processor is not None and processor.shape is not None:
        return image_settings(part, processor.shape, processor)
    size = preferred_size(part, config)
    if size is None:
        what = f"{part.source}: does not say what size its images have"
        raise ModelError(
            what, "neither config.json nor preprocessor_config.json has it", "add image_size to config.json"
        )
    return image_settings(part, (size, size, getattr(config, "num_channels", 3)))
