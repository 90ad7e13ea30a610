"""Where the milliseconds of a step go, beside the floor that this GPU's own rates set.

    python benchmarks/step_anatomy.py --model distilbert --batch 64 --out FILE.jsonl [--set techniques.compile=false]

Sequence lengths are drawn like IMDB's at 512 tokens (mean about 270, a seventh at 512), images are 32 x 32 (224 x 224
of resnet50), weights are random: speed does not depend on either's meaning. The first figure is the steady rate over
replayed steps; the parts are the kernels of one eager step, by torch.profiler. The floor of a part is its operations
or bytes over the rate that the same GPU reaches on a large matrix product or copy in the same process.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.data.dataset import Dataset, Images, Origins, Tokens
from paceline.data.order import OrderState, ShuffledOrder
from paceline.engine.numerics import numerics
from paceline.kernels import varlen_attention
from paceline.machine.facts import this_machine
from paceline.models.config import read_config
from paceline.models.load import load_model
from paceline.models.structure import blocks
from paceline.prepare.assemble import Assembled, assemble, assemble_build
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.tasks import task_for
from paceline.techniques.compile import fused

MODELS: dict[str, dict[str, Any]] = {
    "distilbert": {"model_type": "distilbert", "vocab_size": 30522},
    "bert-base": {"model_type": "bert", "vocab_size": 30522},
    "bert-large": {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "resnet18": {},
    "resnet50": {"model_type": "resnet"},
    "tiny": {"model_type": "distilbert", "vocab_size": 500, "dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128},
}
SIDES = {"resnet18": 32, "resnet50": 224}
"""Pixels of the images."""

IMAGES: dict[str, Any] = {
    "model": {"factory": "benchmarks.contenders.resnet:resnet18"},
    "data": {"source": "builtin:random", "augment": {"flip": True, "crop": 4}},
    "optimizer": {"type": "sgd", "lr": 0.01, "momentum": 0.9, "clip_norm": None},
}
"""What recipes/images.yaml says of the step."""

PARTS = (
    ("attention", ("flash", "fmha", "attention", "_attend_kernel", "one_query")),
    ("convolution", ("conv", "fprop", "dgrad", "wgrad", "implicit")),
    ("normalisation", ("bn_fw", "bn_bw", "batch_norm")),
    ("matmul", ("gemm", "cutlass", "nvjet", "xmma", "cublas", "splitk", "Kernel2")),
    ("optimizer", ("adam", "FusedAdam", "multi_tensor_apply", "lpnorm", "LpNorm")),
    ("fused pointwise", ("triton_", "_residual_norm", "_bias_gelu")),
    ("copies", ("Memcpy", "Memset", "copy")),
)


def lengths(samples: int, generator: np.random.Generator) -> np.ndarray:
    """Token counts like those of IMDB reviews cut at 512."""
    return np.clip(np.exp(generator.normal(5.45, 0.62, samples)), 16, 512).astype(np.int64)


def dataset(samples: int, vocabulary: int) -> Dataset:
    generator = np.random.default_rng(0)
    sizes = lengths(samples, generator)
    flat = generator.integers(100, vocabulary, sizes.sum()).astype(np.uint16)
    return Dataset(
        inputs=Tokens(flat, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), pad_id=0),
        labels=generator.integers(0, 2, samples),
        kind="classification",
        label_names=("negative", "positive"),
        splits={"train": np.arange(samples)},
        origins=Origins(("made",), np.zeros(samples, np.int32), np.arange(samples)),
        fingerprint="made",
    )


def images(samples: int, side: int) -> Dataset:
    generator = np.random.default_rng(0)
    return Dataset(
        inputs=Images(generator.integers(0, 256, (samples, side, side, 3), dtype=np.uint8)),
        labels=generator.integers(0, 10, samples),
        kind="classification",
        label_names=tuple(map(str, range(10))),
        splits={"train": np.arange(samples)},
        origins=Origins(("made",), np.zeros(samples, np.int32), np.arange(samples)),
        fingerprint="made",
    )


def flops(config: Any, sizes: np.ndarray, *, early: bool = False) -> float:
    """Forward and backward operations of real tokens: 6 a weight and token, 12 a layer, width and pair of tokens.

    Args:
        early: the last block computes keys and values of all tokens, and the rest once a text.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "hidden_dim", None) or config.intermediate_size
    block, tokens, pairs = 4 * hidden * hidden + 2 * hidden * inner, sizes.sum(), (sizes.astype(np.float64) ** 2).sum()
    if not early:
        return float(6 * layers * block * tokens + 12 * layers * hidden * pairs)
    keys = 2 * hidden * hidden
    once = 6 * (block - keys) * len(sizes) + 6 * keys * tokens + 12 * hidden * tokens
    return float(6 * (layers - 1) * block * tokens + 12 * (layers - 1) * hidden * pairs + once)


def build(recipe: Recipe, data: Dataset, steps: int) -> tuple[Assembled, Any]:
    config = None if recipe.model.factory else read_config(recipe.model)
    task = task_for(data.kind, data.label_names, recipe.task)
    labels = {"num_labels": task.num_outputs, "label_names": data.label_names, "kind": data.kind}
    of_texts = {} if data.is_images else {"vocabulary_size": config.vocab_size, "pad_id": 0}
    model = load_model(recipe.model, config, seed=0, image_shape=data.image_shape, **labels, **of_texts)
    found = [block for _, block in blocks(model)]
    normal = ((0.5,) * 3, (0.5,) * 3) if data.is_images else ((), ())
    made = assemble_build(recipe, model, data, task, torch.device(recipe.device), blocks=found, normalisation=normal)
    return assemble(recipe, made, steps), None if data.is_images else config


class Run:
    """Drives an engine over its own order."""

    def __init__(self, recipe: Recipe, assembled: Assembled, samples: int) -> None:
        loop = recipe.loop
        self.order = ShuffledOrder(
            np.arange(samples), micro_batch_size=loop.micro_batch_size or loop.batch_size, drop_last=True
        )
        self.at = OrderState(seed=0, epoch=0, step=0, batch_size=loop.batch_size)
        self.engine, self.layout = assembled.engine, assembled.build.layout
        self.index = 0

    def step(self) -> np.ndarray:
        plan = self.order.plan(self.at)
        batches = (self.layout.collate(ids) for ids in plan.microbatches)
        self.engine.accumulate_batches(batches, len(plan.samples), step=self.index)
        self.engine.update()
        self.at, self.index = self.order.after(self.at), self.index + 1
        return plan.samples


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matmul_rate(size: int = 8192) -> float:
    """bf16 operations a second of a large square product on random numbers."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize()
    started = time.perf_counter()
    for _ in range(20):
        a @ b
    synchronize()
    return 20 * 2 * size**3 / (time.perf_counter() - started)


def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy on the GPU."""
    source = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize()
    started = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    synchronize()
    return 10 * 2 * 2**30 / (time.perf_counter() - started)


def parts_of_a_step(run: Run) -> tuple[dict[str, float], list[tuple[str, float, int]]]:
    """Milliseconds of one eager step by kind of kernel, and its longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    step, runner = run.engine._step, run.engine._runner  # a measurement looks inside
    batch = run.layout.collate(run.order.plan(run.at).samples)
    share = runner.scalar(float(len(batch.labels)))

    def eager() -> None:
        step.micro(batch, share, True, True)
        step.apply_update()

    eager()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        eager()
        synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.device_time > 0:
            kernels[event.name].append(event.device_time / 1e3)
    parts: dict[str, float] = defaultdict(float)
    for name, times in kernels.items():
        part = next((part for part, marks in PARTS if any(mark in name for mark in marks)), "other")
        parts[part] += sum(times)
    longest = sorted(((name, sum(times), len(times)) for name, times in kernels.items()), key=lambda row: -row[1])
    return dict(parts), longest[:40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="distilbert")
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--parts", action="store_true", help="profile one eager step")
    parser.add_argument("--attention", choices=("flash", "short"), help="which kernel; default: the project's choice")
    parser.add_argument("--name", default="")
    chosen = parser.parse_args()
    if chosen.attention:
        varlen_attention.PREFER_SHORT = chosen.attention == "short"
    facts = this_machine()
    for batch in chosen.batch:
        started = time.perf_counter()
        side, model = SIDES.get(chosen.model), {"config": MODELS[chosen.model]}
        texts = {"model": model, "data": {"source": "builtin:random", "pad_to_multiple_of": 256}}
        settings = {**IMAGES, **({"model": model} if MODELS[chosen.model] else {})} if side else texts
        base = {"loop": {"batch_size": batch, "epochs": 3}, "techniques": {"compile": True} if facts.gpus else {}}
        recipe, _ = choose(Recipe.parse({**settings, **base}).with_settings(chosen.settings), facts)
        samples = (max(8000, 100 * batch) if facts.gpus else 400) if side != 224 else 10 * batch
        data = images(samples, side) if side else dataset(samples, MODELS[chosen.model]["vocab_size"])
        with numerics(recipe.techniques.precision, deterministic=False, device=recipe.device):
            measure(chosen, recipe, data, batch, started)
        torch._dynamo.reset()


def measure(chosen: argparse.Namespace, recipe: Recipe, data: Dataset, batch: int, started: float) -> None:
    assembled, config = build(recipe, data, 10_000)
    run = Run(recipe, assembled, len(data))
    sizes = np.ones(len(data), np.int64) if config is None else data.inputs.lengths
    run.engine.warm_up_on(run.layout.collate(np.arange(batch)), batch)
    synchronize()
    compiled = time.perf_counter() - started
    for _ in range(150 if recipe.device == "cuda" else 2):
        run.step()
    synchronize()
    warm = time.perf_counter() - started
    if recipe.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun, seen = time.perf_counter(), []
    for _ in range(chosen.steps if recipe.device == "cuda" else 5):
        seen.append(run.step())
    host = time.perf_counter() - begun
    synchronize()
    seconds = time.perf_counter() - begun
    ids = np.concatenate(seen)
    path = {**assembled.build.execution, **fused(assembled.build.model), **run.engine.execution}
    early = path.get("early_pooling") == "the last block"
    record: dict[str, Any] = {
        "name": chosen.name or chosen.model,
        "model": chosen.model,
        "batch": batch,
        "settings": chosen.settings,
        "step_ms": 1e3 * seconds / len(seen),
        "host_ms": 1e3 * host / len(seen),
        "samples_per_second": len(ids) / seconds,
        "tokens_per_step": float(sizes[ids].sum()) / len(seen),
        "compile_seconds": compiled,
        "warm_seconds": warm,
        "path": path,
    }
    if config is not None:
        record["mfu_790"] = flops(config, sizes[ids], early=early) / seconds / 790e12
        record["mfu_790_of_whole_passes"] = flops(config, sizes[ids]) / seconds / 790e12
    if recipe.device == "cuda":
        record |= {
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.memory_reserved() / 2**30,
            "card": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        if chosen.parts:
            parts, longest = parts_of_a_step(run)
            record |= {"parts_ms": parts, "longest": longest}
            record |= {"matmul_tflops": matmul_rate() / 1e12, "copy_tb": copy_rate() / 1e12}
    run.engine.close()
    with chosen.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    shown = {key: value for key, value in record.items() if key not in ("longest", "settings")}
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in shown.items()}), flush=True)
    for name, total, count in record.get("longest", [])[:28]:
        print(f"   {total:8.3f} ms  x{count:<4d} {name[:110]}", flush=True)


if __name__ == "__main__":
    main()
