"""Recipes of two layers and sixty texts, on which planted faults show.

Nothing of the source is imported until a recipe is written: by then it may be a copy with a fault.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROWS = 60
WORDS = {"good": ("wonderful", "laughed", "fine", "music"), "bad": ("dull", "worst", "nothing", "jokes")}
FILLER = ("the", "evening", "at", "cinema", "was", "long", "and", "actors", "film", "sound", "of", "it", "that")

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def rows() -> list[dict[str, str]]:
    """Texts of 4 to 40 words, a second text, and labels of several kinds."""
    found = []
    for index in range(ROWS):
        label = ("good", "bad", "good")[index % 3]
        length = 4 + index * 7 % 37
        text = [
            WORDS[label][(index + at) % 4] if at % 5 == 2 else FILLER[(index * 3 + at) % 13] for at in range(length)
        ]
        found.append(
            {
                "text": " ".join([f"film {index}:", *text]),
                "second": " ".join(FILLER[(index + at) % 13] for at in range(2 + index % 5)),
                "label": label,
                "tags": "|".join(["long"] * (length > 20) + ["good"] * (label == "good") + ["any"]),
            }
        )
    return found


def _bert(**changes: Any) -> dict[str, Any]:
    from tests.testing.tiny import tiny_bert_config

    return {"config": tiny_bert_config(**DROPOUT, **changes), "vocabulary_size": 300}


def _roberta() -> dict[str, Any]:
    from tests.testing.tiny import tiny_bert_config

    config = {**tiny_bert_config(**DROPOUT), "model_type": "roberta", "max_position_embeddings": 80}
    return {"config": config, "vocabulary_size": 300}


def _modernbert() -> dict[str, Any]:
    config = {
        "model_type": "modernbert",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "local_attention": 8,
        "classifier_pooling": "mean",
    }
    return {"config": config, "vocabulary_size": 300}


def _checkpoint(folder: Path) -> dict[str, Any]:
    """A classifier whose head names the classes, in another order than that of the alphabet."""
    from tests.testing.tiny import write_tiny_model

    source = write_tiny_model(folder / "checkpoint")
    path = source / "config.json"
    config = json.loads(path.read_text())
    config |= {"id2label": {"0": "good", "1": "bad"}, "label2id": {"good": 0, "bad": 1}}
    path.write_text(json.dumps(config))
    return {"source": str(source)}


RECIPES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "bert": lambda folder: {"model": _bert()},
    "lively": lambda folder: {"model": _bert(initializer_range=0.3)},
    "padded": lambda folder: {"model": _bert(), "techniques": {"packing": False}},
    "pairs": lambda folder: {"model": _bert(), "techniques": {"packing": False}, "data": {"pair": "second"}},
    "roberta": lambda folder: {"model": _roberta()},
    "modernbert": lambda folder: {"model": _modernbert()},
    "weighted": lambda folder: {"model": _bert(), "task": {"class_weights": "balanced"}},
    "tags": lambda folder: {
        "model": _bert(),
        "data": {"label": "tags", "label_separator": "|"},
        "task": {"label_smoothing": 0.1},
    },
    "average": lambda folder: {"model": _bert(), "optimizer": {"ema": {"decay": 0.9, "warmup": True}}},
    "cut": lambda folder: {"model": _bert(), "data": {"max_length": 8}},
    "cosine": lambda folder: {
        "model": _bert(),
        "optimizer": {"lr_scaling": "sqrt", "lr_scaling_base": 32, "clip_norm": 100.0},
        "schedule": {"type": "linear", "floor": 0.1},
    },
    "checkpoint": lambda folder: {"model": _checkpoint(folder)},
}
"""Name -> what differs from a recipe of nothing but data."""


def write_recipe(name: str, folder: Path) -> Path:
    """The recipe of this name and its data, in ``folder``."""
    with (folder / "reviews.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "second", "label", "tags"])
        writer.writeheader()
        writer.writerows(rows())
    changes = RECIPES[name](folder)
    data = {"source": str(folder / "reviews.csv"), "text": "text", "label": "label", "pair": None}
    plain = {"name": name, "device": "cpu", **changes, "data": {**data, **changes.get("data", {})}}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(plain))
    return path
