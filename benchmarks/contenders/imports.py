"""The floor of every start: torch and a model's class imported, the GPU awake. No trainer makes an update sooner."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.models.distilbert.modeling_distilbert import DistilBertForSequenceClassification
from workload import Settings, start, tell, versions


def main(_: Path, __: Settings) -> None:
    torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu").item()
    tell("first_update", model=DistilBertForSequenceClassification.__name__)
    tell("result", versions=versions())


if __name__ == "__main__":
    start(main)
