"""Twenty steps of a fixed small run against numbers written down, so that a change of defaults is never silent.

Rounding differs between processors and versions of torch; without dropout it moves these losses by less than the
tolerance. A change that is meant is written down with ``python -m tests.golden.test_loss_curve`` and explained where it
is made.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from paceline.recipe import Recipe
from paceline.verbs.train import train
from tests.testing.tiny import TEXTS, write_tiny_model

FILE = Path(__file__).with_name("loss_curve.json")
RELATIVE_TOLERANCE = 1e-4


def run(folder: Path, *settings: str) -> dict[str, list[float]]:
    """Losses, gradient norms and learning rates of twenty steps; defaults are left alone but for the rate."""
    words = [text.split() for text in TEXTS]
    # texts of 2 to 13 words; the label says in which half of the four the first word is found
    data = [
        {"text": " ".join((words[index % 4] * 2)[index // 4 % 5 :][: 2 + index % 12]), "label": "ab"[index % 4 // 2]}
        for index in range(64)
    ]
    recipe = Recipe.parse(
        {
            "model": {"source": str(write_tiny_model(folder / "model"))},
            "data": {"splits": {"validation": 0, "test": 0}},
            "optimizer": {"lr": 3e-2},
            "loop": {"batch_size": 12, "epochs": 4, "max_steps": 20, "checkpoint_every": "never"},
            "observe": {"console": "off", "report": False},
            "device": "cpu",
        }
    ).with_settings(settings)
    train(recipe, data, out=folder / "run")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    return {
        "loss": [step["loss"] for step in steps],
        "gradient_norm": [step["gradient_norm"] for step in steps],
        "learning_rate": [step["learning_rates"][0] for step in steps],
    }


@pytest.mark.parametrize("settings", [[], ["loop.micro_batch_size=5"]], ids=["whole batches", "micro-batches"])
def test_the_loss_curve_is_the_one_written_down(settings: list[str], tmp_path: Path) -> None:
    expected = json.loads(FILE.read_text())
    found = run(tmp_path, *settings)
    for name, values in found.items():
        assert len(values) == 20
        assert values == pytest.approx(expected[name], rel=RELATIVE_TOLERANCE), f"{name}: see this file's docstring"


@pytest.mark.parametrize(
    "setting", ["optimizer.weight_decay=0.02", "optimizer.betas=[0.9,0.99]", "schedule.warmup=0", "loop.drop_last=true"]
)
def test_another_default_would_be_seen(setting: str, tmp_path: Path) -> None:
    """The comparison can fail."""
    expected = json.loads(FILE.read_text())
    assert run(tmp_path, setting)["loss"] != pytest.approx(expected["loss"], rel=RELATIVE_TOLERANCE)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        FILE.write_text(json.dumps(run(Path(made)), indent=1) + "\n")
