"""Lightning's Trainer at its best: dynamic padding, no logger, no checkpoints, no progress bar.

Settings: ``precision`` (as the Trainer names it, ``32-true``, ``16-mixed``, ``bf16-mixed``), ``compile``, ``strategy``
(as the Trainer names it) and ``devices``.
"""

from __future__ import annotations

import warnings

import lightning
import torch
from job import Meter, Texts, batches, loader, make_optimizer, opened, padding, read_job, tell, tell_result
from lightning.pytorch.strategies import FSDPStrategy


class Classifier(lightning.LightningModule):
    def __init__(self, job, model, meter):
        super().__init__()
        self.job, self.meter = job, meter
        self.model = torch.compile(model) if job["settings"]["compile"] else model
        self.right, self.seen = 0, 0
        self.optimizer_class = None

    def training_step(self, batch, _):
        return self.model(**batch).loss

    def on_train_start(self):
        self.bring_buffers()
        tell("model")

    def on_test_start(self):
        self.bring_buffers()

    def bring_buffers(self):
        """To the weights: DeepSpeed's stage 3 leaves them on the host, numbers of positions for one."""
        for buffer in self.buffers():
            buffer.data = buffer.data.to(self.device)

    def on_train_batch_end(self, outputs, *_):
        self.meter.step(outputs["loss"])

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if gradient_clip_val is None:
            return
        wrapped = self.trainer.strategy.model
        if hasattr(wrapped, "clip_grad_norm_"):  # of FSDP's shards
            wrapped.clip_grad_norm_(gradient_clip_val)
        else:
            # Lightning's own refuses fused optimizers under mixed precision, although bf16 has no loss scale
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def configure_optimizers(self):
        # a fused optimizer takes the loss scale off by itself, after the gradient was clipped
        fused = self.job["settings"]["precision"] != "16-mixed"
        optimizer, schedule = make_optimizer(self.job, self, self.optimizer_class, fused=fused)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_end(self):
        if isinstance(self.trainer.strategy, FSDPStrategy):
            self.test_shards()

    @torch.no_grad()
    def test_shards(self):
        """Test inside ``fit``: a later ``Trainer.test`` wraps the module again, around parameters that are shards."""
        strategy, data = self.trainer.strategy, self.trainer.datamodule
        self.eval()
        for number, batch in enumerate(data.test_dataloader()):
            strategy.test_step(strategy.batch_to_device(batch), number)
        self.on_test_epoch_end()

    def test_step(self, batch, number):
        labels = batch.pop("labels")
        if number >= self.trainer.datamodule.own_batches:  # made along with the other ranks
            self.model(**batch)
            return
        self.right = self.right + (self.model(**batch).logits.argmax(-1) == labels).sum()
        self.seen += len(labels)

    def on_test_epoch_end(self):
        counts = self.all_gather(torch.stack([torch.as_tensor(self.right), torch.as_tensor(self.seen).to(self.right)]))
        right, self.seen = counts.reshape(-1, 2).sum(0).tolist()
        self.right = right


class Data(lightning.LightningDataModule):
    """Every rank gets its piece of each global batch."""

    def __init__(self, job, train, tokenizer):
        super().__init__()
        self.job, self.train, self.tokenizer = job, train, tokenizer

    def train_dataloader(self):
        rank, size = self.trainer.global_rank, self.trainer.world_size
        order = [batch[rank::size] for batch in batches(self.job, len(self.train))]
        return loader(self.job, self.train, padding(self.tokenizer), order)

    def test_dataloader(self):
        job, rank, size = self.job, self.trainer.global_rank, self.trainer.world_size
        texts = Texts(job["heldout"], self.tokenizer, job["labels"], job["max_length"])
        order = [list(range(begin, min(begin + 64, len(texts)))) for begin in range(0, len(texts), 64)]
        mine = order[rank::size]
        self.own_batches = len(mine)
        # ranks meet within a pass: all of them make equally many
        mine += order[:1] * (-(-len(order) // size) - len(mine))
        return loader({**job, "workers": 0}, texts, padding(self.tokenizer), mine)


def sharding(model):
    """FSDP that gathers one block at a time; by its name alone, Lightning would gather the whole model at once."""
    names = set(model._no_split_modules or ())
    return FSDPStrategy(auto_wrap_policy={type(part) for part in model.modules() if type(part).__name__ in names})


def host_adam():
    """DeepSpeed's Adam for CPUs; None, where it cannot be built here: torch's then."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # compilers fail in many ways
        print(f"DeepSpeed's Adam for CPUs cannot be built here, torch's takes its place: {error}")
        return None
    return DeepSpeedCPUAdam


def main():
    tell("imported")
    job = read_job()
    settings = job["settings"]
    warnings.filterwarnings("ignore", module="lightning")  # advice; the settings are what is measured
    torch.set_float32_matmul_precision("high" if settings["precision"] != "32-true" else "highest")
    is_fsdp = settings["strategy"] == "fsdp"
    tokenizer, train, model = opened(job)
    meter = Meter(job)
    module, data = Classifier(job, model, meter), Data(job, train, tokenizer)
    trainer = lightning.Trainer(
        max_steps=job["steps"],
        accelerator="auto",
        devices=settings["devices"],
        strategy=sharding(model) if is_fsdp else settings["strategy"],
        precision=settings["precision"],
        gradient_clip_val=job["optimizer"]["clip_norm"],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    if "offload" in settings["strategy"]:
        module.optimizer_class = host_adam()
        trainer.strategy.config["zero_force_ds_cpu_optimizer"] = module.optimizer_class is not None
    trainer.fit(module, datamodule=data)
    is_sharded = is_fsdp or "deepspeed_stage_3" in settings["strategy"]
    if is_sharded:  # each rank has its shard; to test, DeepSpeed makes another engine, which saves nothing
        trainer.save_checkpoint(f"{job['save']}/model.ckpt")
    if not is_fsdp:
        trainer.test(module, datamodule=data, verbose=False)
    tell("evaluated")
    if trainer.is_global_zero and not is_sharded:
        model.save_pretrained(job["save"])
        tokenizer.save_pretrained(job["save"])
    tell("saved")
    tell_result(job, module.right / module.seen, [float(loss) for loss in meter.losses], meter.seconds)


if __name__ == "__main__":
    main()
