"""What every contender does alike: it reads a job, tokenises, keeps the order, measures itself, evaluates and tells.

A job is a JSON object: ``train`` and ``heldout`` (CSV files with columns text and label), ``model`` (a folder that
transformers loads), ``save`` (where the trained model goes), ``seed``, ``steps``, ``warm_up``, ``batch_size``,
``shuffle``, ``drop_last``, ``max_length``, ``optimizer``, ``schedule``, ``workers`` and the contender's ``settings``.
Nothing here imports paceline. Events are JSON lines on standard output.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import numpy
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "lightning", "deepspeed", "bitsandbytes", "triton")


def read_job():
    """The job named on the command line."""
    with open(sys.argv[1], encoding="utf-8") as file:
        return json.load(file)


def tell(event, **fields):
    """One line for whoever measures; of the first rank."""
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0:
        print(json.dumps({"event": event, **fields}), flush=True)


def best_device():
    """The first GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait():
    """Until the GPU has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Texts(Dataset):
    """Token ids and labels of a CSV's rows, tokenised once."""

    def __init__(self, path, tokenizer, labels, max_length):
        csv.field_size_limit(2**31 - 1)
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=max_length)
        self.tokens = encoded["input_ids"]
        self.labels = [labels[row["label"]] for row in rows]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def opened(job):
    """The tokenizer, the training texts and the model, on the CPU and in training mode."""
    # in 16 bits, with a mask, torch prefers cuDNN's attention on Hopper; it plans each further (batch, width) for tens
    # of milliseconds and more, and here widths change from batch to batch
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(job["seed"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    train = Texts(job["train"], tokenizer, job["labels"], job["max_length"])
    tell("data")
    model = AutoModelForSequenceClassification.from_pretrained(job["model"], dtype=torch.float32)
    for parameter in model.parameters():
        parameter.decays = parameter.ndim >= 2  # before FSDP makes flat shards of them
    return tokenizer, train, model.train()


def padding(tokenizer, to=None):
    """Puts rows together, padded to the longest of them, or all to one length."""
    pad = tokenizer.pad_token_id

    def collate(rows):
        width = to or max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), width), pad, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for at, row in enumerate(rows):
            length = len(row["input_ids"])
            ids[at, :length] = torch.tensor(row["input_ids"])
            mask[at, :length] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}

    return collate


def batches(job, count):
    """Row numbers of each step's global batch, in the order of training."""
    found, epoch, size = [], 0, job["batch_size"]
    while len(found) < job["steps"]:
        order = numpy.random.default_rng((job["seed"], epoch)).permutation(count) if job["shuffle"] else range(count)
        order = [int(row) for row in order]
        pieces = [order[begin : begin + size] for begin in range(0, count, size)]
        if job["drop_last"] and len(pieces[-1]) < size:
            pieces.pop()
        if not pieces:
            raise SystemExit(f"{count} rows make no batch of {size}")
        found += pieces
        epoch += 1
    return found[: job["steps"]]


class Batches(list):
    """Row numbers of each batch, which DataLoader takes for a batch sampler; Lightning asks those for their size."""

    @property
    def batch_size(self):
        return max(map(len, self), default=1)


def loader(job, data, collate, order):
    """Batches in this order."""
    workers = job["workers"]
    return DataLoader(
        data,
        batch_sampler=Batches(order),
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
    )


def make_optimizer(job, model, kind=None, fused=True):
    """The job's optimizer over what is trained, and its schedule; biases and norms do not decay.

    ``kind`` takes the place of torch's AdamW; ``fused``: its kernels for GPUs, where there is one.
    """
    part = job["optimizer"]
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if decays(p)], "weight_decay": part["weight_decay"]},
        {"params": [p for p in trained if not decays(p)], "weight_decay": 0.0},
    ]
    if part["type"] == "sgd":
        moves = {"momentum": part["momentum"], "nesterov": part["nesterov"]}
        optimizer = torch.optim.SGD(groups, lr=part["lr"], **moves)
    else:
        kind = kind or (torch.optim.Adam if part["type"] == "adam" else torch.optim.AdamW)
        fused = fused and kind.__module__.startswith("torch") and torch.cuda.is_available()
        more = {"fused": True} if fused else {}
        optimizer = kind(groups, lr=part["lr"], betas=tuple(part["betas"]), eps=part["eps"], **more)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(job, step))


def decays(parameter):
    """Whether weight decay applies: to matrices, by their shape when the model was loaded."""
    return getattr(parameter, "decays", parameter.ndim >= 2)


def rate_factor(job, step):
    """Factor of the learning rate at a step, from 0: transformers' constant, linear and cosine schedules."""
    part, steps = job["schedule"], job["steps"]
    if step < part["warmup"]:
        return step / max(1, part["warmup"])
    left = max(0.0, (steps - step) / max(1, steps - part["warmup"]))
    if part["type"] == "linear":
        return part["floor"] + (1 - part["floor"]) * left
    if part["type"] == "cosine":
        return part["floor"] + (1 - part["floor"]) * 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return 1.0


def clip(job, model):
    """Cut the gradient to its largest norm, where the job has one."""
    if job["optimizer"]["clip_norm"] is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), job["optimizer"]["clip_norm"])


class Meter:
    """Counts updates: tells of the first, and times those after the warm-up between two synchronisations."""

    def __init__(self, job):
        self.steps, self.warm_up = job["steps"], job["warm_up"]
        self.losses, self.seconds, self._began = [], None, 0.0

    def step(self, loss):
        """After each update, with its loss, which is not read here."""
        self.losses.append(loss.detach())
        if len(self.losses) == 1:
            wait()
            tell("first_update")
        if len(self.losses) == self.warm_up:
            wait()
            self._began = time.perf_counter()
        if len(self.losses) == self.steps:
            wait()
            self.seconds = time.perf_counter() - self._began
            tell("trained")


@torch.no_grad()
def accuracy(model, tokenizer, job, device, autocast=contextlib.nullcontext):
    """Share of the held-out texts that get their label; ``autocast`` makes a context for each forward pass."""
    texts = Texts(job["heldout"], tokenizer, job["labels"], job["max_length"])
    size, right = 2 * job["batch_size"], 0
    order = [list(range(begin, min(begin + size, len(texts)))) for begin in range(0, len(texts), size)]
    model.eval()
    for batch in loader({**job, "workers": 0}, texts, padding(tokenizer), order):
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        labels = batch.pop("labels")
        with autocast():
            logits = model(**batch).logits
        right += (logits.argmax(-1) == labels).sum()
    return float(right) / len(texts)


def finish(job, meter, model, tokenizer, quality):
    """Save the model and tell the result."""
    tell("evaluated")
    model.save_pretrained(job["save"])
    tokenizer.save_pretrained(job["save"])
    tell("saved")
    tell_result(job, quality, [float(loss) for loss in meter.losses], meter.seconds)


def tell_result(job, quality, losses, seconds):
    """The last line: what was learned, how fast, with how much memory."""
    # a contender that had paceline in its process would be none
    assert "paceline" not in sys.modules
    on_gpu = torch.cuda.is_available()
    tell(
        "result",
        quality=quality,
        losses=losses,
        steady_seconds=seconds,
        steady_steps=job["steps"] - job["warm_up"],
        peak_allocated_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        peak_reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else None,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        versions=installed(),
    )


def installed():
    """Versions of what there is."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
