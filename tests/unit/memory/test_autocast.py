"""Casts on a device that stands in for a card are those of CUDA: ``casting.py``, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from tests.unit.memory.apart import assert_holds


def test_casts_are_those_of_cuda(tmp_path: Path) -> None:
    assert_holds("tests.unit.memory.casting", tmp_path)
