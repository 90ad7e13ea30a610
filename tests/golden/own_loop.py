"""A user's own loop around ``paceline.adopt``: its own model, optimizer, order, schedule and accumulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import paceline

EPOCHS, BATCH_SIZE, MICRO_BATCH_SIZE = 3, 12, 5


def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    tokens, labels = batch
    logits = model(tokens)
    return F.cross_entropy(logits, labels, reduction="sum"), logits.detach()


def train(folder: Path) -> None:
    """Leaves model.safetensors, optimizer.safetensors and metrics.json in ``folder``."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(50, 32),
        nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True),
        nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True),
        nn.Flatten(),
        nn.Linear(32 * 8, 2),
    )
    tokens = torch.randint(50, (64, 8))
    labels = (tokens < 25).sum(1).gt(4).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=18)
    engine = paceline.adopt(model, optimizer, loss_sum, clip_norm=1.0)
    metrics: list[dict[str, Any]] = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(tokens)).split(BATCH_SIZE):
            forward = engine.accumulate(
                [(tokens[ids], labels[ids]) for ids in batch.split(MICRO_BATCH_SIZE)], denominator=len(batch)
            )
            update = engine.update()
            logits = torch.cat(list(forward.extras))
            metrics.append(
                {
                    "loss": float(forward.loss),
                    "gradient_norm": float(update.norm),
                    "finite": bool(update.finite),
                    "correct": int((logits.argmax(1) == labels[batch]).sum()),
                    "learning_rate": schedule.get_last_lr()[0],
                }
            )
            schedule.step()
    folder.mkdir(parents=True)
    save_file(dict(model.state_dict()), folder / "model.safetensors")
    states = {
        f"{number}.{name}": torch.as_tensor(value)
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    save_file(states, folder / "optimizer.safetensors")
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
