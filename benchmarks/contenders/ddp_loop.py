"""The DDP tutorials' loop, timed: torch's DistributedDataParallel, a DistributedSampler, padded batches. For torchrun.

Settings: ``precision`` (bf16, by autocast, or fp32), ``pad`` (lengths are rounded up to a multiple of it), ``workers``,
``batch_size`` (of all ranks together), ``warm_up`` and ``measured``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import get_linear_schedule_with_warmup
from workload import (
    LOCAL_RANK,
    WORLD_SIZE,
    Recorded,
    Settings,
    Texts,
    Window,
    allow_planned_attention,
    padding,
    read_spec,
    start,
    text_model,
)


def main(folder: Path, settings: Settings) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", LOCAL_RANK) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    allow_planned_attention(settings["pad"])
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        train(folder, settings, device)
        dist.barrier()  # a rank that ends first breaks off connections that others still read from
    finally:
        dist.destroy_process_group()


def train(folder: Path, settings: Settings, device: torch.device) -> None:
    spec, window = read_spec(folder), Window(settings)
    steps, size = settings["warm_up"] + settings["measured"], settings["batch_size"] // WORLD_SIZE
    model = text_model(folder).to(device).train()
    ddp = DistributedDataParallel(
        model,
        device_ids=[LOCAL_RANK] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec["lr"], weight_decay=spec["weight_decay"], fused=device.type == "cuda"
    )
    schedule = get_linear_schedule_with_warmup(optimizer, round(spec["warmup"] * steps), steps)
    ids = np.load(folder / "train.npy")
    dataset = Texts(folder, ids)
    sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    recorded = Recorded(sampler)
    loader = DataLoader(
        dataset,
        batch_size=size,
        sampler=recorded,
        collate_fn=padding(settings["pad"]),
        num_workers=settings["workers"],
        persistent_workers=settings["workers"] > 0,
        pin_memory=device.type == "cuda",
        drop_last=True,
    )
    for batch in batches(loader, sampler, steps):
        moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings["precision"] == "bf16"):
            loss = ddp(**moved).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec["clip_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        window.update(loss)
    window.report(folder, ids[recorded.whole_batches(size)], model)


def batches(loader: DataLoader, sampler: DistributedSampler, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """As many batches as steps, in another order each epoch."""
    done, epoch = 0, 0
    while done < steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield batch
            done += 1
            if done == steps:
                return
        epoch += 1


if __name__ == "__main__":
    start(main)
