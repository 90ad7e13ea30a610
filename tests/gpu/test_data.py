"""Batches on a GPU: resident or read ahead, they are the CPU's bit for bit, and nothing waits."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from paceline.data.dataset import Images, Tokens
from paceline.data.image_layout import Augmentation
from paceline.data.layout import ImageLayout, PackedLayout, PaddedLayout, WindowedLayout
from paceline.kernels.images import images as arranged
from paceline.recipe.parts import AugmentPart
from paceline.seams import Batch, Layout
from tests.gpu.waiting import waits_are_errors

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EVERYTHING = AugmentPart(flip=True, crop=4, cutout=8)
IDS = np.random.default_rng(1).permutation(1_000).reshape(-1, 40)


def padded(device: torch.device, resident: bool) -> Layout:
    return PaddedLayout(*texts(), device, token_types=True, bucket=64, resident=resident)


def packed(device: torch.device, resident: bool) -> Layout:
    return PackedLayout(*texts(), device, token_types=True, first_position=2, bucket=256, resident=resident)


def images(device: torch.device, resident: bool, augment: AugmentPart | None = None) -> Layout:
    generator = np.random.default_rng(0)
    pixels = Images(generator.integers(0, 256, (1_000, 32, 32, 3), dtype=np.uint8))
    mean, deviation = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    settings: dict[str, Any] = {"mean": mean, "deviation": deviation, "resident": resident, "augment": augment}
    return ImageLayout(pixels, generator.integers(0, 10, 1_000), device, **settings)


def windowed(device: torch.device, resident: bool) -> Layout:
    """Texts of one to three windows, packed."""
    counts = np.random.default_rng(2).integers(1, 4, 1_000)
    tokens, labels = texts(int(counts.sum()))
    settings: dict[str, Any] = {"token_types": True, "first_position": 2, "bucket": 256, "resident": resident}
    whole = replace(tokens, windows=np.concatenate([[0], np.cumsum(counts)]))
    return WindowedLayout(PackedLayout(tokens, labels, device, **settings), whole, device)


def augmented(device: torch.device, resident: bool) -> Layout:
    return images(device, resident, EVERYTHING)


def texts(count: int = 1_000) -> tuple[Tokens, np.ndarray]:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 513, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    second = generator.integers(0, lengths + 1).astype(np.int32)
    tokens = Tokens(generator.integers(100, 60_000, offsets[-1]).astype(np.uint16), offsets, 1, second)
    return tokens, generator.integers(0, 2, (count, 3)).astype(np.float32)


def assert_equal(one: Batch, other: Batch, *, rounding: bool = False) -> None:
    first, second = (_pytree.tree_flatten(batch) for batch in (one, other))
    assert first[1] == second[1]
    for mine, yours in zip(first[0], second[0], strict=True):
        assert mine.dtype == yours.dtype
        if rounding and mine.is_floating_point():
            torch.testing.assert_close(mine.cpu(), yours.cpu(), rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(mine.cpu(), yours.cpu())


@pytest.mark.parametrize("make", [padded, packed, windowed, images])
def test_resident_and_read_ahead_batches_are_the_cpus(make: Any) -> None:
    on_cpu, resident, ahead = make(CPU, False), make(CUDA, True), make(CUDA, False)
    ahead.expect(list(IDS))
    try:
        for ids in IDS:
            expected, one, other = (layout.collate(ids) for layout in (on_cpu, resident, ahead))
            assert {tensor.device.type for tensor in _pytree.tree_leaves(one)} == {"cuda"}
            assert_equal(one, other)
            # division by a number may round differently on a GPU
            assert_equal(one, expected, rounding=make is images)
    finally:
        ahead.close()


@pytest.mark.parametrize("make", [padded, packed, windowed, images, augmented])
@pytest.mark.parametrize("resident", [False, True])
def test_collate_waits_for_nothing(make: Any, resident: bool) -> None:
    layout = make(CUDA, resident)
    try:
        layout.collate(IDS[0], 0)
        with waits_are_errors():
            layout.expect(list(IDS))
            for draw, ids in enumerate(IDS):
                layout.collate(ids, draw)
    finally:
        layout.close()


def test_pinned_memory_is_not_used_again_before_it_is_sent() -> None:
    """Batches are made while the GPU is busy, so that their copies all wait; each must still be its own."""
    on_cpu, ahead = packed(CPU, False), packed(CUDA, False)
    ahead.expect(list(IDS))
    try:
        torch.cuda._sleep(200_000_000)
        batches = [ahead.collate(ids) for ids in IDS]
        for ids, batch in zip(IDS, batches, strict=True):
            assert_equal(batch, on_cpu.collate(ids))
    finally:
        ahead.close()


def test_the_reading_thread_ends() -> None:
    layout = packed(CUDA, False)
    layout.expect(list(IDS[:2]))
    assert any(thread.name.startswith("paceline-read-ahead") for thread in threading.enumerate())
    layout.close()
    assert not any(thread.name.startswith("paceline-read-ahead") for thread in threading.enumerate())


def test_reading_ahead_does_not_disturb_a_capture() -> None:
    layout = packed(CUDA, False)
    static = torch.ones(8, device=CUDA)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        static.mul_(2)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    try:
        layout.expect(list(IDS))
        with torch.cuda.graph(graph):
            static.mul_(2)
        assert layout.collate(IDS[0]).labels.shape == (40, 3)
        graph.replay()
        assert static.tolist() == [4.0] * 8
    finally:
        layout.close()


def test_augmentation_is_repeatable_and_equal_resident_or_not() -> None:
    resident, ahead = augmented(CUDA, True), augmented(CUDA, False)
    try:
        for draw in (0, 1, 2**64 - 1):
            one = resident.collate(IDS[0], draw)
            assert_equal(one, resident.collate(IDS[0], draw))
            assert_equal(one, ahead.collate(IDS[0], draw))
        assert not torch.equal(
            resident.collate(IDS[0], 1).inputs["pixel_values"], resident.collate(IDS[0], 2).inputs["pixel_values"]
        )
    finally:
        ahead.close()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("side", [11, 32, 224])
@pytest.mark.parametrize("changed", [False, True])
def test_images_have_the_bits_of_the_cpu_for_the_same_numbers(side: int, last: bool, changed: bool) -> None:
    draws = Augmentation(EVERYTHING, side, side, CPU).draw(40, seed=3) if changed else None
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (50, side, side, 3), generator=generator).to(torch.uint8)
    ids = torch.randint(0, 50, (40,), generator=generator)
    mean, deviation = torch.tensor([0.5, 0.4, 0.3]).view(-1, 1, 1), torch.tensor([0.2, 0.25, 0.3]).view(-1, 1, 1)
    one, other = (
        arranged(*(each if each is None else each.to(device) for each in (pixels, ids, draws, mean, deviation)),
               EVERYTHING.crop, EVERYTHING.cutout, last)
        for device in (CPU, CUDA)
    )  # fmt: skip
    assert other.stride() == one.stride()
    assert torch.equal(other.cpu(), one)


def test_augmentation_takes_as_many_kernels_for_a_large_batch_as_for_a_small_one() -> None:
    layout = augmented(CUDA, True)
    counts = []
    for size in (8, 400):
        ids = IDS.reshape(-1)[:size]
        layout.collate(ids, 0)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            layout.collate(ids, 1)
            torch.cuda.synchronize()
        counts.append(sum(event.count for event in profile.key_averages() if event.device_type.name == "CUDA"))
    assert counts[0] == counts[1] > 0, f"kernels for 8 and 400 images: {counts}"
    assert counts[0] <= 6
