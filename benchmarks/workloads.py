"""Makes a workload folder out of a recipe: what contenders/workload.py reads, in arrays and JSON.

    python benchmarks/workloads.py RECIPE FOLDER --set KEY=VALUE ...

The samples, their encoding, the split and the order of training are those of paceline with the same recipe, so that
everybody can be given identical batches.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.data.dataset import Dataset, Images, Tokens
from paceline.data.order import OrderState, ShuffledOrder
from paceline.models.config import read_config
from paceline.models.load import load_model
from paceline.models.structure import blocks
from paceline.prepare.preparation import encoded
from paceline.recipe import Recipe
from paceline.tasks import task_for

EPOCHS = 8
"""Epochs of order that a workload holds; contenders say so if they run out."""


def write_dataset(folder: Path, dataset: Dataset) -> None:
    """Samples, labels and splits as arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(dataset.inputs, Images):
        np.save(folder / "pixels.npy", dataset.inputs.pixels)
    else:
        np.save(folder / "flat.npy", dataset.inputs.flat)
        np.save(folder / "offsets.npy", dataset.inputs.offsets)
    np.save(folder / "labels.npy", dataset.labels)
    for split, ids in dataset.splits.items():
        np.save(folder / f"{split}.npy", ids)


def training_order(recipe: Recipe, dataset: Dataset) -> np.ndarray:
    """Sample ids in the order in which paceline trains, int64 [EPOCHS, n]."""
    train = dataset.splits["train"]
    order = ShuffledOrder(train, micro_batch_size=len(train), shuffle=recipe.loop.shuffle)
    epochs = [OrderState(seed=recipe.seed, epoch=epoch, step=0, batch_size=len(train)) for epoch in range(EPOCHS)]
    return np.stack([order.plan(epoch).samples for epoch in epochs])


def work(model: nn.Module, dataset: Dataset) -> dict[str, Any]:
    """Floating-point operations that the model asks for, forward and backward, whoever runs it; and those that are left
    where the last block is pooled early.

    Text: 6 a weight of the blocks' matrices and token, and 12 x layers x width a squared length for attention
    (2 multiply-adds forward, twice that backward; Chowdhery et al. 2022, appendix B). Embeddings, head, norms and
    padding count nothing. Images: matrix products and convolutions as torch's own counter counts them.
    """
    if isinstance(dataset.inputs, Tokens):
        layers = [block for _, block in blocks(model)]
        weights = [sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear)) for layer in layers]
        width: Any = getattr(model.config, "hidden_size", 0)
        # of the last block, keys and values of every position and one query a text
        once = weights[-1] - 2 * width * width
        early = {
            "flops_per_token": 6 * (sum(weights) - once) + 12 * width,
            "flops_per_squared_length": 12 * (len(layers) - 1) * width,
            "flops_per_sample": 6 * once,
        }
        whole = {"flops_per_token": 6 * sum(weights), "flops_per_squared_length": 12 * len(layers) * width}
        return {**whole, "early_pooling": early}
    height, wide, channels = dataset.inputs.pixels.shape[1:]
    with FlopCounterMode(display=False) as counter:
        model(torch.empty((2, channels, height, wide), device="meta")).sum().backward()
    return {"flops_per_sample": counter.get_total_flops() / 2}


def write_workload(folder: Path, recipe: Recipe) -> None:
    """The whole folder; spec.json is written last and tells that it is complete."""
    dataset, tokenizer = encoded(recipe)
    write_dataset(folder, dataset)
    np.save(folder / "order.npy", training_order(recipe, dataset))
    task = task_for(dataset.kind, dataset.label_names, recipe.task)
    is_text = isinstance(dataset.inputs, Tokens)
    with torch.device("meta"):
        model = load_model(
            recipe.model,
            read_config(recipe.model),
            num_labels=task.num_outputs,
            label_names=dataset.label_names,
            kind=dataset.kind,
            vocabulary_size=(len(tokenizer) if tokenizer else recipe.data.random.vocabulary) if is_text else None,
            pad_id=dataset.inputs.pad_id if isinstance(dataset.inputs, Tokens) else None,
            image_shape=dataset.inputs.pixels.shape[1:] if isinstance(dataset.inputs, Images) else None,
            seed=recipe.seed,
        )
    if is_text:
        model.config.save_pretrained(folder / "model")
    spec = {
        "num_labels": task.num_outputs,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "max_length": recipe.data.max_length,
        "lr": recipe.optimizer.lr,
        "weight_decay": recipe.optimizer.decay,
        "clip_norm": recipe.optimizer.clip_norm,
        "warmup": recipe.schedule.warmup,
        **work(model, dataset),
    }
    (folder / "spec.json").write_text(json.dumps(spec, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    arguments = parser.parse_args()
    write_workload(arguments.folder, Recipe.load(arguments.recipe).with_settings(arguments.settings))


if __name__ == "__main__":
    main()
