from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.contract.errors import UserError
from paceline.engine.adopt import adopt


class Parallel(DistributedDataParallel):
    """The wrapper without the process group that it would ask for."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def sharded() -> nn.Module:
    """What fully_shard does to a module's class."""
    from torch.distributed.fsdp import FSDPModule

    module = nn.Linear(2, 2)
    module.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    return module


@pytest.mark.parametrize(
    ("make", "name"), [(lambda: Parallel(nn.Linear(2, 2)), "DistributedDataParallel"), (sharded, "FSDPModule")]
)
@pytest.mark.parametrize("inside", [lambda m: m, lambda m: nn.Sequential(nn.ReLU(), m)])
def test_a_model_whose_gradients_are_summed_by_hooks_is_refused(make, name: str, inside) -> None:
    model = inside(make())
    with pytest.raises(UserError, match=f"wrapped in {name}") as error:
        adopt(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).sum())
    assert "backward()" in error.value.why
    assert error.value.fix


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_of_several_is_refused(size: int) -> None:
    """Each rank trained a model of its own, without a word."""
    model = nn.Linear(2, 2)
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with pytest.raises(UserError, match="in rank 0 of 2") if size > 1 else nullcontext():
            adopt(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).sum())
    finally:
        dist.destroy_process_group()


def test_an_ordinary_model_is_adopted() -> None:
    model = nn.Linear(2, 2)
    engine = adopt(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).sum())
    before = model.weight.detach().clone()
    engine.accumulate([torch.ones(1, 2)], 1)
    assert engine.update().finite
    torch.testing.assert_close(model.weight.detach(), before - 0.1)
    assert "eager: the loop is not paceline's" in engine.execution.values()


INPUTS, LABELS = torch.randn(8, 3), torch.arange(8) % 2
Fields = namedtuple("Fields", ["inputs", "labels"])


def adopted(loss_sum: Callable[[nn.Module, Any], Any]) -> Any:
    model = nn.Linear(3, 2)
    return adopt(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum)


def entropy(model: nn.Module, batch: Any, **how: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, **how)


MEANS: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "the default": entropy,
    "smoothed labels": lambda m, b: entropy(m, b, label_smoothing=0.1),
    "weighted classes": lambda m, b: entropy(m, b, weight=torch.ones(2), label_smoothing=0.1),
    "mean()": lambda m, b: entropy(m, b, reduction="none").mean(),
    "a sum divided by its count": lambda m, b: entropy(m, b, reduction="sum") / len(b[1]),
    "a weighted mean": lambda m, b: 0.5 * entropy(m, b),
    "divided for accumulation": lambda m, b: entropy(m, b) / 4,
    "another format": lambda m, b: entropy(m.double(), (b[0].double(), b[1])).float(),
    "squares": lambda m, b: F.mse_loss(m(b[0])[:, 0], b[1].float()),
    "several labels": lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), torch.ones(8, 2)),
    "a penalty": lambda m, b: entropy(m, b) + 1e-4 * m.weight.pow(2).sum(),
    "two terms": lambda m, b: entropy(m, b) + 0.1 * m(b[0]).pow(2).mean(),
}
SUMS: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "a sum": lambda m, b: entropy(m, b, reduction="sum"),
    "a mean times its count": lambda m, b: entropy(m, b) * len(b[1]),
    "its count times a mean": lambda m, b: len(b[1]) * entropy(m, b),
    "a count on the device": lambda m, b: entropy(m, b) * (b[1] >= 0).sum(),
    "means of features": lambda m, b: m(b[0]).pow(2).mean(1).sum(),
    "a scaled sum": lambda m, b: entropy(m, b, reduction="sum") / 3,
    "a mean of the weights beside the sum": lambda m, b: entropy(m, b, reduction="sum") + m.weight.pow(2).mean(),
    "a dot product": lambda m, b: torch.ones(8) @ entropy(m, b, reduction="none"),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="a mean") as error:
        adopted(MEANS[name]).accumulate([(INPUTS, LABELS)], denominator=8)
    assert 'reduction="sum"' in error.value.fix


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_none(name: str) -> None:
    engine = adopted(SUMS[name])
    for _ in range(2):
        engine.accumulate([(INPUTS, LABELS)], denominator=8)
        assert engine.update().finite


def test_a_mean_of_one_label_a_batch_is_its_sum() -> None:
    engine = adopted(entropy)
    engine.accumulate([(INPUTS[:1], LABELS[:1]), (INPUTS[1:2], LABELS[1:2])], denominator=2)
    assert engine.update().finite


def test_several_means_of_an_update_are_refused_too() -> None:
    halves = [(INPUTS[:4], LABELS[:4]), (INPUTS[4:], LABELS[4:])]
    with pytest.raises(UserError, match="a mean"):
        adopted(entropy).accumulate(halves, denominator=8)


@pytest.mark.parametrize(
    "batch",
    [
        {"inputs": INPUTS, "labels": LABELS},
        Fields(INPUTS, LABELS),
        [INPUTS, LABELS],
        (INPUTS, LABELS),
        INPUTS,
        "a text",
        object(),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_that_is_in_no_list_is_refused(batch: Any) -> None:
    with pytest.raises(UserError, match="single batch") as error:
        adopted(entropy).accumulate(batch, denominator=8)
    assert "[batch]" in error.value.fix


@pytest.mark.parametrize("batches", [[], (), iter(())], ids=["list", "tuple", "iterator"])
def test_an_update_without_a_batch_is_refused(batches: Any) -> None:
    with pytest.raises(UserError, match="no micro-batch"):
        adopted(entropy).accumulate(batches, denominator=8)


def test_batches_may_be_bare_tensors_or_come_from_an_iterator() -> None:
    engine = adopted(lambda model, batch: model(batch).sum())
    engine.accumulate([INPUTS[:2], INPUTS[2:5]], denominator=5)
    engine.accumulate(iter([INPUTS[:2], INPUTS[2:5]]), denominator=5)
    engine.accumulate((INPUTS[at : at + 1] for at in range(3)), denominator=3)
    assert engine.update().finite


@pytest.mark.parametrize("denominator", [0, -1, float("nan"), float("inf"), torch.tensor(0)])
def test_a_denominator_that_is_no_count_is_refused(denominator: Any) -> None:
    with pytest.raises(UserError, match="denominator="):
        adopted(SUMS["a sum"]).accumulate([(INPUTS, LABELS)], denominator=denominator)


@pytest.mark.parametrize(
    ("loss_sum", "words"),
    [
        (lambda m, b: entropy(m, b, reduction="none"), r"shape \[8\]"),
        (lambda m, b: entropy(m, b, reduction="sum").item(), "a float"),
        (lambda m, b: entropy(m, b, reduction="sum").detach(), "depends on no weight"),
        (lambda m, b: None, "a NoneType"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_refused(loss_sum: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        adopted(loss_sum).accumulate([(INPUTS, LABELS)], denominator=8)
