"""``precision: pure_bf16`` planned: half of what weights, gradients and states take elsewhere."""

from __future__ import annotations

import pytest

from paceline.memory.predict import Predictor
from tests.unit.memory.test_data_parallel import planned


@pytest.mark.timeout(240)
def test_weights_gradients_and_states_take_half() -> None:
    with Predictor() as predictor:
        mixed, pure = (
            planned(predictor, f"techniques.precision={name}", batch_size=16) for name in ("bf16", "pure_bf16")
        )
    for part in ("parameters", "gradients", "optimizer states"):
        assert pure.parts[part] == pytest.approx(mixed.parts[part] / 2, rel=0.02), part
    assert pure.phases["forward"] < mixed.phases["forward"]
