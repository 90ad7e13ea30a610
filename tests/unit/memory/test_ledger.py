"""A ledger observes lifetimes: of real tensors here, and of the stand-in's in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.memory.ledger import Ledger
from tests.unit.memory import lifetimes
from tests.unit.memory.apart import assert_holds, checks

CPU = torch.device("cpu")


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with torch.autograd.set_multithreading_enabled(False), Ledger("cpu") as found:
        yield found


@pytest.mark.parametrize("check", checks(vars(lifetimes)))
def test_of_real_tensors(check: str, ledger: Ledger) -> None:
    vars(lifetimes)[check](lifetimes.Place(CPU, ledger))


def test_of_tensors_that_hold_nothing(tmp_path: Path) -> None:
    assert_holds("tests.unit.memory.lifetimes", tmp_path)


def test_torch_adds_gradients_that_meet_in_the_memory_of_the_first() -> None:
    """What the ledger has to show, as it is without one."""
    made, total = lifetimes.three_gradients_meet(torch.zeros(lifetimes.N, requires_grad=True), Tensor.data_ptr)
    assert total == made[0]
