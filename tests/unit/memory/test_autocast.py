"""Casts on a device that stands in for a GPU are those of CUDA: ``casting.py``, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.memory.apart import assert_holds


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 12),
    reason="the calls are those of CUDA's table from torch 2.12 on",
)
def test_casts_are_those_of_cuda(tmp_path: Path) -> None:
    assert_holds("tests.unit.memory.casting", tmp_path)
