"""A model under DeepSpeed is trained as DDP trains it: losses, norms and weights."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.data.order import OrderState, ShuffledOrder
from paceline.machine.disk import require_disk
from paceline.prepare.assemble import Assembled, assemble, assemble_build
from paceline.recipe import Recipe
from paceline.seams import Alone, Mesh, StepInput, World
from paceline.strategies.deepspeed import first, library
from paceline.strategies.deepspeed.engine import Passes
from paceline.tasks import task_for
from tests.parity import driving, reference
from tests.testing.distributed import run_distributed

WITHOUT = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed; `make test-deepspeed` has an environment with it",
)
pytestmark = [pytest.mark.deepspeed, WITHOUT]

STEPS = 10
SMALLEST = 1024
"""Bytes from which a shard lies on a disk here; by itself DeepSpeed keeps what has less than 1 MiB in main memory."""
IN_ONE_GO = 2000
"""Numbers that are read from a disk in one go here, so that there are several groups."""

CUT = 1
"""Numbers from which stage 3 shards a weight here; by itself it keeps these small ones whole."""


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    stage: int = 2
    offload: str = "none"
    folder: str | None = None
    techniques: tuple[tuple[str, Any], ...] = ()
    train: str = "all"
    batch_size: int = 8
    micro_batch_size: int = 8
    clip_norm: float | None = 1.0
    optimizer: tuple[tuple[str, Any], ...] = ()
    dropout: float = 0.0
    spare: bool = False
    """With a weight that takes no part in the loss."""

    def recipe(self, strategy: str) -> Recipe:
        own = (
            {"stage": self.stage, "offload": self.offload, "offload_folder": self.folder}
            if strategy == "deepspeed"
            else {}
        )
        return driving.recipe(
            techniques={**driving.PLAIN, **dict(self.techniques)},
            optimizer={"clip_norm": self.clip_norm, "decay_all": False, **dict(self.optimizer)},
            loop={"batch_size": self.batch_size, "micro_batch_size": self.micro_batch_size},
            parallel={"strategy": strategy, **own},
        )


@dataclass(frozen=True)
class Outcome:
    """Of a few steps."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    logits: Tensor


def assembled(world: World, case: Case, strategy: str) -> Assembled:
    model = reference.tiny_model(dropout=case.dropout)
    if world.rank:  # the first rank's weights are everybody's
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(world.rank)
    if case.train == "head":
        model.distilbert.requires_grad_(False)
    if case.spare:
        model.spare = nn.Parameter(torch.ones(5, 3))
    chosen, data, mesh = case.recipe(strategy), driving.dataset(), Mesh.over(world)
    build = assemble_build(
        chosen,
        model,
        data,
        task_for(data.kind, data.label_names, chosen.task),
        torch.device("cpu"),
        blocks=list(model.distilbert.transformer.layer),
        normalisation=((0.5,) * 3, (0.5,) * 3),
        mesh=mesh,
    )
    with mock.patch.object(library, "PERSISTENT", CUT):
        return assemble(chosen, build, 2 * STEPS, mesh=mesh)


def inputs(case: Case, world: World, steps: int = STEPS, first: int = 0) -> Iterator[StepInput]:
    order = ShuffledOrder(np.arange(reference.SAMPLES), micro_batch_size=case.micro_batch_size)
    at = OrderState(seed=0, epoch=0, step=0, batch_size=case.batch_size)
    for step in range(first + steps):
        plan = order.plan(at, world.rank, world.size)
        if step >= first:
            yield StepInput(step, plan.microbatches, len(plan.samples))
        at = order.after(at)


def outcome(world: World, case: Case, run: Assembled, steps: int = STEPS, first: int = 0) -> Outcome:
    losses, norms = [], []
    for given in inputs(case, world, steps, first):
        done = run.engine.accumulate(given)
        norms.append(run.engine.update().norm.item())
        losses.append(world.all_reduce(done.loss.clone()).item())
    logits = run.engine.infer(run.build.layout.collate(np.arange(6)))
    tensors, _ = run.engine.state()
    kept = {stem: {name: one.clone() for name, one in named.items()} for stem, named in tensors.items()}
    return Outcome(losses, norms, kept["model"], kept["optimizer"], logits.clone())


def both(world: World, case: Case) -> tuple[Outcome, Outcome]:
    ddp = assembled(world, case, "ddp")
    expected = outcome(world, case, ddp)
    theirs = assembled(world, case, "deepspeed")
    try:
        theirs.engine.warm_up(next(inputs(case, world)))
        return expected, outcome(world, case, theirs)
    finally:
        ddp.engine.close()
        theirs.engine.close()


def assert_equal(expected: Outcome, found: Outcome, tolerance: float, *, first: bool) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=max(tolerance, 1e-6)), "losses"
    assert found.norms == pytest.approx(expected.norms, rel=max(10 * tolerance, 1e-6)), "gradient norms"
    assert (found.logits - expected.logits).abs().max() < 10 * tolerance, "logits"
    for what in ("weights", "states") if first else ():
        a, b = getattr(expected, what), getattr(found, what)
        assert a.keys() == b.keys(), f"{what} have other names"
        for name in a:
            distance = (b[name] - a[name]).abs().max().item()
            assert distance <= tolerance * max(1.0, a[name].abs().max().item()), f"{what}: {name} differs by {distance}"


CASES = {
    "stage 1": Case(1),
    "stage 2": Case(2),
    "stage 3": Case(3),
    "stage 2, optimizer offloaded": Case(2, "optimizer"),
    "stage 3, parameters offloaded": Case(3, "parameters"),
    "stage 1, accumulated and ragged": Case(1, batch_size=7, micro_batch_size=2),
    "stage 2, accumulated and ragged": Case(2, batch_size=7, micro_batch_size=2),
    "stage 3, accumulated and ragged": Case(3, batch_size=7, micro_batch_size=2),
    "stage 1, offloaded and accumulated": Case(1, "optimizer", batch_size=7, micro_batch_size=2),
    "stage 2, offloaded and accumulated": Case(2, "optimizer", batch_size=7, micro_batch_size=2),
    "stage 3, offloaded and accumulated": Case(3, "parameters", batch_size=7, micro_batch_size=2),
    "stage 2, clipped": Case(2, clip_norm=0.05),
    "stage 3, clipped": Case(3, clip_norm=0.05),
    "stage 2, unclipped": Case(2, clip_norm=None),
    "stage 2, frozen backbone": Case(2, train="head"),
    "stage 3, frozen backbone": Case(3, train="head"),
    "stage 2, an unused weight": Case(2, spare=True, micro_batch_size=2),
    "stage 3, an unused weight": Case(3, spare=True, micro_batch_size=2),
    "stage 2, packed": Case(2, techniques=(("packing", True),), micro_batch_size=3),
    "stage 3, packed": Case(3, techniques=(("packing", True),), micro_batch_size=3),
    "stage 2, recomputed": Case(2, techniques=(("recompute", True),), dropout=0.1),
    "stage 3, recomputed": Case(3, techniques=(("recompute", True),), dropout=0.1),
    "stage 2, momentum": Case(2, optimizer=(("type", "sgd"), ("momentum", 0.9))),
    "stage 3, momentum": Case(3, optimizer=(("type", "sgd"), ("momentum", 0.9))),
    "stage 2, plain SGD": Case(2, optimizer=(("type", "sgd"), ("momentum", 0.0), ("nesterov", False))),
    "stage 2, fp16": Case(2, techniques=(("precision", "fp16"),), clip_norm=0.05),
    "stage 3, fp16": Case(3, techniques=(("precision", "fp16"),), clip_norm=0.05),
    "stage 2, joined": Case(2, techniques=(("packing", True), ("early_pooling", True), ("fused_qkv", True))),
    "stage 3, joined": Case(3, techniques=(("packing", True), ("fused_qkv", True))),
    "stage 3, embedding gradient": Case(3, techniques=(("embedding_gradient", True),)),
}


ALONE = [name for name in CASES if ", " not in name] + [
    "stage 2, optimizer offloaded",
    "stage 3, parameters offloaded",
    "stage 3, accumulated and ragged",
    "stage 3, offloaded and accumulated",
    "stage 2, fp16",
]


@pytest.mark.parametrize("name", ALONE)
def test_in_one_process_as_without_it(name: str) -> None:
    expected, theirs = both(Alone(), CASES[name])
    assert_equal(expected, theirs, tolerance_of(CASES[name]), first=True)
    assert not dist.is_initialized(), "the group of one is left open"


def refused(world: World, stage: int) -> str:
    def doubled(self: Passes, batch: Any) -> Tensor:
        return 2 * plain(self, batch)

    plain = Passes.forward
    with mock.patch.object(Passes, "forward", doubled), pytest.raises(RecipeError) as told:
        assembled(world, Case(stage), "deepspeed")
    return str(told.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_that_computes_something_else_is_refused(stage: int) -> None:
    for told in run_distributed(refused, 2, stage):
        assert f"stage {stage}" in told
        assert "sharded logits differ from whole ones" in told


def miscounted(world: World, stage: int) -> str:
    """Gradients that are added up over ranks where their mean is asked for."""
    found = library.library(torch.device("cpu")).utils
    whole = found.safe_get_full_grad
    with (
        mock.patch.object(found, "safe_get_full_grad", lambda one: whole(one) * world.size),
        pytest.raises(RecipeError) as told,
    ):
        assembled(world, Case(stage), "deepspeed")
    return str(told.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_with_other_gradients_is_refused(stage: int) -> None:
    for told in run_distributed(miscounted, 2, stage):
        assert "sharded and whole gradients of" in told


def without_room(world: World) -> str:
    """The last rank is out of memory in its plain pass."""
    full = mock.Mock(side_effect=torch.OutOfMemoryError("no room"))
    with mock.patch.object(first, "on_host", full) if world.rank else contextlib.nullcontext():
        run = assembled(world, Case(3), "deepspeed")
    told = run.engine.execution["compared"]
    outcome(world, Case(3), run, 1)
    run.engine.close()
    return told


def test_a_plain_pass_without_room_is_told_and_the_run_goes_on() -> None:
    for told in run_distributed(without_room, 2):
        assert "no room" in told


def tolerance_of(case: Case) -> float:
    if ("precision", "fp16") in case.techniques:
        return 1e-4
    return 1e-6 if case.stage < 3 and case.offload == "none" else 1e-5


@pytest.mark.parametrize("name", CASES)
def test_as_ddp(name: str) -> None:
    for rank, (expected, theirs) in enumerate(run_distributed(both, 2, CASES[name])):
        assert_equal(expected, theirs, tolerance_of(CASES[name]), first=rank == 0)


@pytest.mark.parametrize("name", ["stage 2, accumulated and ragged", "stage 3, offloaded and accumulated"])
def test_four_ranks_as_ddp(name: str) -> None:
    """Seven samples a step in twos: one rank has one, others two."""
    for rank, (expected, theirs) in enumerate(run_distributed(both, 4, CASES[name])):
        assert_equal(expected, theirs, tolerance_of(CASES[name]), first=rank == 0)


DISK = {
    "Adam": Case(3, "optimizer"),
    "parameters in main memory": Case(3, "parameters"),
    "accumulated and ragged": Case(3, "optimizer", batch_size=7, micro_batch_size=2),
    "clipped": Case(3, "optimizer", clip_norm=0.05),
    "an unused weight": Case(3, "optimizer", spare=True, micro_batch_size=2),
    "momentum": Case(3, "optimizer", optimizer=(("type", "sgd"), ("momentum", 0.9))),
    "plain SGD": Case(3, "optimizer", optimizer=(("type", "sgd"), ("momentum", 0.0), ("nesterov", False))),
    "fp16": Case(3, "optimizer", techniques=(("precision", "fp16"),), clip_norm=0.05),
}


def why_no_disk(*, on_gpu: bool) -> str:
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    try:
        require_disk(tempfile.gettempdir(), on_gpu=on_gpu)
    except RecipeError as error:
        return str(error)
    return ""


NO_DISK = why_no_disk(on_gpu=False)
ON_DISK = pytest.mark.skipif(NO_DISK != "", reason=NO_DISK)
BUILT = pytest.mark.timeout(600)
"""The first of a session waits for DeepSpeed's operator to be compiled."""


@contextlib.contextmanager
def small_on_disk() -> Iterator[None]:
    """Inside, what is small lies on the disk too, and in several groups."""

    def swappable(self: Any, tensor: Tensor | None = None, numel: int | None = None) -> bool:
        return 4 * ((numel or 0) if tensor is None else tensor.numel()) >= SMALLEST

    library.library(torch.device("cpu"))
    from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

    with (
        mock.patch.object(OptimizerSwapper, "is_swappable_tensor", swappable),
        mock.patch.object(library, "READ", IN_ONE_GO),
    ):
        yield


def from_disk(world: World, case: Case) -> tuple[Outcome, Outcome, Outcome, int]:
    """What comes of it under DDP, from main memory and from a disk, and the bytes that lay there."""
    assert case.folder is not None
    ddp = assembled(world, case, "ddp")
    expected = outcome(world, case, ddp)
    ddp.engine.close()
    found = []
    for of in (replace(case, folder=None), case):
        with small_on_disk():
            theirs = assembled(world, of, "deepspeed")
            try:
                theirs.engine.warm_up(next(inputs(of, world)))
                found.append(outcome(world, of, theirs))
                size = sum(path.stat().st_size for path in Path(case.folder).rglob("*") if path.is_file())
            finally:
                theirs.engine.close()
    return expected, *found, size


@ON_DISK
@BUILT
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", DISK)
def test_from_a_disk_as_from_main_memory_and_as_ddp(name: str, ranks: int, tmp_path: Path) -> None:
    case = replace(DISK[name], folder=str(tmp_path))
    done = [from_disk(Alone(), case)] if ranks == 1 else run_distributed(from_disk, ranks, case)
    for rank, (expected, memory, theirs, size) in enumerate(done):
        assert_equal(memory, theirs, 1e-6, first=rank == 0)
        if (name, ranks) != ("fp16", 1):  # there stage 3 rounds otherwise, offloaded or not
            assert_equal(expected, theirs, tolerance_of(case), first=rank == 0)
        assert size > 10_000, "nothing was on the disk"
    assert not list(tmp_path.iterdir()), "files are left behind"
