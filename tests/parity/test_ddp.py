"""DDP beside torch's DistributedDataParallel: the same batches, the same weights after three optimizer steps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.data.order import OrderState
from paceline.seams import World
from tests.distributed.splitting import assembled, checksum, furthest, order_of, train
from tests.parity import driving
from tests.parity.reference import linear_schedule, padded, samples, tiny_model
from tests.testing.distributed import run_distributed

STEPS, TOTAL, EXACT = 3, 20, 1e-9

OPTIMIZERS = {
    "adamw": ({}, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)),
    "sgd": (
        {"type": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    ),
}


def by_torch(world: World, chosen: Any, kind: str) -> dict[str, torch.Tensor]:
    """The plainest loop over DistributedDataParallel, which takes the mean of the ranks' gradients."""
    model = tiny_model(dropout=0.0).double()
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    optimizer = OPTIMIZERS[kind][1](model)
    base = optimizer.param_groups[0]["lr"]
    texts, labels = samples()
    order, at = order_of(chosen), OrderState(seed=chosen.seed, epoch=0, step=0, batch_size=chosen.loop.batch_size)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = base * linear_schedule(step, TOTAL, 2)
        optimizer.zero_grad()
        pieces = order.plan(at, world.rank, world.size).microbatches
        for index, ids in enumerate(pieces):
            last = index == len(pieces) - 1
            wrapped.require_backward_grad_sync = last
            logits = wrapped(**padded([texts[i] for i in ids])).logits
            (F.cross_entropy(logits, torch.from_numpy(labels[ids])) / len(pieces)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        at = order.after(at)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def side_by_side(world: World, kind: str, techniques: dict[str, Any], micro: int | None) -> tuple[float, str]:
    settings = {**OPTIMIZERS[kind][0], "decay_all": True}
    loop = {"batch_size": 8, "micro_batch_size": micro}
    chosen = driving.recipe(optimizer=settings, techniques={**driving.PLAIN, **techniques}, loop=loop)
    run = assembled(world, chosen, steps=TOTAL)
    train(run, chosen, world, STEPS)
    ours = run.engine.whole()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own defaults
        theirs = by_torch(world, chosen, kind)
    return furthest(ours, theirs), checksum(ours)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("micro", [None, 2], ids=["one", "accumulated"])
@pytest.mark.parametrize(
    "techniques", [{}, {"packing": True, "early_pooling": True, "fused_qkv": True}], ids=["padded", "packed"]
)
def test_weights_are_those_of_torchs_ddp(kind: str, micro: int | None, techniques: dict[str, Any]) -> None:
    found = run_distributed(side_by_side, 2, kind, techniques, micro)
    for rank, (far, _) in enumerate(found):
        assert far < EXACT, f"rank {rank}: weights are {far:.1e} from those of DistributedDataParallel"
    assert found[0][1] == found[1][1], "ranks hold different weights"


def not_summed(world: World) -> float:
    """The comparison can fail: a run that does not sum is far from one that does."""
    chosen = driving.recipe(optimizer={"decay_all": True}, loop={"batch_size": 8})
    run = assembled(world, chosen, steps=TOTAL)
    run.engine._step.gradients._all_reduce = None
    train(run, chosen, world, STEPS)
    return furthest(run.engine.whole(), by_torch(world, chosen, "adamw"))


def test_without_sums_the_weights_are_others() -> None:
    assert all(far > 1e-5 for far in run_distributed(not_summed, 2))
