import math

import numpy as np
import pytest
from torch.nn import Linear
from torch.optim import SGD
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from paceline.contract.errors import RecipeError
from paceline.optim.schedule import factors, rate_table
from paceline.recipe.parts import SchedulePart


@pytest.mark.parametrize(
    ("kind", "peer"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_equals_the_schedule_of_transformers(kind, peer) -> None:
    optimizer = SGD(Linear(1, 1).parameters(), lr=1.0)
    scheduler = peer(optimizer, 7, 40)
    expected = []
    for _ in range(40):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose(factors(SchedulePart(type=kind, warmup=7), 40), expected, atol=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_floor_is_reached_at_the_end_and_constant_stays(kind: str) -> None:
    found = factors(SchedulePart(type=kind, warmup=0, floor=0.1), 10_000)
    assert found[-1] == pytest.approx(0.1, abs=1e-4)
    assert found[0] == 1.0
    assert set(factors(SchedulePart(type="constant", warmup=0), 5)) == {1.0}


def test_warmup_as_a_share() -> None:
    found = factors(SchedulePart(type="constant", warmup=0.1), 100)
    assert found[9] < 1.0 == found[10]


def test_one_group_warms_up_while_another_stays_constant() -> None:
    table = rate_table([1e-3, 2e-2], [SchedulePart(warmup=4), SchedulePart(type="constant", warmup=0)], 8)
    assert table[0, 0] == 0.0
    assert table[4, 0] == 1e-3
    assert list(table[:, 1]) == [2e-2] * 8


def test_warmup_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(RecipeError, match="only 20 steps"):
        factors(SchedulePart(warmup=20), 20)


def test_a_users_schedule(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_schedules_test.py").write_text(
        "def halves(step, total): return 0.5 ** step\ndef bad(step, total): return float('nan')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert list(factors(SchedulePart(type="my_schedules_test:halves"), 3)) == [1.0, 0.5, 0.25]
    with pytest.raises(RecipeError, match="nan for step 0"):
        factors(SchedulePart(type="my_schedules_test:bad"), 3)
    with pytest.raises(RecipeError, match="did you mean 'halves'"):
        factors(SchedulePart(type="my_schedules_test:halvs"), 3)
    with pytest.raises(RecipeError, match="there is no module nowhere_to_be_found"):
        factors(SchedulePart(type="nowhere_to_be_found:f"), 3)
    assert math.isfinite(factors(SchedulePart(), 1)[0])
