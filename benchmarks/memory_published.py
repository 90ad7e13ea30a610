"""A figure that others published, predicted: BERT-large under the Hugging Face Trainer on a V100.

    python benchmarks/memory_published.py

The Hugging Face documentation ("Model training anatomy", 2021 to 2023) trains bert-large-uncased in fp32 on 512 random
tokens, batch 4 a GPU, with transformers' eager attention of that time and AdamW, and reads NVML: 311 MB for the context
and kernels, 1,599 MB with the model loaded, 11,493 MB after training. The loop below does the same on a device that is
not there. Nobody here has had a V100: what it shows is unverified but for these three figures.
"""

from __future__ import annotations

import os
import sys

import torch
from fixed_segments import Block, FixedSegments
from transformers import BertConfig, BertForSequenceClassification

from paceline.machine.gpus import gpu_for
from paceline.memory.anatomy import constants_for
from paceline.memory.ledger import Ledger
from paceline.memory.stand_in import stand_in

MIB = 2**20
LOADED, TRAINED = 1599, 11493
"""NVML's MiB, as published."""
BATCH, LENGTH = 4, 512


def trained(ledger: Ledger, device: torch.device) -> int:
    """Load the model and make two steps; returns the number of events when the model was there."""
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    config._attn_implementation = "eager"
    with ledger.during("model"), device:
        model = BertForSequenceClassification(config).train()
    loaded = len(ledger.events)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=5e-5, foreach=True)
    for _ in range(2):
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device=device)
        labels = torch.zeros(BATCH, dtype=torch.long, device=device)
        with ledger.during("forward"):
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
        del loss
        with ledger.during("update"):
            torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
    return loaded


def main() -> None:
    gpu = gpu_for("v100-32gb")
    constants = constants_for(gpu)
    allocator, blocks = FixedSegments(), dict[int, Block]()
    with stand_in(gpu) as (device, ledger):
        loaded = trained(ledger, device)
        reserved = []
        for number, event in enumerate(ledger.events):
            if number == loaded:
                reserved.append(allocator.reserved)
                for size in constants.workspaces:
                    allocator.allocate(size)
            if event is not None and event >= 0:
                blocks[event] = allocator.allocate(ledger.allocations[event].num_bytes)
            elif event is not None:
                allocator.free(blocks.pop(~event))
        reserved.append(allocator.reserved)
    for what, taken, published in zip(("model loaded", "after training"), reserved, (LOADED, TRAINED), strict=True):
        predicted = (taken + constants.context) / MIB
        print(
            f"{what:15} predicted {predicted:8,.0f} MiB  published {published:6,} MiB  {predicted / published - 1:+.1%}"
        )
    sys.stdout.flush()
    os._exit(0)  # with the stand-in registered, torch does not always survive the end of the interpreter


if __name__ == "__main__":
    main()
