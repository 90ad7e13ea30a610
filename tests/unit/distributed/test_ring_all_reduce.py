"""The documentation's running example gives what all_reduce gives, and runs under torchrun as it says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.seams import World
from tests.testing.distributed import run_distributed

pytestmark = pytest.mark.usefixtures("forked_interpreters")

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "ring_all_reduce.py"


def goes_round(world: World, sizes: list[int]) -> list[bool]:
    spec = importlib.util.spec_from_file_location("ring_all_reduce", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    equal = []
    for size in sizes:
        # whole numbers: every order of adding gives the same bits
        tensor = torch.randint(99, (size,), generator=torch.Generator().manual_seed(world.rank)).float()
        expected = world.all_reduce(tensor.clone())
        module.ring_all_reduce(tensor)
        equal.append(torch.equal(tensor, expected))
    return equal


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ring_gives_what_all_reduce_gives(size: int) -> None:
    sizes = [1, 2, 3, 4, 5, 7, 64, 10_001]
    assert run_distributed(goes_round, size, sizes) == [[True] * len(sizes)] * size


def test_the_example_is_short_enough_to_read() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.slow
def test_the_example_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 ranks: the ring gives what all_reduce gives\n"
