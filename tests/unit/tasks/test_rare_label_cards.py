"""What the pages of rare labels show for a loop of one's own runs as it stands there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.recipe.catalogue.loss import LOSS
from tests.unit.test_docs import ROOT, blocks

GIVEN = {
    "label_smoothing": {"logits": torch.randn(4, 3), "labels": torch.eye(4, 3)},
    "class_weights": {"labels": np.array([0, 0, 0, 1])},
    "focal": {"logits": torch.randn(4, 3), "labels": torch.tensor([0, 1, 2, 0])},
    "balanced_sampler": {"labels": np.array([0, 0, 0, 1])},
    "tuned_threshold": {
        "probabilities": np.array([[0.9, 0.1], [0.7, 0.3], [0.6, 0.4]], np.float32),
        "labels": np.array([0, 1, 1]),
    },
}
"""What a loop has at that place."""


@pytest.mark.parametrize("name", [entry.name for entry in LOSS])
def test_the_example_of_a_page_runs(name: str) -> None:
    (example,) = [found for found in blocks(ROOT / "docs" / "techniques" / f"{name}.md") if found.language == "python"]
    after = dict(GIVEN[name])
    exec(compile(example.text, example.place, "exec"), after)
    match name:
        case "class_weights":
            loss = after["loss"](torch.randn(2, 2), torch.tensor([0, 1]))
            assert loss.isfinite()
        case "balanced_sampler":
            assert len(list(after["sampler"])) == 4
        case "tuned_threshold":
            assert after["predicted"].tolist() == [False, True, True]
        case _:
            assert after["loss"].ndim == 0


def test_every_page_is_of_an_entry() -> None:
    assert {Path(entry.page).stem for entry in LOSS} == GIVEN.keys()
