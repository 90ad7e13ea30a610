"""How fast data can arrive: a recipe's batches brought to the device again and again, without a model behind them.

A step waits for data only where this rate is below its own. torch's DataLoader stands for peers: padded batches, by so
many worker processes, pinned where there is a GPU. paceline's are those of the recipe's run.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from paceline.contract.stopwatch import Stopwatch
from paceline.data.dataset import Dataset, Images, Tokens
from paceline.machine.facts import Facts
from paceline.prepare.course import Course
from paceline.prepare.preparation import Prepared, prepare_run
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.seams import Mesh
from paceline.seams.batch import Ids

WINDOWS = 3
"""Stretches of a way that are timed; the median counts."""

WARM_UP = 3
"""Batches before the first of them: workers start, memory is allocated."""

MOST_WORKERS = 8

Deliver = Callable[[Sequence[Ids]], Iterator[Any]]
"""Brings these batches to the device, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One way to bring batches to the device."""

    way: str
    workers: int
    """Processes beside this one."""
    pinned: bool
    """Whether batches wait in page-locked memory."""
    batches: int
    """Timed, over all windows."""
    samples_per_second: float
    """Median of the windows."""
    lowest: float
    highest: float


def arrivals(
    recipe: Recipe, facts: Facts, *, seconds: float = 2.0, workers: Sequence[int] | None = None
) -> tuple[Arrival, ...]:
    """Every way that this machine has.

    Args:
        recipe: data, batch and device.
        facts: of this machine.
        seconds: for each way.
        workers: numbers of worker processes to try; None: 0, 1, 2, 4 and so on up to the processors.

    Raises:
        UserError: what ``train`` would say of data and model.
    """
    chosen, decisions = choose(recipe, facts)
    device = torch.device(chosen.device)
    on_gpu = device.type == "cuda"
    found, prepared = [], None
    for resident in (False, True) if on_gpu else (False,):
        kept = chosen.with_settings([f"data.resident={str(resident).lower()}"])
        prepared = prepare_run(kept, decisions, facts=facts, watch=Stopwatch())
        layout, kind = prepared.build.layout, str(prepared.build.layout_kind.value)
        way = f"paceline, {kind}, {'resident on the GPU' if resident else 'from the host'}"

        def deliver(ids: Sequence[Ids], layout: Any = layout) -> Iterator[Any]:
            for at, each in enumerate(ids):
                batch = layout.collate(each)
                layout.expect(ids[at + 1 : at + 2])  # as the loop does
                yield batch

        found.append(_timed(way, deliver, prepared, device, seconds))
        layout.close()
    assert prepared is not None
    for count in workers if workers is not None else _counts(facts.cpu_count):
        for pinned in (False, True) if on_gpu else (False,):
            by_loader = _Loader(prepared.dataset, device, count, pinned)
            way = f"DataLoader, {'images' if prepared.dataset.is_images else 'padded'}"
            found.append(_timed(way, by_loader, prepared, device, seconds, workers=count, pinned=pinned))
    return tuple(found)


def _counts(processors: int) -> list[int]:
    """0, 1, 2, 4, ... up to the processors."""
    return [0, *(count for count in (1, 2, 4, MOST_WORKERS) if count <= processors)]


def _timed(
    way: str,
    deliver: Deliver,
    prepared: Prepared,
    device: torch.device,
    seconds: float,
    *,
    workers: int = 0,
    pinned: bool = False,
) -> Arrival:
    """Windows of like length of one stream of batches; the stream is as long as it has to be."""
    ids = _batches(prepared)
    stream = itertools.chain.from_iterable(deliver(ids) for _ in itertools.count())
    for _ in range(WARM_UP):
        next(stream)
    rates, count = [], 0
    for _ in range(WINDOWS):
        _wait(device)
        began, samples = time.perf_counter(), 0
        while samples == 0 or time.perf_counter() - began < seconds / WINDOWS:
            samples += _samples(next(stream))
            count += 1
        _wait(device)
        rates.append(samples / (time.perf_counter() - began))
    middle = statistics.median(rates)
    return Arrival(
        way=way,
        workers=workers,
        pinned=pinned,
        batches=count,
        samples_per_second=middle,
        lowest=min(rates),
        highest=max(rates),
    )


def _batches(prepared: Prepared) -> list[Ids]:
    """The micro-batches of the first epoch, whole ones."""
    course = Course(prepared.recipe, prepared.dataset, prepared.build, Mesh())
    at, found = course.start, list[Ids]()
    for _ in range(course.steps_per_epoch):
        found += course.plan(at).microbatches
        at = course.after(at)
    return found


def _samples(batch: Any) -> int:
    labels = batch["labels"] if isinstance(batch, dict) else batch.labels
    return len(labels)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Loader:
    """torch's DataLoader over the same samples, as most loops have it."""

    def __init__(self, dataset: Dataset, device: torch.device, workers: int, pinned: bool) -> None:
        self._dataset, self._device, self._workers, self._pinned = dataset, device, workers, pinned

    def __call__(self, ids: Sequence[Ids]) -> Iterator[dict[str, Tensor]]:
        """Batches on the device; a new epoch starts the workers anew, as loops do."""
        loader = DataLoader(
            _Samples(self._dataset),
            batch_sampler=[each.tolist() for each in ids],
            collate_fn=_collate,
            num_workers=self._workers,
            pin_memory=self._pinned,
        )
        for batch in loader:
            yield {name: value.to(self._device, non_blocking=self._pinned) for name, value in batch.items()}


class _Samples(torch.utils.data.Dataset[tuple[Tensor, Any]]):
    """One sample at a time."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        inputs = self._dataset.inputs
        if isinstance(inputs, Images):
            return torch.from_numpy(inputs.pixels[index].copy()), self._dataset.labels[index]
        assert isinstance(inputs, Tokens)
        tokens = inputs.flat[inputs.offsets[index] : inputs.offsets[index + 1]]
        return torch.from_numpy(tokens.astype("int64")), self._dataset.labels[index]


def _collate(rows: Sequence[tuple[Tensor, Any]]) -> dict[str, Tensor]:
    """Texts padded to the longest; images normalised to floats."""
    samples = [sample for sample, _ in rows]
    labels = torch.tensor([label for _, label in rows])
    if samples[0].ndim == 3:
        pixels = torch.stack(samples).permute(0, 3, 1, 2).float()
        return {"pixel_values": pixels.div_(255).sub_(0.5).div_(0.5), "labels": labels}
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
