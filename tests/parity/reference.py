"""The other side of every parity test: a training loop written out by hand, plain PyTorch only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

STEPS, SAMPLES, LENGTHS, CLASSES, VOCABULARY = 20, 64, (3, 24), 3, 120


def tiny_model(dropout: float = 0.1, **settings: Any) -> nn.Module:
    """A DistilBERT small enough to train for twenty steps in a second; the same weights each time."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    sizes = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 32, **settings}
    drops = {"dropout": dropout, "attention_dropout": dropout, "seq_classif_dropout": dropout}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = DistilBertConfig(vocab_size=VOCABULARY, num_labels=CLASSES, **sizes, **drops)
        return DistilBertForSequenceClassification(config)


def samples() -> tuple[list[np.ndarray], np.ndarray]:
    """Token sequences of uneven length, and labels."""
    rng = np.random.default_rng(3)
    texts = [rng.integers(5, VOCABULARY, rng.integers(*LENGTHS)) for _ in range(SAMPLES)]
    return texts, rng.integers(0, CLASSES, SAMPLES)


def padded(texts: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [S, L]."""
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.from_numpy(text)
        mask[row, : len(text)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def batches(batch_size: int, seed: int = 0, steps: int = STEPS) -> list[np.ndarray]:
    """Sample ids of each step: every epoch a permutation drawn from (seed, epoch), the last batch smaller."""
    found: list[np.ndarray] = []
    epoch = 0
    while len(found) < steps:
        order = np.random.default_rng((seed, epoch)).permutation(np.arange(SAMPLES))
        found += [order[i : i + batch_size] for i in range(0, SAMPLES, batch_size)]
        epoch += 1
    return found[:steps]


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The documented seed of a forward pass: NumPy's SeedSequence over (seed, step, micro-batch, rank)."""
    return int(np.random.SeedSequence((seed, step, micro_batch, 0)).generate_state(1, np.uint64)[0])


def linear_schedule(step: int, total: int, warmup: int) -> float:
    """Linear warm-up from 0, then linear decay to 0."""
    return step / max(1, warmup) if step < warmup else (total - step) / max(1, total - warmup)


def train_by_hand(
    model: nn.Module,
    *,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batch_size: int = 8,
    micro_batch_size: int | None = None,
    warmup: int = 2,
    clip_norm: float | None = 1.0,
    seed: int = 0,
    wrap: Callable[[], Any] | None = None,
    steps: int = STEPS,
    total_steps: int | None = None,
    factor: Callable[[int], float] | None = None,
) -> list[float]:
    """Twenty steps of the plainest loop there is; returns the losses.

    Args:
        factor: step -> what every learning rate is multiplied by; None: the linear schedule.
    """
    texts, labels = samples()
    optimizer = make_optimizer(model)
    base = [group["lr"] for group in optimizer.param_groups]
    losses = []
    factor = factor or (lambda step: linear_schedule(step, total_steps or steps, warmup))
    model.train()
    for step, ids in enumerate(batches(batch_size, seed, steps)):
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * factor(step)
        optimizer.zero_grad()
        size = micro_batch_size or len(ids)
        total = 0.0
        for index, start in enumerate(range(0, len(ids), size)):
            chosen = ids[start : start + size]
            torch.manual_seed(dropout_seed(seed, step, index))
            inputs = padded([texts[i] for i in chosen])
            with wrap() if wrap else torch.enable_grad():
                logits = model(**inputs).logits
            losses_each = F.cross_entropy(logits.float(), torch.from_numpy(labels[chosen]), reduction="none")
            loss = losses_each.sum() / len(ids)
            loss.backward()
            total += loss.item()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(total)
    return losses
