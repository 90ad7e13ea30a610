"""Lightning at its best, timed: bf16-mixed, batches of one length, compiled. See workload.py for how it is run.

Settings: those of hf_trainer_speed.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import get_linear_schedule_with_warmup
from transformers.trainer_pt_utils import LengthGroupedSampler
from workload import (
    WORLD_SIZE,
    Recorded,
    Settings,
    Share,
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

try:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    unavailable("lightning")


class Classifier(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module, spec: dict[str, Any], settings: Settings, window: Window) -> None:
        super().__init__()
        self.model = torch.compile(model) if settings["compile"] else model
        self.spec, self.window = spec, window
        self.steps = settings["warm_up"] + settings["measured"]

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs: dict[str, torch.Tensor], *_: Any) -> None:
        self.window.update(outputs["loss"])

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        # Lightning's own refuses fused optimizers under mixed precision, although bf16 has no loss scale
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.spec["clip_norm"])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(
            self.parameters(),
            lr=self.spec["lr"],
            weight_decay=self.spec["weight_decay"],
            fused=torch.cuda.is_available(),
        )
        schedule = get_linear_schedule_with_warmup(optimizer, round(self.spec["warmup"] * self.steps), self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader_of(folder: Path, settings: Settings) -> tuple[DataLoader, Recorded, np.ndarray]:
    """This rank's loader, the sampler that keeps what all ranks drew, and the sample ids that positions stand for."""
    size, workers = settings["batch_size"], settings["workers"]
    grouped = settings["mode"] == "grouped"
    ids = np.load(folder / "train.npy") if grouped else train_order(folder, settings)
    dataset = Texts(folder, ids)
    lengths = np.diff(dataset.offsets)[ids].tolist()
    # by the batch of a rank, as the Trainer does; alike on all of them
    generator = torch.Generator().manual_seed(0) if WORLD_SIZE > 1 else None
    by_length = LengthGroupedSampler(size // WORLD_SIZE, lengths=lengths, generator=generator)
    sampler = Recorded(by_length if grouped else SequentialSampler(dataset))
    loader = DataLoader(
        dataset,
        batch_sampler=Share(BatchSampler(sampler, size, drop_last=True)),
        collate_fn=padding(settings["pad"]),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
    )
    return loader, sampler, ids


def main(folder: Path, settings: Settings) -> None:
    torch.set_float32_matmul_precision("high")
    allow_planned_attention(settings["pad"])
    torch.manual_seed(0)
    # advice on workers and the like; the settings are what is measured
    warnings.filterwarnings("ignore", module="lightning")
    window, model = Window(settings), text_model(folder)
    loader, sampler, ids = loader_of(folder, settings)
    strategy = "auto"
    if WORLD_SIZE > 1:
        # gradients stay in the buffers that are reduced, and no buffer needs to be kept alike
        strategy = DDPStrategy(gradient_as_bucket_view=True, broadcast_buffers=False)
    trainer = lightning.Trainer(
        max_steps=settings["warm_up"] + settings["measured"],
        accelerator="auto",
        devices=WORLD_SIZE,
        strategy=strategy,
        precision={"bf16": "bf16-mixed", "fp32": "32-true"}[settings["precision"]],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model.train()  # transformers builds models for evaluation, and Lightning leaves that as it is
    trainer.fit(Classifier(model, read_spec(folder), settings, window), loader)
    order = ids[sampler.whole_batches(settings["batch_size"])]
    window.report(folder, share(order, settings["batch_size"]), model)


if __name__ == "__main__":
    start(main)
