"""What every contender shares: it reads a workload folder, draws no batch of its own, and reports in JSON lines.

A workload folder holds ``spec.json``, ``train.npy`` (sample ids of the training split), ``order.npy`` (sample ids in
training order, one row an epoch), ``labels.npy`` and either ``flat.npy`` + ``offsets.npy`` (token ids of all texts,
and where each begins) or ``pixels.npy`` (uint8 [n, height, width, channels]). ``model/config.json`` describes a
transformers model whose weights are drawn here. Nothing in this folder of files imports paceline: run a contender as
``PYTHONPATH=benchmarks/contenders python -P CONTENDER.py WORKLOAD SETTINGS``, with SETTINGS a JSON object.

Contenders that can share their work run under torchrun too. ``batch_size`` is that of all ranks together; each trains
on its share, its own ids are what it reports, and rank 0 tells the sums.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Settings = dict[str, Any]
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "pytorch-lightning", "triton", "torchvision", "numpy")
LAST_LOSSES = 50
"""Training losses, of the last steps, whose mean is reported."""

FEW_WIDTHS = 64
"""Tokens to which widths have to be rounded up so that a run has few of them."""

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokens are read, and loaders that fork would be warned of

RANK, LOCAL_RANK = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
"""What torchrun says of this process."""


def start(main: Callable[[Path, Settings], None]) -> None:
    """Run a contender on the command line's workload folder and settings; torchrun ends with the first rank's error."""
    if WORLD_SIZE > 1:
        # where there is no torchrun, its import would be start-up time
        from torch.distributed.elastic.multiprocessing.errors import record

        main = record(main)
    settings = json.loads(sys.argv[2])
    if WORLD_SIZE > 1 and settings.get("compile"):
        # torch 2.11 cuts a compiled model at DistributedDataParallel's buckets, and fails there as soon as a second
        # length comes along (InductorError: expected [s16] to have been codegen-ed): compile it whole
        torch._dynamo.config.optimize_ddp = False
    main(Path(sys.argv[1]), settings)


def tell(event: str, **fields: Any) -> None:
    """One JSON line for the runner, which notes when it came; of rank 0."""
    if RANK == 0:
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


def allow_planned_attention(multiple: int) -> None:
    """cuDNN's attention for batches whose widths are rounded up to ``multiple``, where these are few.

    In 16 bits, with a mask, torch prefers it on Hopper. It plans each further (batch, width) for tens of milliseconds
    and more: of few widths, all in the steps of the warm-up.
    """
    torch.backends.cuda.enable_cudnn_sdp(multiple >= FEW_WIDTHS)


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


class Share(torch.utils.data.Sampler[list[int]]):
    """This rank's share of another sampler's batches, which are those of all ranks: a piece of each in rank order.

    What the other sampler draws has to be the same on all ranks.
    """

    def __init__(self, batches: torch.utils.data.BatchSampler) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            size = len(batch) // WORLD_SIZE
            yield batch[RANK * size : (RANK + 1) * size]


def share(ids: np.ndarray, batch_size: int) -> np.ndarray:
    """This rank's share of the batches that ``ids`` are, as ``Share`` splits them."""
    return ids.reshape(-1, WORLD_SIZE, batch_size // WORLD_SIZE)[:, RANK].reshape(-1)


class Window:
    """Counts optimizer updates: tells the runner of the first, then times a window between two synchronisations.

    With several ranks both are of all of them. The steps before the window (``warm_up``) cover compilation, also that
    of further shapes, and the first touch of every kernel; peak memory is that of the whole process, the largest of all
    ranks.
    """

    def __init__(self, settings: Settings) -> None:
        self.warm_up, self.measured = settings["warm_up"], settings["measured"]
        self.batch_size = settings["batch_size"] // WORLD_SIZE
        self.updates, self.seconds = 0, float("nan")
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
        """The final line; every rank has to come here.

        Args:
            folder: the workload.
            ids: this rank's sample ids of all steps in the order of training; the window's are picked out here.
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
        counts = [len(window), int(lengths.sum()), int((lengths.astype(np.int64) ** 2).sum())]
        samples, tokens, squared = (int(count) for count in over_ranks(counts))
        loss = float(torch.stack([loss.float() for loss in self.losses]).mean())
        allocated, reserved = None, None
        if torch.cuda.is_available():
            peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
            allocated, reserved = (int(peak) for peak in over_ranks(peaks, largest=True))
        # a contender that had paceline in its process would not be one
        assert "paceline" not in sys.modules
        tell(
            "result",
            seconds=self.seconds,
            steps=self.measured,
            samples=samples,
            tokens=tokens if is_text else None,
            squared_lengths=squared if is_text else None,
            loss=over_ranks([loss])[0] / WORLD_SIZE,
            num_parameters=sum(p.numel() for p in model.parameters()),
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
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


def over_ranks(numbers: list[int] | list[float], *, largest: bool = False) -> list[float]:
    """Sums over the ranks, or the largest of theirs: exact for whole numbers below 2^53."""
    if WORLD_SIZE == 1:
        return list(numbers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return found.tolist()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    over_ranks([0])  # reading the result is a barrier
