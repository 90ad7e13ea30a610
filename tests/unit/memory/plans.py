"""Plans made by hand, and runs whose memory is a formula: what the search and the changes are tried on."""

from __future__ import annotations

from typing import Any

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import Facts, Gpu
from paceline.recipe import Recipe
from paceline.recipe.choose import STATE_BYTES

MIB, GIB = 2**20, 2**30

HERE = Facts(
    python="3.11.7",
    platform="Linux",
    cpu_model=None,
    cpu_count=2,
    memory_bytes=8 * GIB,
    versions={"torch": "2.13.0+cpu", "triton": None},
)
"""A laptop without a GPU."""

PARAMETERS = 335_000_000


def recipe(*settings: str) -> Recipe:
    plain: dict[str, Any] = {
        "name": "reviews",
        "model": {"source": "bert-large-uncased"},
        "data": {"source": "reviews.csv"},
        "loop": {"batch_size": 32},
    }
    return Recipe.parse(plain).with_settings(settings)


def memory_plan(total: int, **changes: Any) -> MemoryPlan:
    """A plan of this total, of which 300 MiB are the context's; all else is activations and parameters."""
    context = min(300 * MIB, total)
    reserved = total - context
    fields: dict[str, Any] = {
        "gpu": "Tesla V100-SXM2-32GB",
        "capacity": 32 * GIB,
        "allocated": reserved,
        "reserved": reserved,
        "context": context,
        "parts": {"activations": reserved - reserved // 4, "parameters": reserved // 4},
        "activations": {"attention": reserved - reserved // 4},
        "moment": "backward",
        "phases": {"forward": reserved // 2, "backward": reserved},
        "samples": 32,
        "slots": 32 * 512,
        "num_parameters": PARAMETERS,
        "num_trained": PARAMETERS,
        "assumed": ("512 tokens in every text",),
        "execution": {},
    }
    return MemoryPlan(**{**fields, **changes})


def bert_large(chosen: Recipe, gpu: Gpu) -> MemoryPlan:
    """Much like a real one of 512 tokens: weights, gradients and states, and 0.85 GiB of activations a sample in fp32;
    an evaluation keeps 0.05 GiB a sample."""
    loop, techniques = chosen.loop, chosen.techniques
    micro, held_out = loop.micro_batch_size or loop.batch_size, loop.evaluation_batch_size or 0
    a_sample = 0.85 * GIB * (0.63 if techniques.precision in ("bf16", "fp16") else 1)
    if techniques.recompute:
        a_sample /= 8
    parameters, states = 4 * PARAMETERS, STATE_BYTES[chosen.optimizer.type] * PARAMETERS
    step, evaluation = int(micro * a_sample), int(held_out * 0.05 * GIB)
    kept = max(step, evaluation)
    parts = {"activations": kept, "optimizer states": states, "parameters": parameters, "gradients": parameters}
    allocated = sum(parts.values())
    return memory_plan(
        allocated + 300 * MIB,
        gpu=gpu.name,
        capacity=gpu.memory_bytes,
        parts=dict(sorted(parts.items(), key=lambda part: -part[1])),
        activations={"linear layers": kept - kept // 4, "attention": kept // 4},
        moment="backward" if step >= evaluation else "evaluation",
        phases={"model": parameters, "backward": allocated - kept + step, "evaluation": allocated - kept + evaluation},
        samples=micro,
        slots=micro * 512,
    )
