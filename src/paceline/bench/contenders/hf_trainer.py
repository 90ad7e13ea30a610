"""Hugging Face's Trainer at its best: dynamic padding, fused AdamW, no needless synchronisation.

Settings: ``precision`` (fp32, bf16, fp16), ``compile`` and ``grouped`` (batches of texts of like length, in an order of
its own; else the job's order).
"""

from __future__ import annotations

import functools
import gc
import tempfile

import torch
from job import Meter, accuracy, batches, best_device, finish, loader, make_optimizer, opened, padding, read_job, tell
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Timed(Trainer):
    """The Trainer, with the last loss at hand; in the job's order where it is given its batches."""

    batches_given = None
    last = None

    def training_step(self, *positional, **named):
        self.last = super().training_step(*positional, **named)
        return self.last

    def get_train_dataloader(self):
        return self.batches_given or super().get_train_dataloader()


class AfterStep(TrainerCallback):
    """Tells the meter."""

    trainer, meter = None, None

    def on_train_begin(self, *_, **__):
        tell("model")

    def on_step_end(self, *_, **__):
        self.meter.step(self.trainer.last)


def main():
    tell("imported")
    job = read_job()
    settings, on_gpu = job["settings"], torch.cuda.is_available()
    set_seed(job["seed"])
    tokenizer, train, model = opened(job)
    after = AfterStep()
    after.meter = Meter(job)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            max_steps=job["steps"],
            per_device_train_batch_size=job["batch_size"],
            max_grad_norm=job["optimizer"]["clip_norm"] or 0.0,
            bf16=settings["precision"] == "bf16",
            fp16=settings["precision"] == "fp16",
            torch_compile=settings["compile"],
            train_sampling_strategy="group_by_length" if settings["grouped"] else "random",
            dataloader_drop_last=job["drop_last"],
            dataloader_num_workers=job["workers"],
            dataloader_persistent_workers=job["workers"] > 0,
            dataloader_pin_memory=on_gpu,
            logging_nan_inf_filter=False,  # by default two synchronisations a step
            logging_strategy="no",
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=not on_gpu,
            seed=job["seed"],
        )
        trainer = Timed(
            model=model,
            args=arguments,
            train_dataset=train,
            data_collator=padding(tokenizer),
            callbacks=[after],
            optimizers=make_optimizer(job, model),
        )
        if not settings["grouped"]:
            trainer.batches_given = loader(job, train, padding(tokenizer), batches(job, len(train)))
        after.trainer = trainer
        trainer.train()
    # what still holds the loader when Python ends makes it wait five seconds for each worker
    after.trainer = None
    trainer.accelerator.free_memory()
    del trainer
    gc.collect()
    device = best_device()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings["precision"])
    autocast = functools.partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not None)
    finish(job, after.meter, model, tokenizer, accuracy(model, tokenizer, job, device, autocast))


if __name__ == "__main__":
    main()
