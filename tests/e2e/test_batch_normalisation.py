"""A model with batch normalisation on several ranks: no sample is alone, or nothing has begun when that is said."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401

# this one and those above are loaded so that the server from which ranks are forked loads them, once
import paceline.run.run  # noqa: F401
from paceline.recipe import Recipe
from tests.e2e.ranks import on_ranks
from tests.testing.tiny import tiny_resnet_config

pytestmark = pytest.mark.timeout(120)


def images(**loop: Any) -> Recipe:
    """13 training images, of which a ResNet makes one position."""
    return Recipe.parse(
        {
            "model": {"config": tiny_resnet_config(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])},
            "data": {
                "source": "builtin:random",
                "random": {"samples": 20, "image": (8, 8, 1)},
                "splits": {"train": 13, "validation": 7, "test": 0},
            },
            "loop": {"epochs": 2, **loop},
            "device": "cpu",
            "observe": {"console": "off", "report": False},
        }
    )


def test_the_last_batch_of_an_epoch_goes_to_as_many_ranks_as_it_is_enough_for(tmp_path: Path) -> None:
    ended = on_ranks(4, f"file://{tmp_path}/meeting", images(batch_size=8), tmp_path / "run")
    assert [rank.error for rank in ended] == [None] * 4
    sizes = [[len(rank.shares[step]) for rank in ended] for step in range(4)]
    assert sizes == [[2, 2, 2, 2], [3, 2, 0, 0]] * 2
    for epoch in (0, 1):
        taken = itertools.chain(*(share for rank in ended for share in rank.shares[2 * epoch : 2 * epoch + 2]))
        assert sorted(taken) == sorted(itertools.chain(*(s for e, _, s in ended[0].samples if e == epoch)))


@pytest.mark.parametrize(
    ("ranks", "loop", "fix"),
    [
        (4, {"batch_size": 4}, 'settings=["loop.batch_size=8"] or more, or start 2 processes or fewer'),
        (2, {"batch_size": 6}, 'settings=["loop.drop_last=true"]'),
        (1, {"batch_size": 6}, 'settings=["loop.drop_last=true"]'),
    ],
)
def test_a_sample_that_would_be_alone_is_refused_before_anything_begins(
    ranks: int, loop: dict[str, int], fix: str, tmp_path: Path
) -> None:
    ended = on_ranks(ranks, f"file://{tmp_path}/meeting", images(**loop), tmp_path / "run")
    assert {rank.error and rank.error.exit_code for rank in ended} == {2}, [rank.error for rank in ended]
    assert {str(rank.error).rpartition("\n  fix: ")[2] for rank in ended} == {fix}
    assert not (tmp_path / "run" / "recipe.yaml").exists()
