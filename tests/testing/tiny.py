"""Models so small that a test builds, trains and saves one in well under a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEXTS = (
    "The plot was thin but the actors were wonderful and the music was fine.",
    "A dull film: nothing happens, nobody cares, and it never ends.",
    "We laughed, we cried; what a wonderful evening at the cinema.",
    "Bad lighting, bad sound, bad jokes. The worst evening of the year.",
)
"""Texts that the tiny vocabulary is trained on."""


def tiny_bert_config(**changes: Any) -> dict[str, Any]:
    """``model.config`` of a BERT with two layers of 16 dimensions, without dropout; ``changes`` override it."""
    return {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **changes,
    }


def tiny_distilbert_config(**changes: Any) -> dict[str, Any]:
    """``model.config`` of a DistilBERT with two layers of 16 dimensions, without dropout."""
    return {
        "model_type": "distilbert",
        "dim": 16,
        "n_layers": 2,
        "n_heads": 2,
        "hidden_dim": 32,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
        **changes,
    }


def tiny_vit_config(**changes: Any) -> dict[str, Any]:
    """``model.config`` of a vision transformer with two layers, for images of 8 pixels a side."""
    return {
        "model_type": "vit",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "patch_size": 4,
        **changes,
    }


def tiny_resnet_config(**changes: Any) -> dict[str, Any]:
    """``model.config`` of a ResNet with two stages of two basic blocks."""
    return {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [2, 2],
        "layer_type": "basic",
        **changes,
    }


def write_tiny_model(
    folder: Path, settings: dict[str, Any] | None = None, *, num_labels: int = 2, seed: int = 0, dtype: str = "float32"
) -> Path:
    """A text classifier as the Hub holds them: config.json, model.safetensors and the files of its tokenizer.

    Args:
        folder: is created.
        settings: of the configuration; ``tiny_bert_config()`` by default.
        num_labels: of its head.
        seed: of its weights.
        dtype: that the weights are stored in, such as ``float16``.

    Returns:
        ``folder``.
    """
    import torch

    from paceline.models.config import read_config
    from paceline.models.load import load_model, quiet
    from paceline.models.tokenizers import tokenizer_source
    from paceline.recipe.parts import ModelPart

    part = ModelPart(config=settings or tiny_bert_config(), vocabulary_size=200)
    config = read_config(part)
    tokenizer = tokenizer_source(part, config, None).get(TEXTS)
    model: Any = load_model(
        part,
        config,
        num_labels=num_labels,
        label_names=[f"LABEL_{index}" for index in range(num_labels)],
        kind="classification",
        vocabulary_size=len(tokenizer),
        pad_id=tokenizer.pad_token_id,
        seed=seed,
    )
    with quiet():
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
