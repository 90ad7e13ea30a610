"""What every contender shares: it reads a workload folder, draws no batch of its own, and reports in JSON lines.

A workload folder holds ``spec.json``, ``train.npy`` (sample ids of the training split), ``order.npy`` (sample ids in
training order, one row an epoch), ``labels.npy`` and either ``flat.npy`` + ``offsets.npy`` (token ids of all texts,
and where each begins) or ``pixels.npy`` (uint8 [n, height, width, channels]). ``model/config.json`` describes a
transformers model whose weights are drawn here. Nothing in this folder of files imports paceline: run a contender as
``PYTHONPATH=benchmarks/contenders python -P CONTENDER.py WORKLOAD SETTINGS``, with SETTINGS a JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

Settings = dict[str, Any]
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "pytorch-lightning", "triton", "torchvision", "numpy")
LAST_LOSSES = 50
"""Training losses, of the last steps, whose mean is reported."""


def arguments() -> tuple[Path, Settings]:
    """The workload folder and the settings of the command line."""
    return Path(sys.argv[1]), json.loads(sys.argv[2])


def tell(event: str, **fields: Any) -> None:
    """One JSON line for the runner, which notes when it came."""
    print(json.dumps({"event": event, "time": time.time(), **fields}), flush=True)


def unavailable(package: str) -> None:
    """End this contender without a failure: what it measures is not installed."""
    tell("not installed", package=package)
    sys.exit(0)


def read_spec(folder: Path) -> dict[str, Any]:
    """What the workload is: labels, model, optimizer."""
    spec: dict[str, Any] = json.loads((folder / "spec.json").read_text())
    return spec


def train_order(folder: Path, settings: Settings) -> np.ndarray:
    """Sample ids of exactly the steps that are run, whole batches only; batch k is the k-th piece of batch_size."""
    epochs = np.load(folder / "order.npy")
    size, needed = settings["batch_size"], settings["batch_size"] * (settings["warm_up"] + settings["measured"])
    whole = epochs[:, : epochs.shape[1] // size * size].reshape(-1)
    if len(whole) < needed:
        raise SystemExit(f"order.npy: {len(whole):,} samples in whole batches, but the run takes {needed:,}")
    return whole[:needed]


class Texts(torch.utils.data.Dataset):
    """Samples by position in ``ids``."""

    def __init__(self, folder: Path, ids: np.ndarray) -> None:
        self.flat = np.load(folder / "flat.npy")
        self.offsets, self.labels, self.ids = np.load(folder / "offsets.npy"), np.load(folder / "labels.npy"), ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.ids[index]
        tokens = self.flat[self.offsets[sample] : self.offsets[sample + 1]]
        return {"input_ids": tokens, "labels": int(self.labels[sample])}


def padding(multiple: int = 8, longest: int | None = None) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    """Puts rows together, padded to the longest of them rounded up to ``multiple``, or all to ``longest``."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = longest or -(-max(len(row["input_ids"]) for row in rows) // multiple) * multiple
        ids = torch.zeros((len(rows), width), dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for at, row in enumerate(rows):
            length = len(row["input_ids"])
            ids[at, :length] = torch.from_numpy(row["input_ids"].astype(np.int64))
            mask[at, :length] = 1
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return collate


def text_model(folder: Path, seed: int = 0) -> torch.nn.Module:
    """The transformers classifier of ``model/config.json`` with random fp32 weights, on the CPU."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder / "model")
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)


class Recorded(torch.utils.data.Sampler[int]):
    """Another sampler, which keeps what it drew: the batches of the measured window are then known without counting."""

    def __init__(self, sampler: torch.utils.data.Sampler[int]) -> None:
        self.sampler = sampler
        self.drawn: list[int] = []
        self._epochs: list[int] = []

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        self._epochs.append(len(self.drawn))
        for position in self.sampler:
            self.drawn.append(position)
            yield position

    def whole_batches(self, batch_size: int) -> np.ndarray:
        """Positions in the order drawn, without what each epoch leaves after whole batches: the loader drops it too."""
        ends = [*self._epochs[1:], len(self.drawn)]
        epochs = [self.drawn[start:end] for start, end in zip(self._epochs, ends, strict=True)]
        return np.array([p for e in epochs for p in e[: len(e) // batch_size * batch_size]], dtype=np.int64)


class Window:
    """Counts optimizer updates: tells the runner of the first, then times a window between two synchronisations.

    The steps before the window (``warm_up``) cover compilation, also that of further shapes, and the first touch of
    every kernel; peak memory is that of the whole process.
    """

    def __init__(self, settings: Settings) -> None:
        self.warm_up, self.measured = settings["warm_up"], settings["measured"]
        self.batch_size, self.updates, self.seconds = settings["batch_size"], 0, float("nan")
        self.losses: deque[torch.Tensor] = deque(maxlen=LAST_LOSSES)
        self._started = 0.0

    def update(self, loss: torch.Tensor) -> None:
        """After each optimizer update, with its loss, which is not read here."""
        self.updates += 1
        self.losses.append(loss.detach())
        if self.updates == 1:
            _wait()
            tell("first_update")
        if self.updates == self.warm_up:
            _wait()
            tell("warm")
            self._started = time.perf_counter()
        if self.updates == self.warm_up + self.measured:
            _wait()
            self.seconds = time.perf_counter() - self._started

    @property
    def done(self) -> bool:
        """Whether the last step of the window is over."""
        return self.updates >= self.warm_up + self.measured

    def report(self, folder: Path, ids: np.ndarray, model: torch.nn.Module, **more: Any) -> None:
        """The final line.

        Args:
            folder: the workload.
            ids: sample ids of all steps in the order of training; those of the window are picked out here.
            model: for the number of its parameters.
            more: further fields.
        """
        window = ids[self.warm_up * self.batch_size : (self.warm_up + self.measured) * self.batch_size]
        if len(window) != self.measured * self.batch_size or not self.done:
            raise SystemExit(
                f"{self.updates} updates of {self.warm_up + self.measured}, {len(window)} samples measured"
            )
        is_text = (folder / "offsets.npy").exists()
        lengths = np.diff(np.load(folder / "offsets.npy"))[window] if is_text else np.ones(len(window))
        card = torch.cuda.is_available()
        # a contender that had paceline in its process would not be one
        assert "paceline" not in sys.modules
        tell(
            "result",
            seconds=self.seconds,
            steps=self.measured,
            samples=len(window),
            tokens=int(lengths.sum()) if is_text else None,
            squared_lengths=int((lengths.astype(np.int64) ** 2).sum()) if is_text else None,
            loss=float(torch.stack([loss.float() for loss in self.losses]).mean()),
            num_parameters=sum(p.numel() for p in model.parameters()),
            peak_allocated_bytes=torch.cuda.max_memory_allocated() if card else None,
            peak_reserved_bytes=torch.cuda.max_memory_reserved() if card else None,
            versions=versions(),
            **more,
        )


def versions() -> dict[str, str]:
    """Of what is installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
