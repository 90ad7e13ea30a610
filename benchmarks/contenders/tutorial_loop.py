"""The acceleration tutorials' loop, timed: every text padded to the maximum, Adam, and what they add in turn.

Settings: ``precision`` (fp32, or fp16 for autocast with a GradScaler), ``compile``, ``workers``, ``batch_size``,
``warm_up`` and ``measured``. The batches are those of order.npy.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader
from workload import Settings, Texts, Window, padding, read_spec, start, text_model, train_order


def main(folder: Path, settings: Settings) -> None:
    spec, window = read_spec(folder), Window(settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = text_model(folder).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=spec["lr"])
    forward = torch.compile(model) if settings["compile"] else model
    half = settings["precision"] == "fp16"
    scaler = torch.amp.GradScaler(device.type, enabled=half)
    ids = train_order(folder, settings)
    loader = DataLoader(
        Texts(folder, ids),
        batch_size=settings["batch_size"],
        num_workers=settings["workers"],
        collate_fn=padding(longest=spec["max_length"]),
        drop_last=True,
    )
    for step, batch in enumerate(loader):
        batch = {name: value.to(device) for name, value in batch.items()}
        with torch.autocast(device.type, dtype=torch.float16, enabled=half):
            loss = forward(**batch).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 250 == 0:
            print(f"batch {step:04d}/{len(loader):04d} | loss {loss:.4f}")
        window.update(loss)
    window.report(folder, ids, model)


if __name__ == "__main__":
    start(main)
