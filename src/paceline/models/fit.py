"""A model's configuration made to fit the data, or refused: token embeddings, padding, the size of images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.contract.errors import ModelError
from paceline.models.config import counts_from_padding
from paceline.recipe.parts import ModelPart

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def require_start(part: ModelPart, config: PretrainedConfig) -> None:
    """Refuse a T5, or one of its kin, whose decoder has no token to begin with: only the configuration names it.

    Raises:
        ModelError: there is none.
    """
    if config.model_type not in ("mt5", "t5", "umt5") or getattr(config, "decoder_start_token_id", None) is not None:
        return
    setting = f"model.source = {part.source}" if part.source else "model.config"
    padding = getattr(config, "pad_token_id", None)
    raise ModelError(
        f"{setting}: a {config.model_type} without decoder_start_token_id",
        "its decoder begins every text with that token, as a rule the padding",
        f"--set model.config.decoder_start_token_id={0 if padding is None else padding}",
    )


def pads_when_built(part: ModelPart, config: PretrainedConfig) -> bool:
    """Whether the model is built around the tokenizer's padding, which freezes the row of its word embedding.

    Pretrained weights are built as their configuration says: where a decoder has no padding its tokenizer's end of text
    stands in, whose row is trained as any other. Positions that are counted from padding need one.
    """
    if getattr(config.get_text_config(), "pad_token_id", None) is None:
        return counts_from_padding(config)
    return part.source is None


def tell_padding(model: Any, pad_id: int) -> None:
    """Set the padding by which a decoder's head finds a text's last token."""
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = pad_id


def fit_tokens(part: ModelPart, config: PretrainedConfig, vocabulary_size: int | None) -> None:
    """Have ``config`` make a row for every token of the data, where its size is left open.

    Args:
        vocabulary_size: number of token ids of the tokenizer; None: the data are images.

    Raises:
        ModelError: the model reads text and the data are images, or it has too few rows.
    """
    if vocabulary_size is None:
        raise ModelError(
            f"model: a {config.model_type} reads text, but the data are images",
            fix="choose an image model, such as microsoft/resnet-18, or a model.config with model_type: vit",
        )
    given = part.source is not None or "vocab_size" in (part.config or {})
    reads = config.get_text_config()  # of models that read more than texts, the part that reads these
    rows = getattr(reads, "vocab_size", None)  # None: it has no table of tokens, as Canine
    if rows is not None and not given:
        reads.vocab_size = vocabulary_size
    elif rows is not None and vocabulary_size > rows and (part.source is None or part.tokenizer != "auto"):
        # tokens that were added to the model's own tokenizer are looked for among the texts
        setting = f"model.source = {part.source}" if part.source else f"model.config.vocab_size = {rows}"
        raise ModelError(
            f"{setting}: has {rows:,} token embeddings, but the tokenizer has {vocabulary_size:,} tokens",
            "tokens without an embedding cannot be read",
            f"leave model.tokenizer = {part.tokenizer} out, for the model's own; or, where it is the model's own with"
            f" further tokens, model.resize_token_embeddings({vocabulary_size}) in transformers"
            if part.source
            else "leave model.config.vocab_size out, or lower model.vocabulary_size; for builtin:random"
            f" --set data.random.vocabulary={rows}",
        )
    if part.source is None:
        # defaults of the family that point outside a smaller vocabulary; classifiers do not read them
        for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
            value = getattr(config, name, None)
            if isinstance(value, int) and value >= (rows if given and rows is not None else vocabulary_size):
                setattr(config, name, None)


def fit_images(part: ModelPart, config: PretrainedConfig, shape: tuple[int, int, int] | None) -> None:
    """Have ``config`` take images of the data's size and channels, where they are left open.

    Args:
        shape: height, width, channels; None: the data are texts.

    Raises:
        ModelError: the model reads images and the data are texts, or its first layer fits another shape.
    """
    if shape is None:
        raise ModelError(
            f"model: a {config.model_type} reads images, but the data are texts",
            fix="choose a text model, such as distilbert-base-uncased, or a model.config with model_type: bert",
        )
    height, width, channels = shape
    size: Any = height if height == width else (height, width)
    for name, found, data_setting in (("num_channels", channels, ""), ("image_size", size, "data.image_size")):
        wanted = getattr(config, name, None)
        if isinstance(wanted, list | tuple):  # of height and width
            found = type(wanted)((height, width))
        if wanted is None or wanted == found or (part.source is None and name not in (part.config or {})):
            if wanted is not None:
                setattr(config, name, found)
            continue
        pixels = isinstance(wanted, int) and data_setting
        raise ModelError(
            f"model: {name} = {wanted}, but the images have {found}",
            "the first layer's weights fit one shape only",
            f"set {data_setting}={wanted}" if pixels else f"choose a model with {name} = {found}",
        )
