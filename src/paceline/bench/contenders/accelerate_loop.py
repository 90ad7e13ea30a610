"""The plain loop with Hugging Face Accelerate, and what its tutorials add in turn.

Settings: ``precision`` (no, bf16, fp16), ``accumulation`` (micro-batches a step), ``recompute`` (gradient
checkpointing) and ``eight_bit`` (bitsandbytes' AdamW).
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from job import Meter, accuracy, batches, finish, loader, make_optimizer, opened, padding, read_job, tell


def main():
    tell("imported")
    job = read_job()
    settings, meter = job["settings"], Meter(job)
    pieces = settings["accumulation"]
    accelerator = Accelerator(mixed_precision=settings["precision"], gradient_accumulation_steps=pieces)
    tokenizer, train, model = opened(job)
    if settings["recompute"]:
        model.gradient_checkpointing_enable()
    kind = None
    if settings["eight_bit"]:
        from bitsandbytes.optim import AdamW8bit as kind
    optimizer, schedule = make_optimizer(job, model, kind)
    order = [piece for batch in batches(job, len(train)) for piece in cut(batch, pieces)]
    # the order is the loader's own; the schedule counts steps, not micro-batches of each process
    data = loader(job, train, padding(tokenizer), order)
    model, optimizer = accelerator.prepare(model, optimizer)
    tell("model")
    total = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(data):
        batch = {name: value.to(accelerator.device, non_blocking=True) for name, value in batch.items()}
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total = total + loss.detach() / pieces
            if accelerator.sync_gradients and job["optimizer"]["clip_norm"] is not None:
                accelerator.clip_grad_norm_(model.parameters(), job["optimizer"]["clip_norm"])
            optimizer.step()
            optimizer.zero_grad()
        if (number + 1) % pieces == 0:
            schedule.step()
            meter.step(total)
            total = torch.zeros((), device=accelerator.device)
    quality = accuracy(model, tokenizer, job, accelerator.device, accelerator.autocast)
    finish(job, meter, accelerator.unwrap_model(model), tokenizer, quality)


def cut(batch, pieces):
    """Micro-batches of like size; each mean of their losses counts the same, as Accelerate has it."""
    size = -(-len(batch) // pieces)
    found = [batch[begin : begin + size] for begin in range(0, len(batch), size)]
    return found + [found[-1]] * (pieces - len(found))


if __name__ == "__main__":
    main()
