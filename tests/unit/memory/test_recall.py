"""What is recalled of an operator is what torch answers: ``recalling.py``, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.memory.apart import assert_holds


@pytest.mark.timeout(120)
def test_recalled_results_are_torchs(tmp_path: Path) -> None:
    assert_holds("tests.unit.memory.recalling", tmp_path)
