"""A model that is sharded over ranks is trained as one process trains it: losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.data.order import OrderState, ShuffledOrder
from paceline.prepare.assemble import Assembled, assemble, assemble_build
from paceline.recipe import Recipe
from paceline.seams import Build, Mesh, World
from paceline.strategies import strategy_for
from paceline.strategies.fsdp import shard
from paceline.strategies.fsdp.shard import whole
from paceline.tasks import task_for
from paceline.techniques.compile import apply_compile
from tests.parity import driving, reference
from tests.testing.distributed import run_distributed

STEPS, TOTAL = 3, 6


@dataclass(frozen=True)
class Case:
    """What is trained, and how; the same on all ranks and in one process."""

    techniques: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float64
    train: str = "all"
    batch_size: int = 8
    micro_batch_size: int = 8
    clip_norm: float | None = None
    optimizer: str = "adamw"
    dropout: float = 0.0
    spare: bool = False
    """With a weight that takes no part in the loss."""
    parallel: tuple[tuple[str, Any], ...] = ()
    unit_bytes: int = 1
    """From which weights are gathered by themselves; 1: each block is."""

    def recipe(self) -> Any:
        return driving.recipe(
            techniques={**driving.PLAIN, **dict(self.techniques)},
            optimizer={"clip_norm": self.clip_norm, "type": self.optimizer},
            loop={"batch_size": self.batch_size, "micro_batch_size": self.micro_batch_size},
        )

    def sharded(self) -> Any:
        """The same recipe for ranks that share the weights."""
        return Recipe.parse({**self.recipe().plain(), "parallel": {"strategy": "fsdp", **dict(self.parallel)}})


@dataclass(frozen=True)
class Outcome:
    """Of a few steps: whole tensors by name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    execution: dict[str, str]


def model_of(case: Case, seed: int = 7) -> nn.Module:
    model = reference.tiny_model(dropout=case.dropout).to(case.dtype)
    if seed != 7:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(seed)
    if case.train == "head":
        model.distilbert.requires_grad_(False)
    if case.spare:
        model.spare = nn.Parameter(torch.ones(5, 3, dtype=case.dtype))
    return model


def built(case: Case, model: nn.Module) -> Build:
    chosen, data = case.recipe(), driving.dataset()
    return assemble_build(
        chosen,
        model,
        data,
        task_for(data.kind, data.label_names, chosen.task),
        torch.device("cpu"),
        blocks=list(model.distilbert.transformer.layer),
        normalisation=((0.5,) * 3, (0.5,) * 3),
    )


def alone(case: Case, steps: int = STEPS) -> Outcome:
    """One process, without any sharding."""
    model, chosen = model_of(case), case.recipe()
    run = driving.assembled(model, chosen, TOTAL)
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step, (ids, counted) in enumerate(shares(case, 0, 1, steps)):
        done = run.engine.accumulate_batches([run.build.layout.collate(one) for one in ids], counted, step=step)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        norms.append(run.engine.update().norm.item())
        losses.append(done.loss.item())
    return Outcome(
        losses, norms, gradients, {k: v.clone() for k, v in model.state_dict().items()}, dict(run.build.execution)
    )


def sharded(world: World, case: Case, model: nn.Module | None = None) -> Assembled:
    """As ``assemble`` puts it together, with the model sharded over the ranks."""
    model, mesh, chosen = model or model_of(case, seed=7 + world.rank), Mesh.over(world), case.sharded()
    with mock.patch.object(shard, "UNIT_BYTES", case.unit_bytes):
        build = strategy_for(chosen, mesh).prepare(built(case, model))
    return assemble(chosen, build, TOTAL, mesh=mesh)


def together(world: World, case: Case, steps: int = STEPS) -> Outcome:
    """The same steps on all ranks."""
    return outcome(world, case, sharded(world, case), steps)


def outcome(world: World, case: Case, run: Assembled, steps: int) -> Outcome:
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step, (ids, counted) in enumerate(shares(case, world.rank, world.size, steps)):
        done = run.engine.accumulate_batches([run.build.layout.collate(one) for one in ids], counted, step=step)
        trained = ((name, p.grad) for name, p in run.build.model.named_parameters() if p.grad is not None)
        gradients = {name: tensor.clone() for name, tensor in whole(trained)}
        norms.append(run.engine.update().norm.item())
        losses.append(world.all_reduce(done.loss.clone()).item())
    weights = {name: tensor.clone() for name, tensor in whole(run.engine._named())}
    return Outcome(losses, norms, gradients, weights, dict(run.build.execution))


def shares(case: Case, rank: int, size: int, steps: int) -> Sequence[tuple[tuple[np.ndarray, ...], int]]:
    """Micro-batches of this rank and labels of the global batch, a step each."""
    order = ShuffledOrder(np.arange(reference.SAMPLES), micro_batch_size=case.micro_batch_size)
    at = OrderState(seed=0, epoch=0, step=0, batch_size=case.batch_size)
    found = []
    for _ in range(steps):
        plan = order.plan(at, rank, size)
        found.append((plan.microbatches, len(plan.samples)))
        at = order.after(at)
    return found


def _fail(error: Exception) -> Any:
    raise error


def assert_equal(one: Outcome, other: Outcome, tolerance: float) -> None:
    # losses and norms are fp32 in every number format of the weights
    assert other.losses == pytest.approx(one.losses, rel=max(tolerance, 1e-6)), "losses"
    assert other.norms == pytest.approx(one.norms, rel=max(tolerance, 1e-6)), "gradient norms"
    for what in ("gradients", "weights"):
        a, b = getattr(one, what), getattr(other, what)
        assert what == "gradients" or a.keys() == b.keys(), "weights have other names"
        for name in b:
            distance = (b[name] - a[name]).abs().max().item()
            assert distance <= tolerance * max(1.0, a[name].abs().max().item()), f"{what}: {name} differs by {distance}"


CASES = {
    "padded": Case(),
    "accumulated, ragged": Case(batch_size=7, micro_batch_size=2),
    "one rank without samples": Case(batch_size=3, clip_norm=100.0),
    "packed, accumulated": Case(techniques=(("packing", True),), micro_batch_size=3),
    "joined products": Case(techniques=(("packing", True), ("early_pooling", True), ("fused_qkv", True))),
    "recomputed": Case(techniques=(("recompute", True),)),
    "frozen backbone": Case(train="head"),
    "an unused weight": Case(spare=True, micro_batch_size=2),
    "neighbours together": Case(unit_bytes=2**30, batch_size=7, micro_batch_size=2),
    "neighbours together, recomputed": Case(techniques=(("recompute", True),), unit_bytes=2**30),
    "groups of two": Case(parallel=(("shard_size", 2),), batch_size=7, micro_batch_size=2),
}


def all_together(world: World, cases: dict[str, Case]) -> dict[str, Outcome]:
    return {name: together(world, case) for name, case in cases.items()}


ON_FOUR = ("one rank without samples", "groups of two")
SLOW = ("padded", "accumulated, ragged", "packed, accumulated", "neighbours together, recomputed")
"""What is among the other cases in parts: `make test-full` looks at each alone."""


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(2, tuple(name for name in CASES if name not in SLOW), id="2"),
        pytest.param(4, ON_FOUR, id="4"),
        pytest.param(2, SLOW, id="2-the others", marks=pytest.mark.slow),
        pytest.param(4, ("packed, accumulated",), id="4-the others", marks=pytest.mark.slow),
    ],
)
def test_shards_train_as_one_process_does(ranks: int, names: tuple[str, ...]) -> None:
    expected = {name: alone(CASES[name]) for name in names}
    for rank, found in enumerate(run_distributed(all_together, ranks, {name: CASES[name] for name in names})):
        for name in names:
            try:
                assert_equal(expected[name], found[name], 1e-12)
            except AssertionError as error:
                raise AssertionError(f"{name}, rank {rank} of {ranks}: {error}") from None
    if "groups of two" in names:
        assert found["groups of two"].execution["parallel"] == f"fsdp: 2 shards{', 2 copies' if ranks == 4 else ''}"


def test_small_neighbours_are_one_unit() -> None:
    blocks = [nn.Linear(size, 1, bias=False) for size in (3, 3, 4, 20, 1, 1)]
    with mock.patch.object(shard, "UNIT_BYTES", 4 * 6):
        units = [[block.in_features for block in unit] for unit in shard.neighbours(blocks)]
    assert units == [[3, 3], [4, 20], [1, 1]]


def ddp_and_fsdp(world: World, case: Case) -> tuple[Outcome, Outcome]:
    model = model_of(case, seed=7 + world.rank)
    ddp = assemble(case.recipe(), built(case, model), TOTAL, mesh=Mesh.over(world))
    return outcome(world, case, ddp, STEPS), together(world, case)


BF16 = Case((("precision", "bf16"),), dtype=torch.float32, dropout=0.1, micro_batch_size=2)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_in_bf16_with_dropout_two_shards_have_the_bits_of_ddp(optimizer: str) -> None:
    """Two addends have one sum: nothing else may differ, so that weights are rounded where DDP's are."""
    for ddp, fsdp_ in run_distributed(ddp_and_fsdp, 2, replace(BF16, optimizer=optimizer)):
        assert fsdp_.losses == ddp.losses
        assert fsdp_.norms == pytest.approx(ddp.norms, rel=1e-6)
        different = [name for name in ddp.weights if not torch.equal(ddp.weights[name], fsdp_.weights[name])]
        assert not different, f"weights differ: {different[:4]}"


def test_clipped_and_scaled_as_ddp() -> None:
    """fp16's loss scale and a clip that bites: up to the rounding of the norm, which is summed in another order."""
    case = Case((("precision", "fp16"),), dtype=torch.float32, clip_norm=0.05)
    for ddp, fsdp_ in run_distributed(ddp_and_fsdp, 2, case):
        assert min(ddp.norms) > 0.05, "nothing is clipped"
        assert_equal(ddp, replace(fsdp_, gradients={}), 1e-6)


def traced(world: World, case: Case) -> tuple[Outcome, int]:
    """Blocks as torch's compiler traces them; and how many graphs it makes of them."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = model_of(case)
    apply_compile(list(model.distilbert.transformer.layer), backend=backend)
    found = outcome(world, case, sharded(world, case, model), STEPS)
    torch._dynamo.reset()
    return found, len(graphs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_one_trace_serves_all_blocks_whole_or_in_shards() -> None:
    case = Case(techniques=(("packing", True),), micro_batch_size=2)
    for found, graphs in run_distributed(traced, 2, case):
        assert_equal(alone(case), found, 1e-12)
        assert graphs == 1, f"two equal blocks and rows of many lengths are {graphs} compilations"


def overflowing(world: World, case: Case) -> tuple[list[bool], int, list[float]]:
    """Three steps, of which the second is infinite on the last rank alone."""
    run = sharded(world, case)
    finite, checksums = [], []
    for step, (ids, counted) in enumerate(shares(case, world.rank, world.size, 3)):
        batches = [run.build.layout.collate(one) for one in ids]
        if step == 1 and world.rank == world.size - 1:
            batches = [replace(batch, weights=batch.weights * torch.inf) for batch in batches]
        run.engine.accumulate_batches(batches, counted, step=step)
        finite.append(bool(run.engine.update().finite))
        checksums.append(sum(tensor.double().abs().sum().item() for _, tensor in whole(run.engine._named())))
    return finite, run.engine.state()[1]["applied"], checksums


def test_what_is_infinite_on_one_rank_is_skipped_by_all() -> None:
    found = run_distributed(overflowing, 4, Case())
    for finite, applied, checksums in found:
        assert finite == [True, False, True]
        assert applied == 2
        assert checksums[0] == checksums[1] != checksums[2]
    assert all(checksums == found[0][2] for _, _, checksums in found), "ranks hold different weights"
