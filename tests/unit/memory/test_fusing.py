"""What a plan counts of compiled code: ``fusing.py``, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.memory.apart import assert_holds


@pytest.mark.timeout(120)
def test_what_fused_kernels_keep_in_registers_takes_no_memory(tmp_path: Path) -> None:
    assert_holds("tests.unit.memory.fusing", tmp_path)
