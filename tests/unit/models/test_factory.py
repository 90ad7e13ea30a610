"""What a user's function may return, and what is refused with the setting that does the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.contract.errors import ModelError, RecipeError
from paceline.models.factory import build
from paceline.techniques.sync_batch_norm import refuse_torchs

Define = Callable[[Callable[..., Any]], str]


@pytest.fixture
def define() -> Iterator[Define]:
    """Put a function into a module, and return the reference to it."""
    module = ModuleType("nets_of_a_user")
    sys.modules[module.__name__] = module

    def define(function: Callable[..., Any]) -> str:
        module.model = function  # type: ignore[attr-defined]
        return f"{module.__name__}:model"

    yield define
    del sys.modules[module.__name__]


def net(num_labels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, num_labels))


def sharded(num_labels: int) -> nn.Module:
    """A model of FSDP2's class, without the ranks that making one takes."""
    from torch.distributed.fsdp import FSDPModule

    return type("FSDPLinear", (FSDPModule, nn.Linear), {"__new__": lambda cls, *sizes: object.__new__(cls)})(4, 3)


class Net(nn.Linear):
    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__(4, num_classes)


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (lambda num_labels: nn.DataParallel(net(num_labels)), ("in DataParallel", "--gpus N", "parallel.strategy=dp")),
        # its constructor would ask for a process group, or wait for ranks that build later
        (lambda num_labels: DistributedDataParallel(net(num_labels)), ("in DistributedDataParallel", "--gpus N")),
        (lambda num_labels: nn.Sequential(nn.DataParallel(net(num_labels))), ("in DataParallel",)),
        (sharded, ("in FSDPLinear", "parallel.strategy=fsdp")),
        (lambda num_labels: torch.compile(net(num_labels)), ("compiled", "--set techniques.compile=true")),
        (lambda num_labels: net(num_labels).half(), ("weights are float16", "float()", "techniques.precision=fp16")),
        (lambda num_labels: net(num_labels).bfloat16(), ("weights are bfloat16", "techniques.precision=bf16")),
        (lambda num_labels: net(num_labels).double(), ("weights are float64", "return model.float()")),
        (lambda num_labels: (net(num_labels), 1), ("returned tuple",)),
        (lambda classes: net(classes), ("failed when called with num_labels=3", "def model(num_labels)")),
    ],
)
def test_what_a_setting_does_here_is_refused_with_the_setting(
    define: Define, function: Callable[..., Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError) as refused:
        build(define(function), 3)
    for part in parts:
        assert part in str(refused.value), refused.value
    # the constructors are torch's own again
    assert nn.DataParallel(nn.Linear(1, 1)).module.weight.shape == (1, 1)


@pytest.mark.parametrize("function", [net, Net, lambda num_classes: net(num_classes), lambda **sizes: net(**sizes)])
def test_the_number_of_labels_has_either_name(define: Define, function: Callable[..., Any]) -> None:
    assert list(build(define(function), 3).parameters())[-1].shape == (3,)


def test_torchs_synchronised_batch_norm_is_refused_among_ranks_alone() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(net(3))
    refuse_torchs(model, 1)
    refuse_torchs(net(3), 2)
    with pytest.raises(ModelError, match=r"1 is a torch.nn.SyncBatchNorm(.|\n)*--set parallel.sync_batch_norm=true"):
        refuse_torchs(model, 2)


def test_a_module_that_is_not_there_is_still_named() -> None:
    with pytest.raises(RecipeError, match="there is no module nets_of_nobody"):
        build("nets_of_nobody:model", 3)
