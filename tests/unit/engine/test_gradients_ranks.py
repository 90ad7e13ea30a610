"""Gradients summed over ranks, seen from one process: what is summed when, in which order, and what stays behind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

from paceline.engine.statistics import kept_from_filler, running_statistics, settle_
from paceline.optim.flat import ALIGNMENT, FlatLayout
from paceline.optim.gradients import FlatGradients, Shards
from paceline.seams import World
from paceline.strategies.ddp.buckets import BucketAllReduce, Reduction


@final
class Likes(World):
    """``size`` ranks that all do the same; notes what is begun and what is waited for."""

    rank, local_rank = 0, 0

    def __init__(self, size: int = 2) -> None:
        self.size, self.begun, self.ended = size, [], 0
        self.others: Sequence[Tensor] | None = None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(self.size)

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        self.begun.append(tensor)

        def wait() -> None:
            self.ended += 1
            tensor.mul_(self.size)

        return wait

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        for tensor, other in zip(tensors, self.others or tensors, strict=True):
            tensor.copy_(other)

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def share(self, value: Any) -> Any:
        return value

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self, what: str) -> None: ...

    def alone_first(self, what: str) -> Any: ...


def stack(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth)))


def grouped(model: nn.Module) -> FlatLayout:
    """Matrices and biases in groups of their own, as weight decay has them."""
    parameters = list(model.parameters())
    return FlatLayout([[p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim == 1]])


def summed(model: nn.Module, world: World, layout: FlatLayout | None = None, **more: Any) -> FlatGradients:
    layout = layout or grouped(model)
    return FlatGradients(
        layout.parameters,
        layout,
        partial(BucketAllReduce, reduction=Reduction(world, tuple(model.parameters()), **more)),
    )


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 11, 1 << 30])
def test_buckets_cover_the_buffer_once_and_run_from_the_models_end_to_its_front(bucket_bytes: int) -> None:
    model = stack()
    gradients = summed(model, Likes(), bucket_bytes=bucket_bytes)
    (buffer,) = gradients.flat.buffers
    buckets = gradients._all_reduce.buckets
    covered = torch.zeros_like(buffer)
    for bucket in buckets:
        offset = bucket.stretch.storage_offset()
        covered[offset : offset + bucket.stretch.numel()] += 1
    assert torch.equal(covered, torch.ones_like(buffer))
    assert sorted(member for bucket in buckets for member in bucket.members) == list(range(8))
    matrices = [bucket.members for bucket in buckets if bucket.members[0] < 4]
    # 2 KiB hold two matrices, four biases take far less; a bucket never mixes the two groups
    expected = {1: [(3,), (2,), (1,), (0,)], 1 << 11: [(2, 3), (0, 1)], 1 << 30: [(0, 1, 2, 3)]}
    assert matrices == expected[bucket_bytes]
    assert (4, 5, 6, 7) in [bucket.members for bucket in buckets] or bucket_bytes == 1
    assert all(bucket.stretch.numel() % ALIGNMENT == 0 for bucket in buckets)
    place = {parameter: index for index, parameter in enumerate(model.parameters())}
    firsts = [min(place[gradients._parameters[i]] for i in bucket.members) for bucket in buckets]
    assert firsts == sorted(firsts, reverse=True), "a bucket waits for one that is complete later"


def test_the_sum_is_of_the_last_micro_batch_and_those_before_it() -> None:
    model, world = stack(), Likes()
    gradients, alone = summed(model, world, bucket_bytes=1), stack()
    inputs = torch.randn(3, 5, 16)
    for index, last in enumerate((False, False, True)):
        gradients.add(model(inputs[index]).square().sum(), first=index == 0, last=last)
        assert bool(world.begun) == last, f"micro-batch {index}"
        alone(inputs[index]).square().sum().backward()
    assert world.ended == 0
    gradients.finish()
    assert world.ended == len(world.begun) == 8
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found.grad, 2 * expected.grad)


class _Sees(torch.autograd.Function):
    """Calls ``see`` in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, see: Callable[[], None]) -> Tensor:
        ctx.see = see
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.see()
        return gradient, None


def test_sums_begin_beside_the_backward_pass() -> None:
    model, world = stack(), Likes()
    gradients, seen = summed(model, world, FlatLayout([list(model.parameters())]), bucket_bytes=1 << 10), []
    hidden = torch.randn(5, 16)
    for layer in model:
        hidden = _Sees.apply(layer(hidden), lambda: seen.append(len(world.begun)))
    gradients.add(hidden.sum(), first=True, last=True)
    # the first layer's turn comes last: by then the three behind it are complete, each a matrix and a bias
    assert seen[0] == 0
    assert seen[-1] >= 5, f"sums begun when each layer's backward began, last to first: {seen}"
    assert seen == sorted(seen)


def test_sums_begin_in_one_order_whatever_is_used() -> None:
    def order(use: Callable[[nn.Sequential, Tensor], Tensor]) -> list[int]:
        model, world = stack(), Likes()
        gradients = summed(model, world, bucket_bytes=1)
        gradients.add(use(model, torch.randn(5, 16)), first=True, last=True)
        gradients.finish()
        return [tensor.storage_offset() for tensor in world.begun]

    whole = order(lambda model, inputs: model(inputs).sum())
    assert order(lambda model, inputs: model[1](inputs).sum()) == whole
    assert order(lambda model, inputs: model[0](model[3](model[2](inputs))).sum()) == whole
    assert len(whole) == 8


def test_what_has_no_gradient_is_zero_and_a_custom_function_may_give_none() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return gradient, None

    model, world = stack(), Likes()
    gradients = summed(model, world)
    gradients.flat.buffers[0].fill_(7.0)
    gradients.add(Nothing.apply(model[0](torch.randn(5, 16)), model[1].weight).sum(), first=True, last=True)
    gradients.finish()
    assert model[0].weight.grad.any()
    assert not any(p.grad.any() for p in model[1:].parameters())


def test_a_tied_weight_is_summed_when_all_of_its_gradient_is_there() -> None:
    model, world = stack(2), Likes()
    model[1].weight = model[0].weight
    layout = FlatLayout([list(model.parameters())])
    gradients = summed(model, world, layout, bucket_bytes=1)
    inputs = torch.randn(5, 16)
    gradients.add(model(inputs).square().sum(), first=True, last=True)
    gradients.finish()
    (expected,) = torch.autograd.grad(model(inputs).square().sum(), [model[0].weight])
    assert torch.equal(model[0].weight.grad, 2 * expected)


@final
class Stream:
    """Notes what is waited for on it."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def wait_event(self, event: Any) -> None:
        self._log.append(("waits", event.number))


@final
class Event:
    """Notes when it is captured."""

    def __init__(self, log: list[Any], number: int) -> None:
        self._log, self.number = log, number

    def record(self) -> None:
        self._log.append(("captured", self.number))


def test_a_captured_backward_pass_sums_nothing_and_its_replays_do(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    captured = [True]
    module = "paceline.strategies.ddp.buckets"
    monkeypatch.setattr(f"{module}._stream", lambda device: Stream(log))
    monkeypatch.setattr(f"{module}._on", lambda stream, device: contextlib.nullcontext())
    monkeypatch.setattr(f"{module}._is_capturing", lambda device: captured[0])
    model, world = stack(), Likes()
    gradients, inputs = summed(model, world, bucket_bytes=1), torch.randn(5, 16)
    for number, bucket in enumerate(gradients._all_reduce.buckets):
        bucket.complete = Event(log, number)
    gradients.add(model(inputs).square().sum(), first=True, last=True)
    assert log == [("captured", number) for number in range(8)]
    assert world.begun == []
    for replay in (1, 2):
        log.clear()
        gradients.finish()
        assert log == [("waits", number) for number in range(8)]
        assert len(world.begun) == world.ended == 8 * replay
    captured[0] = False  # a shape that runs eagerly
    log.clear()
    gradients.add(model(inputs).square().sum(), first=True, last=True)
    assert len(world.begun) == 24
    gradients.finish()
    assert (log, world.ended) == ([], 24)


def test_no_hook_stays_behind_not_even_after_an_error() -> None:
    model, world = stack(), Likes()
    gradients = summed(model, world, bucket_bytes=1)

    def fail() -> None:
        raise RuntimeError("in the middle")

    loss = model[1](_Sees.apply(model[0](torch.randn(5, 16)), fail)).sum()
    with pytest.raises(RuntimeError, match="in the middle"):
        gradients.add(loss, first=True, last=True)
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    world.begun.clear()
    gradients.add(model(torch.randn(5, 16)).sum(), first=True, last=True)
    assert len(world.begun) == 8, "the step after begins its own sums"
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_alone_there_are_no_buckets_and_no_hooks() -> None:
    model = stack()
    gradients = FlatGradients(list(model.parameters()))
    hooks = []
    loss = _Sees.apply(model(torch.randn(5, 16)), lambda: hooks.extend(p._backward_hooks for p in model.parameters()))
    gradients.add(loss.sum(), first=True, last=True)
    gradients.finish()
    assert gradients._all_reduce is None
    assert hooks == [None] * 8


def test_sums_in_bf16_send_half_the_bytes_and_come_back_in_the_buffers_format() -> None:
    model, world = stack(), Likes()
    gradients = summed(model, world, dtype=torch.bfloat16)
    inputs = torch.randn(5, 16)
    gradients.add(model(inputs).square().sum(), first=True, last=True)
    gradients.finish()
    assert {tensor.dtype for tensor in world.begun} == {torch.bfloat16}
    expected = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, 2 * gradient.bfloat16().float())


def test_two_number_formats_are_summed_apart() -> None:
    model, world = stack(2), Likes()
    model[1].double()
    gradients = summed(model, world, FlatLayout([list(model.parameters())]))
    gradients.add(model[1](model[0](torch.randn(5, 16)).double()).sum(), first=True, last=True)
    gradients.finish()
    assert [tensor.dtype for tensor in world.begun] == [torch.float64, torch.float32]


def test_the_mean_of_statistics_is_from_rank_0_and_constants_do_not_drift() -> None:
    first = [torch.tensor([0.1, -torch.inf, torch.inf, 1e-30]), torch.tensor(7), torch.tensor([True, False])]
    same, world = [tensor.clone() for tensor in first], Likes(3)
    world.others = first
    for _ in range(5):
        settle_(same, world)
    assert all(torch.equal(one, other) for one, other in zip(first, same, strict=True))
    # this rank's are taken for those of all three, so that their mean is its own; the count is rank 0's
    mine = [torch.tensor([0.4, 0.0, 1.0, 2.0]), torch.tensor(9), torch.tensor([True, True])]
    world.others = [torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor(7), torch.tensor([True, False])]
    settle_(mine, world)
    torch.testing.assert_close(mine[0], torch.tensor([0.4, 0.0, 1.0, 2.0]))
    assert mine[1] == 7
    assert mine[2].tolist() == [True, False]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
def test_filler_leaves_running_statistics_alone_and_the_backward_pass_as_it_is(weights: list[float]) -> None:
    layers = [nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm2d(3)]
    model, inputs = nn.Sequential(*layers), torch.randn(2, 1, 4, 4)
    statistics = running_statistics(model)
    assert len(statistics) == 6
    before = [tensor.clone() for tensor in statistics]
    with kept_from_filler(statistics, torch.tensor(weights)):
        output = model(inputs)
    found = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    after = [tensor.clone() for tensor in statistics]
    for tensor, value in zip(statistics, before, strict=True):
        tensor.copy_(value)
    plain = model(inputs)
    expected = torch.autograd.grad(plain.square().sum(), list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    wanted = statistics if any(weights) else before
    assert all(torch.equal(one, other) for one, other in zip(after, wanted, strict=True))


def test_the_norm_counts_whole_gradients_once_and_adds_up_the_squares_of_shards() -> None:
    whole, shard = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    gradients = FlatGradients([whole, shard], shards=Shards({shard}, Likes(2)))
    gradients.add((2 * whole).sum() + (3 * shard).sum(), first=True, last=True)
    assert gradients.norm().item() == pytest.approx((3 * 4 + 2 * 4 * 9) ** 0.5, rel=1e-7)
    assert gradients.norm().dtype == torch.float32
