"""A few kills of the soak; ``make soak`` has fifty."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.soak.kills import Soak


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_three_kills_of_four_ranks_cost_no_bit(tmp_path: Path) -> None:
    soak = Soak(tmp_path, ranks=4, seed=3)
    soak.run(kills=3, seconds=540)
    assert soak.summary()["kills"] == 3, f"too few kills fell into the run: {soak.lines()}"
    assert soak.rounds >= 1
