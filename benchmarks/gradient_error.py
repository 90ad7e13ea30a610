"""How far are a step's gradients from exact ones, on the plain path and with each technique, at a model's own weights?

    python benchmarks/gradient_error.py --model RUN_FOLDER/model --data imdb.jsonl.gz --out FILE.jsonl

Rounding in bf16 moves a gradient by some percent, more where attention has grown sharp: weights that have been trained
for a while say more than new ones. Every variant is given the same weights and micro-batches, through the engine's own
``accumulate``, at a learning rate that changes nothing. Without dropout each gradient is compared with that of the
plain path in fp32; with it, where no two agree, the sizes of gradients are compared over many draws.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.contract.errors import PacelineError
from paceline.data.dataset import Dataset
from paceline.engine.numerics import numerics
from paceline.kernels import varlen_attention
from paceline.machine.facts import this_machine
from paceline.models.config import read_config
from paceline.models.load import load_model
from paceline.models.structure import blocks
from paceline.prepare.assemble import assemble, assemble_build
from paceline.prepare.preparation import encoded
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.tasks import task_for

Gradient = dict[str, Tensor]
TECHNIQUES = ("packing", "early_pooling", "fused_qkv", "fusion", "embedding_gradient", "compile", "capture")
PLAIN = dict.fromkeys(TECHNIQUES, False)
EXACT = "exact"
VARIANTS: dict[str, dict[str, Any]] = {
    EXACT: {**PLAIN, "precision": "fp32"},
    "plain": PLAIN,
    "packed, FlashAttention-2": {**PLAIN, "packing": True},
    "packed": {**PLAIN, "packing": True},
    "fused_qkv": {**PLAIN, "packing": True, "fused_qkv": True},
    "early_pooling": {**PLAIN, "packing": True, "early_pooling": True},
    "fusion": {**PLAIN, "packing": True, "fusion": True},
    "capture": {**PLAIN, "packing": True, "capture": True},
    "all but compile": {**dict.fromkeys(TECHNIQUES, True), "compile": False},
    "all": dict.fromkeys(TECHNIQUES, True),
}
WITH_DROPOUT = ("plain", "packed, FlashAttention-2", "packed", "all but compile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with weights and tokenizer")
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--draws", type=int, default=8, help="of dropout, a micro-batch")
    others = [name for name in VARIANTS if name != EXACT]
    parser.add_argument("--only", nargs="+", choices=others, default=others, help="beside the exact one")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    base = {
        "model": {"source": str(chosen.model.resolve())},
        "data": {"source": chosen.data, "split": None, "splits": {"train": 2000, "validation": 0, "test": 0}},
        "optimizer": {"type": "adam", "lr": 1e-30, "weight_decay": 0, "clip_norm": None},
        "schedule": {"type": "constant", "warmup": 0},
        "loop": {"batch_size": chosen.batch},
        "techniques": {"precision": "bf16"},
    }
    try:
        data, tokenizer = encoded(Recipe.parse(base))
    except PacelineError as error:
        raise SystemExit(str(error)) from error
    exact: list[Gradient] = []
    for name in (EXACT, *chosen.only):
        torch._dynamo.reset()
        varlen_attention.PREFER_SHORT = "FlashAttention" not in name
        techniques = {**base["techniques"], **VARIANTS[name]}
        recipe, _ = choose(Recipe.parse({**base, "techniques": techniques}), this_machine())
        found: dict[str, list[float]] = defaultdict(list)
        for index, gradient in enumerate(gradients(recipe, data, tokenizer, chosen, draws=1, dropout=False)):
            if len(exact) < chosen.batches:
                exact.append(gradient)
            compare(gradient, exact[index], found)
        ratios, errors = found.pop("norm over exact"), found.pop("error")
        record = {"variant": name, "error": quantiles(errors), "norm_over_exact": quantiles(ratios)}
        worst = sorted(((float(np.median(each)), weight) for weight, each in found.items()), reverse=True)[:6]
        write(chosen.out, {**record, "worst_weights": {weight: error for error, weight in worst}})
        if name in WITH_DROPOUT and chosen.draws:
            drawn = gradients(recipe, data, tokenizer, chosen, draws=chosen.draws, dropout=True)
            norms = [norm(gradient.values()) for gradient in drawn]
            write(chosen.out, {"variant": name, "norm_with_dropout": quantiles(norms)})


def gradients(
    recipe: Recipe, data: Dataset, tokenizer: Any, chosen: argparse.Namespace, *, draws: int, dropout: bool
) -> Iterator[Gradient]:
    """The gradient of each micro-batch by name of the weight; ``draws`` times one after the other."""
    config, device = read_config(recipe.model), torch.device(recipe.device)
    task = task_for(data.kind, data.label_names, recipe.task)
    model = load_model(
        recipe.model,
        config,
        num_labels=task.num_outputs,
        label_names=data.label_names,
        kind=data.kind,
        vocabulary_size=len(tokenizer),
        pad_id=tokenizer.pad_token_id,
    )
    if not dropout:
        without_dropout(model)
    with numerics(recipe.techniques.precision, deterministic=False, device=recipe.device):
        found = [block for _, block in blocks(model)]
        build = assemble_build(recipe, model, data, task, device, blocks=found, normalisation=((), ()))
        engine = assemble(recipe, build, 100_000).engine
        torch.manual_seed(0)
        for index in range(chosen.batches):
            ids = np.arange(index * chosen.batch, (index + 1) * chosen.batch) % len(data)
            for draw in range(draws):
                engine.accumulate_batches(iter([build.layout.collate(ids)]), len(ids), step=index * draws + draw)
                yield {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                engine.update()
        engine.close()


def compare(gradient: Gradient, exact: Gradient, found: dict[str, list[float]]) -> None:
    """Add to ``found`` the error of the whole and of each weight, as shares of the exact gradient's norm."""
    off = {name: gradient[name] - tensor for name, tensor in exact.items()}
    whole = norm(exact.values())
    found["error"].append(norm(off.values()) / whole)
    found["norm over exact"].append(norm(gradient.values()) / whole)
    errors = torch.stack(torch._foreach_norm(list(off.values()))).tolist()
    for name, error in zip(off, errors, strict=True):
        found[name].append(error / whole)


def norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack(torch._foreach_norm(list(tensors))).double().norm())


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def quantiles(values: list[float]) -> dict[str, float]:
    at = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "worst": 1.0}
    return {name: float(np.quantile(values, q)) for name, q in at.items()}


def write(out: Path, record: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    figures = {k: {n: round(x, 4) for n, x in v.items()} for k, v in record.items() if k != "variant"}
    print(f"{record['variant']:28s} {figures}", flush=True)


if __name__ == "__main__":
    main()
