"""The runs whose results are written down as hashes: tiny recipes over sixty-four samples, and their data."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLES = 64
OWN_LOSS = "tests.golden.losses:cross_entropy"

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "patch_size": 4,
    "hidden_dropout_prob": 0.1,
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16],
    "depths": [2, 2],
    "layer_type": "basic",
}

BASE: Mapping[str, Any] = {
    "model.config": BERT,
    "model.vocabulary_size": 200,
    "data.splits.validation": 0.15,
    "data.splits.test": 0.15,
    "optimizer.lr": 1e-2,
    "loop.epochs": 3,
    "loop.batch_size": 12,
    "observe.console": "off",
    "observe.report": False,
    "device": "cpu",
    "deterministic": True,
}
"""Three epochs of four steps, the last of them smaller, with dropout and an evaluation an epoch."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the recipe, by their dotted paths, beside those of ``BASE``."""
    data: str = "texts.csv"
    ranks: int = 1
    launched: bool = False
    """By the command line, with --processes, in place of ``paceline.train`` on ranks that are there."""
    stop_at_call: int | None = None
    """The call of the loss, on the first rank, in which it is asked to stop; then it is resumed."""
    resumed_ranks: int | None = None
    """On how many ranks; None: as many as before."""
    used: bool = False
    """Whether the saved model is evaluated and predicts, too."""
    own_loop: bool = False
    """``paceline.adopt`` in tests/golden/own_loop.py; there is no recipe."""
    same_as: str | None = None
    """A row from which neither weights nor optimizer nor metrics may differ, on any machine."""


PADDED = {"techniques.packing": False}
MICRO = {"loop.micro_batch_size": 5}
STOPPABLE = {"task.loss": OWN_LOSS, **MICRO}
FSDP = {"parallel.strategy": "fsdp"}
CLIPPED = {"optimizer.clip_norm": 0.1}
IMAGES = {"model.config": {**VIT, "image_size": 8}}
BATCH_NORM = {"model.config": RESNET}

ROWS: Mapping[str, Row] = {
    # what is learned, and of what
    "text": Row(),
    "text, packed, whole last block": Row(settings={"techniques.packing": True, "techniques.early_pooling": False}),
    "text, padded": Row(settings=PADDED),
    "text, padded to multiples of 8": Row(settings={**PADDED, "data.pad_to_multiple_of": 8}),
    "text, cut": Row(settings={"data.max_length": 12}),
    "pair": Row(data="pairs.csv"),
    "pair, padded": Row(data="pairs.csv", settings=PADDED),
    "multi-label": Row(data="tags.csv", settings={"data.label": ["good", "long"]}),
    "regression": Row(data="scores.csv"),
    "images": Row(data="images", settings=IMAGES),
    "images, augmented": Row(
        data="images", settings={**IMAGES, "data.augment.flip": True, "data.augment.crop": 1, "data.augment.cutout": 2}
    ),
    "images, batch normalisation": Row(data="images", settings=BATCH_NORM),
    "pretrained": Row(settings={"model.config": None, "model.source": "pretrained/model"}),
    "pretrained, head": Row(settings={"model.config": None, "model.source": "pretrained/model", "model.train": "head"}),
    "pretrained, last block": Row(
        settings={"model.config": None, "model.source": "pretrained/model", "model.train": "last:1"}
    ),
    "own loss": Row(settings=STOPPABLE),
    "evaluated and predicting": Row(used=True),
    # how it is computed
    "micro-batches": Row(settings=MICRO),
    "micro-batches, padded": Row(settings={**MICRO, **PADDED}),
    "recompute": Row(settings={"techniques.recompute": True}, same_as="text"),
    "bf16": Row(settings={"techniques.precision": "bf16"}),
    "pure bf16": Row(settings={"techniques.precision": "pure_bf16"}),
    # how weights are updated
    "adam": Row(settings={"optimizer.type": "adam", "optimizer.weight_decay": 0.1}),
    "sgd": Row(settings={"optimizer.type": "sgd", "optimizer.weight_decay": 0.01}),
    "sgd without momentum": Row(
        settings={"optimizer.type": "sgd", "optimizer.momentum": 0, "optimizer.nesterov": False}
    ),
    "groups and cosine": Row(
        settings={
            "optimizer.groups": [
                {"match": "*classifier*", "lr": 0.03, "schedule": {"type": "constant", "warmup": 2}},
                {"match": "*embeddings*", "weight_decay": 0.2},
            ],
            "optimizer.lr_scaling": "sqrt",
            "optimizer.lr_scaling_base": 24,
            **CLIPPED,
            "schedule.type": "cosine",
            "schedule.floor": 0.1,
        }
    ),
    "no clipping": Row(settings={"optimizer.clip_norm": None, "optimizer.decay_all": True}),
    # how long it goes on
    "early stopping": Row(
        data="images",
        settings={
            **BATCH_NORM,
            "loop.epochs": 20,
            "loop.evaluate_every": 2,
            "loop.best_metric": "-loss",
            "loop.early_stopping": {"patience": 2, "min_delta": 0.01},
        },
    ),
    "last batch dropped, in order": Row(
        settings={"loop.drop_last": True, "loop.shuffle": False, "loop.max_steps": 7, "loop.save_best": False}
    ),
    "stopped and resumed": Row(settings=STOPPABLE, stop_at_call=20, same_as="own loss"),
    # on several ranks
    "ddp, 2 ranks": Row(ranks=2),
    "ddp, 2 ranks, launched": Row(ranks=2, launched=True, same_as="ddp, 2 ranks"),
    "ddp, 2 ranks, padded micro-batches": Row(ranks=2, settings={**PADDED, **MICRO}),
    "ddp, 2 ranks, sums in bf16": Row(ranks=2, settings={"parallel.reduce_dtype": "bf16"}),
    "ddp, 2 ranks, clipped": Row(ranks=2, settings=CLIPPED),
    "ddp, 2 ranks, sgd": Row(ranks=2, settings={"optimizer.type": "sgd"}),
    "ddp, 2 ranks, recompute": Row(ranks=2, settings={"techniques.recompute": True}, same_as="ddp, 2 ranks"),
    "ddp, 2 ranks, batch normalisation": Row(ranks=2, data="images", settings=BATCH_NORM),
    "ddp, 2 ranks, own loss": Row(ranks=2, settings=STOPPABLE),
    "ddp, 2 ranks, stopped and resumed": Row(
        ranks=2, settings=STOPPABLE, stop_at_call=14, same_as="ddp, 2 ranks, own loss"
    ),
    "ddp, 2 ranks, resumed on 1": Row(ranks=2, settings=STOPPABLE, stop_at_call=14, resumed_ranks=1),
    "ddp, 4 ranks": Row(ranks=4),
    "ddp, 4 ranks, padded": Row(ranks=4, settings=PADDED),
    "fsdp, 2 ranks": Row(ranks=2, settings=FSDP),
    "fsdp, 2 ranks, padded micro-batches": Row(ranks=2, settings={**FSDP, **PADDED, **MICRO}),
    "fsdp, 2 ranks, recompute": Row(ranks=2, settings={**FSDP, "techniques.recompute": True}, same_as="fsdp, 2 ranks"),
    "fsdp, 2 ranks, clipped": Row(ranks=2, settings={**FSDP, **CLIPPED}),
    "fsdp, 2 ranks, sgd": Row(ranks=2, settings={**FSDP, "optimizer.type": "sgd"}),
    "fsdp, 2 ranks, bf16": Row(ranks=2, settings={**FSDP, "techniques.precision": "bf16"}),
    "fsdp, 2 ranks, own loss": Row(ranks=2, settings={**FSDP, **STOPPABLE}),
    "fsdp, 2 ranks, stopped and resumed": Row(
        ranks=2, settings={**FSDP, **STOPPABLE}, stop_at_call=14, same_as="fsdp, 2 ranks, own loss"
    ),
    "fsdp, 4 ranks": Row(ranks=4, settings=FSDP),
    "fsdp, 4 ranks, shards of 2": Row(ranks=4, settings={**FSDP, "parallel.shard_size": 2}),
    # in a loop that is somebody else's
    "adopted": Row(own_loop=True),
}
"""What needs a GPU is not here: dp, fsdp with offload, adamw8bit, fp16, captured steps."""


def recipe(row: Row, place: Path) -> dict[str, Any]:
    """The whole recipe as plain data.

    Args:
        place: where ``write_data`` has written.
    """
    plain: dict[str, Any] = {}
    for path, value in {**BASE, "data.source": str(place / row.data), **row.settings}.items():
        *parents, name = path.split(".")
        part = plain
        for parent in parents:
            part = part.setdefault(parent, {})
        part[name] = str(place / value) if path == "model.source" else value
    return plain


GOOD, BAD = ("wonderful", "lovely", "superb", "fine"), ("dull", "awful", "boring", "worst")
FILLERS = ("the", "film", "was", "long", "and", "actors", "sang", "of", "an", "evening", "at", "sea", "again")


def text(number: int) -> str:
    """From 3 to 22 words; those of a few places tell the class, odd or even."""
    words = (BAD, GOOD)[number % 2]
    return " ".join(
        words[(number // 2 + at) % 4] if at % 3 == 1 else FILLERS[(number * 3 + at * at) % 13]
        for at in range(3 + number * 7 % 20)
    )


def write_data(place: Path) -> None:
    """All data that rows name, into ``place``."""
    from PIL import Image

    numbers = range(SAMPLES)
    _write(place / "texts.csv", ({"text": text(n), "label": "bg"[n % 2]} for n in numbers))
    _write(
        place / "pairs.csv",
        (
            {"premise": text(n), "hypothesis": text(n * 5 // 3 + 1), "label": "ny"[(n + n * 5 // 3) % 2]}
            for n in numbers
        ),
    )
    _write(place / "tags.csv", ({"text": text(n), "good": n % 2, "long": int(n * 7 % 20 > 9)} for n in numbers))
    _write(place / "scores.csv", ({"text": text(n), "label": n % 2 + n * 7 % 20 / 20} for n in numbers))
    for number in numbers:
        kind = number % 2
        # the brighter half is on the left or on top; everything else is noise without chance
        pixels = bytes(
            (number * 31 + at * 17) % 120 + 120 * ((at // 3 % 8 < 4) if kind else (at // 24 < 4)) for at in range(192)
        )
        file = place / "images" / ("top", "left")[kind] / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (8, 8), pixels).save(file)


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    rows = list(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
