"""The tutorials' image loop in plain PyTorch, and what they add to it in turn.

All images are read once, into main memory; crops and flips are drawn for each image in the workers of the loader.
``train`` and ``heldout`` are folders with a folder per class. Settings: ``precision`` (fp32, bf16, or fp16 with a
GradScaler), ``channels_last``, ``compile``, ``parallel`` (``none``, ``data_parallel``, or ``ddp``, for torchrun) and
``sync_batch_norm``.
"""

from __future__ import annotations

import functools
import os

import numpy
import torch
from job import Meter, batches, best_device, clip, loader, make_optimizer, read_job, tell, tell_result, wait
from PIL import Image
from torch.utils.data import Dataset
from transformers import AutoModelForImageClassification

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Pictures(Dataset):
    """Pixels and labels of a folder's images; ``crop`` and ``flip`` change an image anew each time it is taken."""

    def __init__(self, folder, labels, crop=0, flip=False):
        self.crop, self.flip, pixels, self.labels = crop, flip, [], []
        for name in sorted(os.listdir(folder)):
            for file in sorted(os.listdir(os.path.join(folder, name))):
                with Image.open(os.path.join(folder, name, file)) as image:
                    pixels.append(numpy.asarray(image))
                self.labels.append(labels[name])
        stacked = numpy.stack(pixels)
        self.pixels = torch.from_numpy(stacked if stacked.ndim == 4 else stacked[..., None]).permute(0, 3, 1, 2)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.pixels[index]
        if self.crop:
            height, width = image.shape[1:]
            top, left = torch.randint(0, 2 * self.crop + 1, (2,)).tolist()
            image = torch.nn.functional.pad(image, [self.crop] * 4)[:, top : top + height, left : left + width]
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, self.labels[index]


def collate(rows):
    images, labels = zip(*rows, strict=True)
    return torch.stack(images), torch.tensor(labels)


def to_floats(job, images, device, memory_format):
    """Normalised on the device: a byte a colour goes over the bus."""
    mean, std = (torch.tensor(job["images"][name], device=device).view(1, -1, 1, 1) for name in ("mean", "std"))
    images = images.to(device, non_blocking=True).float() / 255
    return ((images - mean) / std).contiguous(memory_format=memory_format)


@torch.no_grad()
def accuracy(job, model, device, memory_format, autocast):
    """Share of the held-out images that get their label."""
    images = Pictures(job["heldout"], job["labels"])
    size, right = 2 * job["batch_size"], 0
    order = [list(range(begin, min(begin + size, len(images)))) for begin in range(0, len(images), size)]
    model.eval()
    for pixels, labels in loader({**job, "workers": 0}, images, collate, order):
        with autocast():
            logits = model(pixel_values=to_floats(job, pixels, device, memory_format)).logits
        right += (logits.argmax(-1) == labels.to(device)).sum()
    return float(right) / len(images)


def wrapped(model, settings, device):
    """The model as the steps call it."""
    if settings["parallel"] == "data_parallel":
        return torch.nn.DataParallel(model)
    if settings["parallel"] == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    return torch.compile(model) if settings["compile"] else model


def main():
    tell("imported")
    job = read_job()
    settings, device = job["settings"], best_device()
    if settings["parallel"] == "ddp":
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(job["seed"])
    train = Pictures(job["train"], job["labels"], job["images"]["crop"], job["images"]["flip"])
    tell("data")
    memory_format = torch.channels_last if settings["channels_last"] else torch.contiguous_format
    model = AutoModelForImageClassification.from_pretrained(job["model"], dtype=torch.float32)
    if settings["sync_batch_norm"]:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device, memory_format=memory_format).train()
    optimizer, schedule = make_optimizer(job, model)
    forward, meter = wrapped(model, settings, device), Meter(job)
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[settings["precision"]]
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    autocast = functools.partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not None)
    order = [batch[RANK::WORLD_SIZE] for batch in batches(job, len(train))]
    tell("model")
    for pixels, labels in loader(job, train, collate, order):
        labels = labels.to(device, non_blocking=True)
        with autocast():
            logits = forward(pixel_values=to_floats(job, pixels, device, memory_format)).logits
            loss = torch.nn.functional.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip(job, model)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        meter.step(over_ranks(loss.detach()))
    quality = accuracy(job, model, device, memory_format, autocast)
    tell("evaluated")
    if RANK == 0:
        model.save_pretrained(job["save"])
    tell("saved")
    tell_result(job, quality, [float(loss) for loss in meter.losses], meter.seconds)
    if settings["parallel"] == "ddp":
        wait()
        torch.distributed.barrier()  # a rank that ends first breaks off connections that others still read from
        torch.distributed.destroy_process_group()


def over_ranks(loss):
    """The mean loss of all ranks."""
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(loss)
        loss = loss / WORLD_SIZE
    return loss


if __name__ == "__main__":
    main()
