"""The Hugging Face Trainer at its best, timed. See workload.py for how it is run.

Settings: ``mode`` (``grouped``: batches of one length, the Trainer's own sampler; ``same_order``: exactly the batches
of order.npy), ``compile``, ``pad`` (lengths are rounded up to a multiple of it), ``precision`` (bf16 or fp32),
``workers``, ``batch_size``, ``warm_up`` and ``measured`` (steps).
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from workload import (
    WORLD_SIZE,
    Recorded,
    Settings,
    Texts,
    Window,
    allow_planned_attention,
    padding,
    read_spec,
    share,
    start,
    text_model,
    train_order,
    unavailable,
)

if find_spec("accelerate") is None:  # the Trainer starts without it, and then stops
    unavailable("accelerate")


class Timed(Trainer):
    """The Trainer, but that it keeps each step's loss (on the device) and what its sampler drew."""

    last_loss: torch.Tensor
    recorded: Recorded | None = None

    def training_step(self, *positional: Any, **named: Any) -> torch.Tensor:
        self.last_loss = super().training_step(*positional, **named)
        return self.last_loss

    def _get_train_sampler(self, *positional: Any, **named: Any) -> torch.utils.data.Sampler:
        self.recorded = Recorded(super()._get_train_sampler(*positional, **named))
        return self.recorded


class AfterStep(TrainerCallback):
    def __init__(self, window: Window) -> None:
        self.window = window
        self.trainer: Timed | None = None

    def on_step_end(self, *positional: Any, **named: Any) -> None:
        assert self.trainer is not None
        self.window.update(self.trainer.last_loss)


def main(folder: Path, settings: Settings) -> None:
    spec = read_spec(folder)
    allow_planned_attention(settings["pad"])
    set_seed(0)
    grouped = settings["mode"] == "grouped"
    ids = np.load(folder / "train.npy") if grouped else train_order(folder, settings)
    window, model = Window(settings), text_model(folder)
    after = AfterStep(window)
    with tempfile.TemporaryDirectory() as out:
        trainer = Timed(
            model=model,
            args=training_arguments(out, spec, settings),
            train_dataset=Texts(folder, ids),
            data_collator=padding(settings["pad"]),
            callbacks=[after],
        )
        after.trainer = trainer
        trainer.train()
    assert trainer.recorded is not None
    # it hands out whole batches in rank order, from one sampler that is alike on all ranks
    order = ids[trainer.recorded.whole_batches(settings["batch_size"])]
    window.report(folder, share(order, settings["batch_size"]), model)


def training_arguments(out: str, spec: dict[str, Any], settings: Settings) -> TrainingArguments:
    """What makes the Trainer fast, and the optimizer that everybody has."""
    on_gpu, workers = torch.cuda.is_available(), settings["workers"]
    steps = settings["warm_up"] + settings["measured"]
    return TrainingArguments(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=settings["batch_size"] // WORLD_SIZE,
        learning_rate=spec["lr"],
        weight_decay=spec["weight_decay"],
        max_grad_norm=spec["clip_norm"],
        lr_scheduler_type="linear",
        warmup_steps=round(spec["warmup"] * steps),
        bf16=settings["precision"] == "bf16",
        tf32=True if on_gpu else None,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        torch_compile=settings["compile"],
        train_sampling_strategy="group_by_length" if settings["mode"] == "grouped" else "sequential",
        dataloader_drop_last=True,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        dataloader_pin_memory=on_gpu,
        # by default two synchronisations a step
        logging_nan_inf_filter=False,
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not on_gpu,
        # every parameter is used and there are no buffers to keep alike; by default DDP looks for both at each step
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        # all ranks count as many labels; the default gathers their number at each step
        average_tokens_across_devices=False,
    )


if __name__ == "__main__":
    start(main)
