"""``parallel.tensor`` planned: what one rank holds beside what it would hold of whole blocks."""

from __future__ import annotations

import pytest

from paceline.memory.predict import Predictor
from tests.unit.memory.test_data_parallel import planned

NUMBERS = 6 * (4 * 512 * 512 + 2 * 512 * 2048 + 3 * 512 + 2048)
"""Of six blocks' matrices, and of the biases that are cut with them."""


@pytest.mark.timeout(240)
def test_a_rank_keeps_half_of_the_blocks_and_takes_twice_the_samples(predictor: Predictor) -> None:
    whole = planned(predictor, batch_size=64, gpus=4)
    half = planned(predictor, "parallel.tensor=2", batch_size=64, gpus=4)
    assert (whole.samples, half.samples) == (16, 32), "groups split the batch, not processes"
    assert half.execution["tensor"] == "2 shards of each block"
    assert half.num_parameters == whole.num_parameters, "of the model, not of a rank"
    for part, size in (("parameters", 4), ("gradients", 4), ("optimizer states", 8)):
        assert whole.parts[part] - half.parts[part] == pytest.approx(NUMBERS // 2 * size, rel=0.01), part
