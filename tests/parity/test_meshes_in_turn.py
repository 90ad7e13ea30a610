"""A run that goes on over one mesh after another; and checkpoints that no mesh can put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.contract.errors import CheckpointError
from paceline.prepare.assemble import Assembled
from paceline.seams import Alone, Mesh, World
from tests.parity import test_pipeline, test_tensor
from tests.testing.distributed import run_distributed

ADAMW: dict[str, Any] = {"optimizer": "adamw", "clip_norm": None}
CASES = {"tensor": test_tensor.Case("bert", **ADAMW), "pipeline": test_pipeline.Case("bert", **ADAMW)}
STRETCHES = ((2, 4, 5), (1, 4, 3), (1, 1, 2))
"""Ranks that share a model, ranks of the run, steps: 2 x 2, then 4 whole models, then one process."""


def begun(kind: str, world: World, shared: int, seed: int) -> tuple[Assembled, Mesh]:
    axis = {"tensor": "tensor", "pipeline": "pipe"}[kind]
    mesh = Mesh.over(world, **{axis: shared}) if world.size > 1 else Mesh()
    if kind == "tensor":
        return test_tensor.assembled(CASES[kind], mesh, seed), mesh
    return test_pipeline.assembled(CASES[kind], test_pipeline.Cut(shared), mesh, seed), mesh


def stretch(world: World, kind: str, shared: int, first: int, steps: int, saved: Any) -> tuple[list[float], Any]:
    """Losses of some steps, and the state behind them."""
    run, mesh = begun(kind, world, shared, seed=5 if saved is None else 99)
    if saved is not None:
        run.engine.load(*saved)
    room = test_tensor if kind == "tensor" else test_pipeline
    found: Any = room.train(CASES[kind], run, mesh, steps, first)  # type: ignore[arg-type]
    return found.losses, run.engine.state()


@pytest.mark.parametrize("kind", CASES)
def test_from_two_by_two_over_four_to_one_as_one_process(kind: str) -> None:
    losses: list[float] = []
    saved = None
    for shared, ranks, steps in STRETCHES:
        given: Any = (kind, shared, len(losses), steps, saved)
        more, saved = run_distributed(stretch, ranks, *given)[0] if ranks > 1 else stretch(Alone(), *given)
        losses += more
    straight, expected = stretch(Alone(), kind, 1, 0, len(losses), None)
    assert losses == pytest.approx(straight, rel=1e-5)
    for name, tensor in expected[0]["model"].items():
        away = float((saved[0]["model"][name] - tensor).abs().max())
        assert away < 1e-5, f"{name} is {away:.1e} from one process's"


def refused(world: World, kind: str, saved: Any) -> str:
    """What this rank says; empty: it finds nothing wrong with what it has of the model."""
    run, _ = begun(kind, world, 2, seed=99)
    try:
        run.engine.load(*saved)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("damage", ["a tensor is missing", "a shard in place of the whole"])
def test_a_checkpoint_that_no_mesh_can_put_together_is_refused(kind: str, damage: str) -> None:
    tensors, state = begun(kind, Alone(), 1, seed=5)[0].engine.state()
    name = next(name for name in tensors["model"] if name.endswith("query.weight"))
    if damage == "a tensor is missing":
        del tensors["model"][name]
    else:
        tensors["model"][name] = torch.chunk(tensors["model"][name], 2)[0].clone()
    told = run_distributed(refused, 2, kind, (tensors, state))
    # a stage looks at its own tensors alone: a run's other ranks hear of it from the one that fails
    for one in told[: 2 if kind == "tensor" else 1]:
        assert "the model in the checkpoint is not this run's" in one
        assert name in one
