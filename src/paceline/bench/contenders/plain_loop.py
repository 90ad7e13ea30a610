"""The tutorials' loop in plain PyTorch, and what they add to it in turn.

Settings: ``pad`` (``max``: every text to the maximum, as the tutorials do; ``longest``: of its batch), ``precision``
(fp32, bf16, or fp16 with a GradScaler), ``compile``, ``train`` (``all`` or ``head``), ``data_parallel``.
"""

from __future__ import annotations

import functools

import torch
from job import (
    Meter,
    accuracy,
    batches,
    best_device,
    clip,
    finish,
    loader,
    make_optimizer,
    opened,
    padding,
    read_job,
    tell,
)


def main():
    tell("imported")
    job = read_job()
    settings, device, meter = job["settings"], best_device(), Meter(job)
    tokenizer, train, model = opened(job)
    model.to(device)
    if settings["train"] == "head":
        for parameter in model.base_model.parameters():
            parameter.requires_grad_(False)
    optimizer, schedule = make_optimizer(job, model)
    forward = torch.compile(model) if settings["compile"] else model
    if settings["data_parallel"]:
        forward = torch.nn.DataParallel(model)
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[settings["precision"]]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    autocast = functools.partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not None)
    collate = padding(tokenizer, to=job["max_length"] if settings["pad"] == "max" else None)
    tell("model")
    for batch in loader(job, train, collate, batches(job, len(train))):
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with autocast():
            loss = forward(**batch).loss.mean()  # of DataParallel's replicas
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip(job, model)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        meter.step(loss)
    finish(job, meter, model, tokenizer, accuracy(model, tokenizer, job, device, autocast))


if __name__ == "__main__":
    main()
