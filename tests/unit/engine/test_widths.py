"""Shapes that all ranks have in common: worked out by each alone, and the same on all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.data.dataset import Tokens
from paceline.data.layout import PackedLayout, PaddedLayout
from paceline.data.order import OrderState, ShuffledOrder
from paceline.seams import Layout, StepInput
from paceline.strategies.fsdp.strategy import with_widths

CPU = torch.device("cpu")


def widths(order: ShuffledOrder, layout: Layout, at: OrderState, ranks: int) -> StepInput:
    given = StepInput(0, order.plan(at, 0, ranks).microbatches, 1)
    return with_widths(given, order.of_all_ranks(at, ranks), layout)


def texts(count: int) -> Tokens:
    lengths = np.random.default_rng(3).integers(4, 40, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Tokens(np.arange(offsets[-1]).astype(np.uint16) + 10, offsets, 0, None)


def layout_of(kind: str, tokens: Tokens, resident: bool = True) -> Layout:
    labels = np.zeros(len(tokens), dtype=np.int64)
    if kind == "padded":
        return PaddedLayout(tokens, labels, CPU, token_types=False, resident=resident)
    return PackedLayout(tokens, labels, CPU, token_types=False, first_position=0, bucket=16, resident=resident)


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("micro", [4, 8])
def test_all_ranks_get_micro_batches_of_one_shape(kind: str, ranks: int, micro: int) -> None:
    tokens = texts(96)
    layout, order = (
        layout_of(kind, tokens),
        ShuffledOrder(np.arange(96), micro_batch_size=micro, lengths=tokens.lengths),
    )
    at = OrderState(seed=0, epoch=0, step=0, batch_size=8 * ranks)
    for _ in range(order.steps_per_epoch(8 * ranks)):
        found = widths(order, layout, at, ranks)
        assert found.same_shapes
        for index, slots in enumerate(found.widths):
            ids = [order.plan(at, rank, ranks).microbatches[index] for rank in range(ranks)]
            assert slots == max(layout.size(one).slots for one in ids), "wider than any rank needs"
            shapes = {layout.collate(one, slots=slots).inputs["input_ids"].shape for one in ids}
            assert len(shapes) == 1, f"micro-batch {index}: {shapes}"
        at = order.after(at)


def test_ranks_with_unequal_counts_are_not_alike() -> None:
    tokens = texts(30)
    order = ShuffledOrder(np.arange(30), micro_batch_size=8, lengths=tokens.lengths)
    at = OrderState(seed=0, epoch=0, step=1, batch_size=15)
    found = widths(order, layout_of("packed", tokens), at, 2)
    assert (found.widths, found.same_shapes) == ((), False), "8 texts and 7"


def test_what_cannot_be_widened_is_alike_only_by_chance() -> None:
    tokens = texts(64)
    order = ShuffledOrder(np.arange(64), micro_batch_size=8, lengths=tokens.lengths)
    layout, at, seen = (
        layout_of("packed", tokens, resident=False),
        OrderState(seed=0, epoch=0, step=0, batch_size=4),
        [],
    )
    for _ in range(16):
        found = widths(order, layout, at, 2)
        sizes = {layout.size(order.plan(at, rank, 2).microbatches[0]).slots for rank in range(2)}
        assert found.same_shapes == (len(sizes) == 1)
        assert found.width(0) is None
        seen.append(found.same_shapes)
        at = order.after(at)
    assert any(seen)
    assert not all(seen)
