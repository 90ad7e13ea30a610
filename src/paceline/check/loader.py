"""An epoch, and an evaluation, has each sample once, with its own tokens and its own label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

from paceline.check.claim import Broken
from paceline.check.plain import row_inputs
from paceline.check.subject import Subject
from paceline.data.dataset import Images, Tokens
from paceline.prepare.course import Course
from paceline.seams import Batch, Build, Ids, Mesh

WORLDS = (1, 2, 3)
"""Ranks that the samples of each step are split over."""

EPOCHS = 2


def check(subject: Subject) -> str:
    """Splits share no sample, epochs have each once on any number of ranks, and batches hold what they name."""
    _splits(subject)
    loop = subject.recipe.loop
    recipe, build = subject.build(*subject.calm, f"loop.micro_batch_size={max(1, loop.batch_size // 2)}")
    course = Course(recipe, subject.dataset, build, Mesh())
    for world_size in WORLDS:
        if loop.batch_size >= world_size:
            _epochs(subject, course, world_size)
    name, ids = subject.held_out
    for size in (1, 3, loop.batch_size):
        _each_once(f"an evaluation of {name} in batches of {size}", build.layout.batches(ids, size), ids)
    seen = 0
    for piece in np.split(subject.train, range(3, len(subject.train), 3)):
        _holds(subject, build, piece)
        seen += len(piece)
    ranks = f"{WORLDS[0]} to {WORLDS[-1]} ranks"
    how = "each epoch draws as many as there are (loop.sampler)" if loop.sampler else f"each once in {EPOCHS} epochs"
    return f"{len(subject.train)} samples, {how}, on {ranks}; {seen} batches' samples have their own inputs and labels"


def _splits(subject: Subject) -> None:
    """All the data are looked at, not a few samples."""
    whole = subject.prepared.dataset.splits
    counts = Counter(int(sample) for ids in whole.values() for sample in ids)
    twice = next((sample for sample, count in counts.items() if count > 1), None)
    if twice is not None:
        where = [name for name, ids in whole.items() if twice in ids]
        raise Broken(f"sample {twice} is in {' and in '.join(where)} more than once", tensor=f"sample {twice}")


def _epochs(subject: Subject, course: Course, world_size: int) -> None:
    train, loop = subject.train, subject.recipe.loop
    whole = len(train) // loop.batch_size * loop.batch_size if loop.drop_last else len(train)
    at, orders = course.start, list[Ids]()
    for epoch in range(EPOCHS):
        taken = list[Ids]()
        while at.epoch == epoch:
            step = course.of_all_ranks(at, world_size)
            _each_once(f"step {at.step} of epoch {epoch} on {world_size} ranks", step, course.plan(at).samples)
            taken += step
            at = course.after(at)
        found = np.concatenate(taken)
        orders.append(found)
        if len(found) != whole:
            raise Broken(f"epoch {epoch} has {len(found)} samples on {world_size} ranks, and there are {whole}")
        if loop.sampler is None and not loop.drop_last:
            _each_once(f"epoch {epoch} on {world_size} ranks", taken, train)
        elif not set(found.tolist()) <= set(train.tolist()):
            raise Broken(f"epoch {epoch} has samples that are none of train")
    if loop.shuffle and len(train) > 4 and world_size == 1 and np.array_equal(orders[0], orders[1]):
        raise Broken("two epochs have their samples in the same order, and loop.shuffle is on")


def _each_once(what: str, pieces: Iterable[Ids], expected: Ids) -> None:
    counts, wanted = Counter(np.concatenate(list(pieces)).tolist()), Counter(expected.tolist())
    for sample in (*wanted, *counts):
        if counts[sample] != wanted[sample]:
            told = f"{what}: sample {sample} comes {counts[sample]} times, not {wanted[sample]}"
            raise Broken(told, tensor=f"sample {sample}")


def _holds(subject: Subject, build: Build, piece: Ids) -> None:
    """A batch has the labels and the inputs of its samples, in their order, and each counts."""
    batch = build.layout.collate(piece)
    labels = torch.from_numpy(np.array(subject.dataset.labels[piece])).to(batch.labels)
    for at, sample in enumerate(piece.tolist()):
        if not torch.equal(batch.labels[at], labels[at]):
            raise Broken(f"the label of sample {sample} is {batch.labels[at].tolist()} in its batch", tensor="labels")
        if batch.weights[at] != 1:
            raise Broken(f"sample {sample} counts {float(batch.weights[at])} times in its batch", tensor="weights")
    inputs = subject.dataset.inputs
    if isinstance(inputs, Tokens):
        if inputs.windows is None:
            for at, sample in enumerate(piece.tolist()):
                _same_tokens(inputs, batch, at, sample)
    else:
        _same_pixels(subject, inputs, batch, piece)


def _same_tokens(tokens: Tokens, batch: Batch, at: int, sample: int) -> None:
    expected = row_inputs(tokens, sample)["input_ids"][0]
    rows = batch.inputs["input_ids"]
    if batch.packed is not None:
        sequence = int(batch.packed.sequence[at])
        begin, end = (int(batch.packed.cu_seqlens[sequence + step]) for step in (0, 1))
        found = rows[0, begin:end]
    else:
        mask = batch.inputs.get("attention_mask")
        row = rows[at]
        found = row[mask[at].bool()] if mask is not None else row[: len(expected)]
    if not torch.equal(found.cpu(), expected):
        raise Broken(f"sample {sample} has other tokens in its batch than in the data", tensor="input_ids")


def _same_pixels(subject: Subject, images: Images, batch: Batch, piece: Ids) -> None:
    settings = subject.images
    assert settings is not None
    pixels = torch.from_numpy(np.array(images.pixels[piece])).movedim(-1, 1).float() / 255
    channels = pixels.shape[1]
    mean, std = (torch.tensor(each[:channels]).view(-1, 1, 1) for each in (settings.mean, settings.std))
    expected, found = (pixels - mean) / std, batch.inputs["pixel_values"].float().cpu()
    for at, sample in enumerate(piece.tolist()):
        if not torch.allclose(found[at], expected[at], atol=1e-5):
            away = float((found[at] - expected[at]).abs().max())
            raise Broken(f"sample {sample} has other pixels in its batch than in the data", tensor="pixels", away=away)
