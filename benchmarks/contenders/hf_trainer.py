"""Hugging Face Trainer on a workload folder, for its accuracy; run as workload.py says, with a seed for settings.

Beside tokens and labels the folder holds one array of sample ids a split, a pretrained model in ``model/`` and the
settings in spec.json. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from workload import Texts, allow_planned_attention, padding


def split(folder: Path, name: str) -> Texts:
    return Texts(folder, np.load(folder / f"{name}.npy"))


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main(folder: Path, seed: int) -> None:
    spec = json.loads((folder / "spec.json").read_text())
    allow_planned_attention(8)
    # the head is drawn inside from_pretrained, before the Trainer seeds anything
    transformers.set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "model", num_labels=spec["num_labels"], dtype=torch.float32
    )
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            num_train_epochs=spec["epochs"],
            max_steps=spec.get("max_steps") or -1,
            per_device_train_batch_size=spec["batch_size"],
            per_device_eval_batch_size=2 * spec["batch_size"],
            learning_rate=spec["lr"],
            weight_decay=spec["weight_decay"],
            max_grad_norm=spec["clip_norm"],
            lr_scheduler_type="linear",
            warmup_steps=spec["warmup_steps"],
            bf16=spec["precision"] == "bf16",
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            seed=seed,
            logging_nan_inf_filter=False,
            logging_steps=100,
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            remove_unused_columns=False,
            disable_tqdm=True,
            dataloader_num_workers=spec["workers"],
            use_cpu=not on_gpu,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=split(folder, "train"),
            eval_dataset=split(folder, "test"),
            data_collator=padding(multiple=8),
            compute_metrics=accuracy,
        )
        started = time.perf_counter()
        trained = trainer.train()
        seconds = time.perf_counter() - started
        tested = trainer.evaluate()
        validated = trainer.evaluate(split(folder, "validation"))
    print(
        json.dumps(
            {
                "contender": "hf_trainer",
                "seed": seed,
                "steps": trained.global_step,
                "train_seconds": round(seconds, 2),
                "test_accuracy": tested["eval_accuracy"],
                "test_loss": tested["eval_loss"],
                "validation_accuracy": validated["eval_accuracy"],
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
