"""The process that traces: what is said of one that fails."""

from __future__ import annotations

import sys

import pytest

from paceline.machine.facts import Gpu
from paceline.memory import predict
from paceline.memory.predict import PlanFailed, Predictor
from paceline.recipe import Recipe

GPU = Gpu(name="NVIDIA H100", driver="580.1", memory_bytes=80 * 2**30, compute_capability=(9, 0))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('ImportError: no module named torchvision._C')", r"code 1\): ImportError: no module"),
        ("raise SystemExit(3)", r"\(exit code 3\)$"),
    ],
)
def test_a_process_that_fails_is_quoted(program: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken torchvision was an exit code, without its reason."""
    monkeypatch.setattr(predict, "python", lambda *words: [sys.executable, "-c", program])
    recipe = Recipe.parse({"model": {"source": "m"}, "data": {"source": "d.csv"}})
    with Predictor() as predictor:
        for _ in range(2):
            with pytest.raises(PlanFailed, match=message):
                predictor.plan(recipe, GPU)
