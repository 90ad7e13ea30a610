"""Hugging Face Trainer on a workload folder. Never imports paceline: run with ``python -P hf_trainer.py FOLDER SEED``.

The folder holds tokens (flat.npy, offsets.npy), labels.npy, one array of sample ids a split, a pretrained model in
``model/`` and the settings in spec.json. Prints one JSON line.
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


class Samples(torch.utils.data.Dataset):
    def __init__(self, folder: Path, split: str) -> None:
        self.flat = np.load(folder / "flat.npy")
        self.offsets, self.labels = np.load(folder / "offsets.npy"), np.load(folder / "labels.npy")
        self.ids = np.load(folder / f"{split}.npy")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        i = self.ids[index]
        return self.flat[self.offsets[i] : self.offsets[i + 1]], int(self.labels[i])


def collate(rows: list[tuple[np.ndarray, int]]) -> dict[str, torch.Tensor]:
    """Dynamic padding to the longest of the batch, rounded up to 8 as tensor cores like it."""
    longest = -(-max(len(tokens) for tokens, _ in rows) // 8) * 8
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for row, (tokens, _) in enumerate(rows):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([label for _, label in rows])}


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main(folder: Path, seed: int) -> None:
    spec = json.loads((folder / "spec.json").read_text())
    # the head is drawn inside from_pretrained, before the Trainer seeds anything
    transformers.set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "model", num_labels=spec["num_labels"], dtype=torch.float32
    )
    on_card = torch.cuda.is_available()
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
            optim="adamw_torch_fused" if on_card else "adamw_torch",
            seed=seed,
            logging_nan_inf_filter=False,
            logging_steps=100,
            eval_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_num_workers=spec["workers"],
            use_cpu=not on_card,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Samples(folder, "train"),
            eval_dataset=Samples(folder, "test"),
            data_collator=collate,
            compute_metrics=accuracy,
        )
        started = time.perf_counter()
        trained = trainer.train()
        seconds = time.perf_counter() - started
        tested = trainer.evaluate()
        validated = trainer.evaluate(Samples(folder, "validation"))
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
