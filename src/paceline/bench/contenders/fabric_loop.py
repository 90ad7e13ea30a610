"""The plain loop in Lightning Fabric: dynamic padding, precision and devices by Fabric.

Settings: ``precision`` and ``strategy`` (as Fabric names them, ``32-true``, ``16-mixed``, ``deepspeed_stage_2``), and
``devices``.
"""

from __future__ import annotations

import lightning
from job import Meter, accuracy, batches, finish, loader, make_optimizer, opened, padding, read_job, tell


def main():
    tell("imported")
    job = read_job()
    settings, meter = job["settings"], Meter(job)
    fabric = lightning.Fabric(
        accelerator="auto",
        devices=settings["devices"],
        strategy=settings["strategy"],
        precision=settings["precision"],
    )
    clip_norm, is_deepspeed = job["optimizer"]["clip_norm"], "deepspeed" in settings["strategy"]
    if is_deepspeed and clip_norm is not None:
        fabric.strategy.config["gradient_clipping"] = clip_norm  # its engine clips; Fabric refuses to
    fabric.launch()
    tokenizer, train, plain = opened(job)
    optimizer, schedule = make_optimizer(job, plain)
    model, optimizer = fabric.setup(plain, optimizer)
    order = [batch[fabric.global_rank :: fabric.world_size] for batch in batches(job, len(train))]
    data = fabric.setup_dataloaders(loader(job, train, padding(tokenizer), order), use_distributed_sampler=False)
    tell("model")
    for batch in data:
        loss = model(**batch).loss
        fabric.backward(loss)
        if clip_norm is not None and not is_deepspeed:
            fabric.clip_gradients(model, optimizer, max_norm=clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        meter.step(loss)
    quality = accuracy(model, tokenizer, job, fabric.device)  # every rank tests all of it
    if fabric.is_global_zero:
        finish(job, meter, plain, tokenizer, quality)
    fabric.barrier()  # a rank that ends first would break off the others' connections


if __name__ == "__main__":
    main()
