"""Traces of whole runs on an H200 that is not there, for scripts of checks.

The models are tiny, and every trace is one of a run that a recipe describes, by the engine's own steps. Each is made in
a process that is forked from this one, which has imported what they need.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import json
import os
import traceback
from dataclasses import dataclass
from typing import Any

import torch._dynamo
import transformers.models.bert.modeling_bert  # noqa: F401
from torch import nn
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from paceline.contract.records import Decision, MemoryPlan
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory import trace as tracing
from paceline.memory.anatomy import plan_of
from paceline.memory.subject import Subject, subject_of
from paceline.models.structure import set_trained
from paceline.recipe import Recipe
from paceline.recipe.choose import choose

GPU = gpu_for("h200")
LABELS = 2
ALIGNMENT = 64
"""Elements: where a weight begins in the flat buffers of the engine."""

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 130,
    "vocab_size": 1000,
}
BERT: dict[str, Any] = {"model_type": "bert", **SIZES}

PLAIN = ("techniques.fusion=false", "techniques.compile=false", "techniques.capture=false")
"""The settings without which a trace is quickest."""


@dataclass(frozen=True)
class Found:
    """One run's trace, and what is known of its model without it."""

    plan: MemoryPlan
    events: int
    """A digest of all events and their sizes."""
    weights: tuple[int, ...]
    """Numbers in each weight."""
    trained: tuple[int, ...]
    """The same, of those that are trained."""

    @property
    def kept(self) -> int:
        """Bytes of activations at the peak."""
        return self.plan.parts["activations"]


def convolutional(num_labels: int) -> nn.Module:
    """For images of 32 x 32: of a person's own factory."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_labels),
    )


def asking(num_labels: int) -> nn.Module:
    """Looks at numbers to decide what to do, which a plan has none of."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convolutional(num_labels)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.inner(pixel_values if pixel_values.mean() > 0 else -pixel_values)

    return Asking()


def recipe(model: dict[str, Any], *settings: str) -> Recipe:
    """Of a configuration, or of a factory: ``{"factory": ...}``."""
    images = "factory" in model or "patch_size" in model or model["model_type"] == "resnet"
    data: dict[str, Any] = {"source": "builtin:random", "max_length": 64}
    shape = {"image": [32, 32, 3]} if images else {"length": 64}
    data["random"] = {"samples": 128, "vocabulary": 1000, **shape}
    part = model if "factory" in model else {"config": model}
    base = {"model": part, "data": data, "loop": {"batch_size": 16, "epochs": 1}}
    return Recipe.parse(base).with_settings([*PLAIN, *settings])


@functools.cache
def _traced(config: str, settings: tuple[str, ...]) -> Found:
    reads, writes = os.pipe()
    gc.freeze()  # a trace collects what it leaves in cycles: not what it was forked with
    child = os.fork()
    if child == 0:
        with os.fdopen(writes, "w") as out:
            try:
                json.dump(_in_this_process(recipe(json.loads(config), *settings)), out)
            except BaseException:
                json.dump(traceback.format_exc(), out)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        said = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        raise RuntimeError(f"{settings}: the trace ended with {status}")
    found = json.loads(said)
    if isinstance(found, str):
        raise RuntimeError(found)
    plan = found.pop("plan")
    decisions = tuple(Decision(**decision) for decision in plan["decisions"])
    return Found(plan=MemoryPlan(**{**plan, "decisions": decisions}), **found)


def traced(*settings: str, config: dict[str, Any] = BERT) -> Found:
    """The run of a model with these settings, PLAIN but for them; each is traced once."""
    return _traced(json.dumps(config), settings)


def _in_this_process(asked: Recipe) -> dict[str, Any]:
    chosen, _ = choose(asked, facts_with([GPU], this_machine()))
    subject = subject_of(chosen)
    found = tracing.trace(subject, GPU)
    sizes = [(made.num_bytes, made.operator, made.phase, made.name) for made in found.allocations]
    model = _model(subject)
    plan = dataclasses.asdict(plan_of(found, subject, GPU))
    return {
        "plan": plan,
        "events": hash((tuple(found.events), json.dumps(sizes))),
        "weights": [p.numel() for p in model.parameters()],
        "trained": [p.numel() for p in model.parameters() if p.requires_grad],
    }


def _model(subject: Subject) -> nn.Module:
    """As transformers, or the factory, builds it."""
    if subject.config is None:
        return globals()[str(subject.recipe.model.factory).partition(":")[2]](LABELS)
    images = subject.dataset.is_images
    kind: Any = AutoModelForImageClassification if images else AutoModelForSequenceClassification
    config = copy.deepcopy(subject.config)
    config.num_labels = LABELS
    with torch.device("meta"):
        model: nn.Module = kind.from_config(config)
    set_trained(model, subject.recipe.model.train)
    return model


def flat(sizes: tuple[int, ...], bytes_each: int = 4) -> int:
    """Bytes of flat buffers of weights of these sizes."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) * bytes_each


def assert_near(found: int, expected: int, slack: int = 4096) -> None:
    """Up to the few numbers that a step keeps beside: rates, counters, losses."""
    assert 0 <= found - expected <= slack, f"{found:,} bytes, expected {expected:,}"
