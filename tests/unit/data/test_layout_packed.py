"""Packed rows: every token where it belongs, filler that covers the rest, shapes that depend on totals alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.contract.errors import DataError
from paceline.data.dataset import Tokens
from paceline.data.layout import PackedLayout, bucket_for
from paceline.seams import Batch, Ids

CPU = torch.device("cpu")
PAD = 9


def tokens_of(lengths: list[int], *, pairs: bool = False, dtype: Any = np.uint16) -> Tokens:
    generator = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    second = generator.integers(0, np.array(lengths) + 1).astype(np.int32) if pairs else None
    return Tokens(generator.integers(10, 60_000, offsets[-1]).astype(dtype), offsets, PAD, second)


def layout_of(tokens: Tokens, labels: Any = None, **settings: Any) -> PackedLayout:
    chosen = {"token_types": False, "first_position": 0, "bucket": 16, "resident": False} | settings
    labels = np.arange(len(tokens)) if labels is None else labels
    return PackedLayout(tokens, labels, CPU, **chosen)


def some_ids(count: int, among: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).choice(among, count, replace=False)


def lengths_of(count: int, most: int = 40) -> list[int]:
    return np.random.default_rng(1).integers(1, most + 1, count).tolist()


def leaves(batch: Batch) -> dict[str, torch.Tensor]:
    assert batch.packed is not None
    found = {"labels": batch.labels, "weights": batch.weights, **batch.inputs}
    return found | {"cu_seqlens": batch.packed.cu_seqlens, "sequence": batch.packed.sequence}


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(("bucket", "first"), [(1, 0), (16, 2), (128, 5)])
def test_every_sample_is_found_whole_at_its_sequence(resident: bool, bucket: int, first: int) -> None:
    tokens = tokens_of(lengths_of(30))
    ids = some_ids(11, 30)
    batch = layout_of(tokens, bucket=bucket, first_position=first, resident=resident).collate(ids)
    assert batch.packed is not None
    bounds = batch.packed.cu_seqlens.tolist()
    for sample, sequence in zip(ids, batch.packed.sequence.tolist(), strict=True):
        begin, end = bounds[sequence], bounds[sequence + 1]
        expected = tokens.flat[tokens.offsets[sample] : tokens.offsets[sample + 1]].tolist()
        assert batch.inputs["input_ids"][0, begin:end].tolist() == expected, f"sample {sample}"
        assert batch.inputs["position_ids"][0, begin:end].tolist() == list(range(first, first + end - begin))
    assert batch.packed.first.tolist() == [bounds[sequence] for sequence in batch.packed.sequence.tolist()]
    assert batch.labels.tolist() == ids.tolist(), "labels keep the order of the ids"
    assert batch.weights.tolist() == [1.0] * len(ids)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("bucket", [1, 7, 16, 100, 256])
def test_filler_covers_the_rest_and_no_sequence_is_longer_than_any_sample(resident: bool, bucket: int) -> None:
    tokens = tokens_of(lengths_of(30))
    layout = layout_of(tokens, bucket=bucket, first_position=3, resident=resident)
    longest = max(tokens.lengths)
    for seed in range(20):
        ids = some_ids(9, 30, seed)
        batch = layout.collate(ids)
        assert batch.packed is not None
        bounds = batch.packed.cu_seqlens.numpy()
        widths = np.diff(bounds)
        slots, real = batch.inputs["input_ids"].shape[1], int(tokens.lengths[ids].sum())
        assert slots % bucket == 0
        assert 0 <= slots - real < bucket
        assert bounds[0] == 0
        assert bounds[-1] == slots, "a position belongs to no sequence: attention would leave it unwritten"
        assert widths.min() >= 0
        assert widths.max() <= longest == batch.packed.max_length
        assert (np.diff(widths[:9]) <= 0).all(), "longest first"
        assert len(widths) == 9 + -(-bucket // longest), "the number of sequences depends on the samples alone"
        nonempty = np.flatnonzero(widths)
        assert nonempty.tolist() == list(range(len(nonempty))), "empty sequences stand at the end"
        assert (batch.inputs["input_ids"][0, real:] == PAD).all()
        for begin, width in zip(bounds[9:-1], widths[9:], strict=True):
            positions = batch.inputs["position_ids"][0, begin : begin + width].tolist()
            assert positions == list(range(3, 3 + width)), "filler has positions that the model knows"


@pytest.mark.parametrize("pairs", [False, True], ids=["texts", "pairs"])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("kind", ["classes", "targets", "multi-label"])
def test_resident_equals_host_bit_for_bit(pairs: bool, dtype: Any, kind: str) -> None:
    tokens = tokens_of(lengths_of(50), pairs=pairs, dtype=dtype)
    generator = np.random.default_rng(2)
    labels = {
        "classes": generator.integers(0, 3, 50),
        "targets": generator.standard_normal(50).astype(np.float32),
        "multi-label": generator.integers(0, 2, (50, 4)).astype(np.float32),
    }[kind]
    settings = {"token_types": True, "first_position": 2, "bucket": 64}
    host, resident = (layout_of(tokens, labels, resident=mode, **settings) for mode in (False, True))
    for seed in range(10):
        ids = some_ids(1 + 2 * seed, 50, seed)
        one, other = leaves(host.collate(ids)), leaves(resident.collate(ids))
        assert list(one) == list(other)
        assert ("token_type_ids" in one) == pairs
        for name, tensor in one.items():
            assert tensor.dtype == other[name].dtype, name
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("resident", [False, True])
def test_token_types_begin_where_the_second_text_does(resident: bool) -> None:
    tokens = tokens_of(lengths_of(20), pairs=True)
    assert tokens.second is not None
    ids = some_ids(8, 20)
    batch = layout_of(tokens, token_types=True, bucket=128, resident=resident).collate(ids)
    assert batch.packed is not None
    bounds, types = batch.packed.cu_seqlens.tolist(), batch.inputs["token_type_ids"][0]
    for sample, sequence in zip(ids, batch.packed.sequence.tolist(), strict=True):
        begin, end = bounds[sequence], bounds[sequence + 1]
        ones = end - begin - tokens.second[sample]
        assert types[begin:end].tolist() == [0] * tokens.second[sample] + [1] * ones, f"sample {sample}"
    assert not types[bounds[8] :].any(), "filler is of type 0"


def test_the_layout_of_other_samples_has_the_same_settings() -> None:
    settings = {"token_types": True, "first_position": 2, "bucket": 32}
    others = tokens_of(lengths_of(12), pairs=True)
    expected = layout_of(others, **settings)
    made = layout_of(tokens_of([3, 4], pairs=True), resident=True, **settings).over(others, np.arange(12))
    one, other = leaves(made.collate(np.arange(7))), leaves(expected.collate(np.arange(7)))
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_size_is_that_of_the_batch() -> None:
    tokens = tokens_of(lengths_of(30))
    layout = layout_of(tokens, bucket=64)
    ids = some_ids(7, 30)
    size = layout.size(ids)
    assert (size.samples, size.tokens) == (7, tokens.lengths[ids].sum())
    assert size.slots == layout.collate(ids).inputs["input_ids"].numel()


def test_evaluation_order_keeps_the_samples_and_evens_the_totals() -> None:
    generator = np.random.default_rng(3)
    lengths = np.minimum(generator.lognormal(5.4, 0.6, 5_000), 512).astype(int) + 1
    tokens = tokens_of(np.sort(lengths).tolist())  # sorted in the file: the worst case for the given order
    layout = layout_of(tokens, bucket=256)
    ids = np.arange(1_000, 5_000)
    ordered = layout.sorted(ids)
    assert np.array_equal(np.sort(ordered), ids)
    rows = {layout.size(ordered[start : start + 64]).slots for start in range(0, len(ids) - 64, 64)}
    assert len(rows) <= 4, f"{len(rows)} shapes, each of which is a captured graph"


@pytest.mark.parametrize("resident", [False, True])
def test_an_empty_sample_is_named(resident: bool) -> None:
    with pytest.raises(DataError, match="sample 1 has no tokens, nor have 1 others"):
        layout_of(tokens_of([3, 0, 5, 0]), resident=resident)


@pytest.mark.parametrize("resident", [False, True])
def test_a_read_only_data_set_will_do(resident: bool) -> None:
    tokens, labels = tokens_of([3, 4]), np.arange(2)
    for array in (tokens.flat, tokens.offsets, labels):
        array.setflags(write=False)
    ids = np.arange(2)
    ids.setflags(write=False)
    assert layout_of(tokens, labels, resident=resident).collate(ids).labels.tolist() == [0, 1]


def test_a_resident_batch_takes_few_launches_and_one_copy() -> None:
    class Counter(TorchDispatchMode):
        names: tuple[str, ...] = ()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = function.overloadpacket._qualified_op_name
            # views, and what only exists on the host, launch nothing
            if name.removeprefix("aten::") not in {"split_with_sizes", "slice", "unsqueeze", "empty", "detach"}:
                self.names += (name,)
            return function(*args, **(kwargs or {}))

    tokens = tokens_of(lengths_of(200))
    layout = layout_of(tokens, resident=True, bucket=64)
    layout.collate(some_ids(32, 200))
    with Counter() as counter:
        layout.collate(some_ids(32, 200, 1))
    assert len(counter.names) <= 14, counter.names


@pytest.mark.parametrize("resident", [False, True])
def test_what_the_model_reads_is_a_view_of_nothing(resident: bool) -> None:
    batch = layout_of(tokens_of(lengths_of(30), pairs=True), token_types=True, resident=resident).collate(np.arange(8))
    assert batch.packed is not None
    assert len(batch.inputs) == 3
    for name, tensor in {**batch.inputs, "cu_seqlens": batch.packed.cu_seqlens}.items():
        assert not tensor._is_view(), f"{name}: what torch compiles for it is compiled anew for a copy"


def test_buckets_are_powers_of_two_between_64_and_2048() -> None:
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(5.4, 0.6, 10_000), 512).astype(np.int64)
    found = [bucket_for(lengths, samples, 2_000) for samples in (1, 12, 32, 64, 128, 100_000)]
    assert found == sorted(found)
    assert found[0] < found[-1]
    assert found[-1] == 2048
    assert all(bucket & (bucket - 1) == 0 for bucket in found)
    assert bucket_for(np.full(100, 512), 32, 100) == 64, "equal lengths need no room"
    assert bucket_for(np.empty(0, dtype=np.int64), 32, 100) == 64
    longer = [bucket_for(lengths, 64, microbatches) for microbatches in (10, 1_000, 10_000, 100_000)]
    assert longer == sorted(longer, reverse=True), "a longer run can afford more shapes"
    assert longer[0] > longer[-1]


@pytest.mark.parametrize("samples", [16, 32, 64, 128])
def test_totals_of_three_epochs_fall_into_few_buckets(samples: int) -> None:
    generator = np.random.default_rng(0)
    lengths = np.minimum(generator.lognormal(5.4, 0.6, 20_000), 512).astype(np.int64)
    bucket = bucket_for(lengths, samples, 3 * 35_000 // samples)
    totals = lengths[generator.integers(0, len(lengths), (2_000, samples))].sum(axis=1)
    rows = -(-totals // bucket)
    assert 8 <= len(np.unique(rows)) <= 24
    assert (rows * bucket / totals).mean() < 1.04, "filler"


def test_a_micro_batch_above_every_bucket_is_a_row_of_its_own_size() -> None:
    """Only the longest samples together: far above six standard deviations, and nothing is cut off."""
    lengths = np.concatenate([np.full(2_000, 20), np.full(32, 500)]).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = Tokens(np.ones(offsets[-1], dtype=np.uint16), offsets, 0, None)
    bucket = bucket_for(lengths, 32, 1_000)
    layout = PackedLayout(
        tokens,
        np.zeros(len(lengths), np.int64),
        CPU,
        token_types=False,
        first_position=0,
        bucket=bucket,
        resident=False,
    )
    batch = layout.collate(np.arange(2_000, 2_032))
    assert batch.packed is not None
    assert batch.inputs["input_ids"].shape[1] == -(-32 * 500 // bucket) * bucket
    assert int(batch.inputs["input_ids"].sum()) == 32 * 500


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("bucket", "wider"), [(16, 0), (16, 3), (128, 1), (64, 32)])
def test_a_row_made_wider_holds_the_same_and_has_its_shape_by_width_alone(pairs: bool, bucket: int, wider: int) -> None:
    tokens = tokens_of(lengths_of(60), pairs=pairs)
    layout = layout_of(tokens, bucket=bucket, resident=True, token_types=pairs, first_position=2)
    assert layout.widens_by >= wider * bucket
    one, other = some_ids(11, 60), some_ids(11, 60, seed=1)
    slots = max(layout.size(ids).slots for ids in (one, other)) + wider * bucket
    rows = [layout.collate(ids, slots=slots) for ids in (one, other)]
    shapes = [{name: tensor.shape for name, tensor in leaves(row).items()} for row in rows]
    assert shapes[0] == shapes[1]
    assert rows[0].inputs["input_ids"].shape == (1, slots)
    for ids, row in zip((one, other), rows, strict=True):
        plain = layout.collate(ids)
        assert row.packed is not None
        assert plain.packed is not None
        bounds, real = row.packed.cu_seqlens.tolist(), int(tokens.lengths[ids].sum())
        assert bounds[: len(ids) + 1] == plain.packed.cu_seqlens.tolist()[: len(ids) + 1]
        assert bounds[-1] == slots, "attention would leave positions unwritten"
        assert max(np.diff(bounds)) <= tokens.lengths.max()
        for name in row.inputs:
            assert torch.equal(row.inputs[name][0, :real], plain.inputs[name][0, :real]), name
        assert (row.inputs["input_ids"][0, real:] == PAD).all()


def test_what_is_read_ahead_is_not_made_wider() -> None:
    assert layout_of(tokens_of(lengths_of(30)), resident=False).widens_by == 0
