"""Plain training loops of transformers' BERT, traced as on an H200: what ``test_measured.py`` holds beside a GPU.

The loops are hand-written and as they were on the GPU: gradients clipped and AdamW's update by torch's ``foreach``
functions unless said, two steps, texts of one length without a mask.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.fixed_segments import Block, FixedSegments
from paceline.machine.gpus import gpu_for
from paceline.memory.anatomy import PRODUCTS, constants_for
from paceline.memory.ledger import Ledger
from paceline.memory.stand_in import stand_in
from tests.unit.memory.apart import answer

GPU = gpu_for("h200")
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


@dataclass(frozen=True)
class Loop:
    """A run on the GPU."""

    samples: int = 4
    length: int = 512
    large: bool = False
    attention: str = "sdpa"
    bf16: bool = False
    recompute: bool = False
    fused: bool = False
    """AdamW's update in one kernel."""

    def run(self, device: torch.device, ledger: Ledger) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(**(LARGE if self.large else {}), attn_implementation=self.attention)
        with device, ledger.during("model"):
            model: Any = BertForSequenceClassification(config).train()
        if self.recompute:
            for layer in model.bert.encoder.layer:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        parameters = list(model.parameters())
        ledger.name("parameters", parameters)
        ledger.name("buffers", model.buffers())
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=self.fused, foreach=not self.fused)
        for _ in range(2):
            with ledger.during("batch"):
                ids = torch.zeros(self.samples, self.length, dtype=torch.long, device=device)
                labels = torch.zeros(self.samples, dtype=torch.long, device=device)
            with ledger.during("forward"):
                narrow = torch.autocast(device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext()
                with narrow:
                    loss = model(input_ids=ids, labels=labels).loss
                loss.backward()
            del loss
            ledger.name("gradients", [p.grad for p in parameters])
            with ledger.during("update"):
                torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad()


LOOPS = {
    "base, fp32": Loop(),
    "base, bf16": Loop(bf16=True),
    "base, fp32, recomputed, fused AdamW": Loop(recompute=True, fused=True),
    "large, fp32, eager attention": Loop(large=True, attention="eager"),
}


def plan(loop: Loop, device: torch.device, ledger: Ledger) -> dict[str, Any]:
    """What the GPU would show, in bytes."""
    gc.collect()
    gc.disable()
    start, first = len(ledger.events), len(ledger.allocations)
    loop.run(device, ledger)
    gc.enable()
    gc.collect()
    events = [event for event in ledger.events[start:] if event is not None and max(event, ~event) >= first]
    constants = constants_for(GPU)
    allocator, blocks, threads = FixedSegments(), dict[int, Block](), set[bool]()
    for event in events:
        if event < 0:
            allocator.free(blocks.pop(~event))
            continue
        made = ledger.allocations[event]
        if made.operator in PRODUCTS and made.beside not in threads:
            threads.add(made.beside)
            allocator.allocate(constants.workspace(beside=made.beside))
        blocks[event] = allocator.allocate(made.num_bytes)
    return {"allocated": allocator.peak_allocated, "reserved": allocator.reserved}


if __name__ == "__main__":
    with stand_in(GPU) as (planned, entries):
        answer({name: plan(loop, planned, entries) for name, loop in LOOPS.items()})
