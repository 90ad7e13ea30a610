"""A strategy of somebody else's is its room and its entry: with these, ranks train as one process does."""

from __future__ import annotations

import pytest
import torch

from paceline.recipe import Recipe, techniques
from paceline.seams import Alone, Mesh, World
from paceline.strategies import strategy_for
from tests.distributed.splitting import assembled, checksum, furthest, train
from tests.parity import driving
from tests.parity.reference import tiny_model
from tests.strategies.ring import ENTRY, Ring
from tests.testing.distributed import run_distributed


def recipe(strategy: str = "auto") -> Recipe:
    """Of a strategy that the recipe's own field does not know yet."""
    chosen = driving.recipe(loop={"batch_size": 10, "micro_batch_size": 3})
    return chosen.model_copy(update={"parallel": chosen.parallel.model_copy(update={"strategy": strategy})})


def round_the_ring(world: World) -> tuple[list[float], dict[str, torch.Tensor], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(techniques, "ENTRIES", (*techniques.ENTRIES, ENTRY))
        torch.manual_seed(world.rank)  # ranks begin with other weights
        chosen = recipe("ring")
        run = assembled(world, chosen, model=tiny_model(dropout=0.0))
        losses, gradients, _ = train(run, chosen, world, 3)
        return losses, gradients[-1], checksum(run.engine.whole())


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_a_ring_train_as_one_process(ranks: int) -> None:
    found = run_distributed(round_the_ring, ranks)
    alone = assembled(Alone(), recipe())
    losses, gradients, _ = train(alone, recipe(), Alone(), 3)
    for theirs, last, _ in found:
        assert theirs == pytest.approx(losses, rel=1e-12)
        assert furthest(last, gradients[-1]) < 1e-10
    assert len({digest for _, _, digest in found}) == 1, "ranks have other weights than one another"


def test_it_is_the_ring_that_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(techniques, "ENTRIES", (*techniques.ENTRIES, ENTRY))
    assert isinstance(strategy_for(recipe("ring"), Mesh()), Ring)
