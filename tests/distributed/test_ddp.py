"""N ranks take the step of one: gradients, weights, skipped steps, statistics, random numbers."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.contract.errors import UserError
from paceline.contract.records import Decision
from paceline.data.dataset import Images
from paceline.data.image_layout import ImageLayout
from paceline.data.order import OrderState, ShuffledOrder
from paceline.distributed.exchange import LostRank
from paceline.distributed.group import joined
from paceline.engine.rng import micro_batch_seed
from paceline.machine.cluster import Place
from paceline.optim.scaling import Dynamic
from paceline.prepare.assemble import Assembled, assemble
from paceline.recipe import Recipe
from paceline.seams import Alone, Build, Mesh, World
from paceline.strategies.ddp.buckets import BUCKET_BYTES, Reduction
from paceline.tasks import task_for
from tests.distributed.splitting import UNCOUNTED, accumulate, assembled, checksum, furthest, order_of, train
from tests.parity import driving
from tests.parity.reference import tiny_model
from tests.testing.distributed import RankError, run_distributed, run_processes

EXACT = 1e-12

SGD = {"type": "sgd", "lr": 0.05, "momentum": 0.9, "decay_all": True}


def recipe(batch_size: int, micro: int | None = None, **techniques: Any) -> Recipe:
    loop = {"batch_size": batch_size, "micro_batch_size": micro}
    return driving.recipe(loop=loop, techniques={**driving.PLAIN, **techniques}, optimizer=SGD)


def compare(world: World, chosen: Recipe, steps: int = 3, **more: Any) -> tuple[float, float, str]:
    """How far gradients and weights are from one process's, and the weights' checksum."""
    together, apart = assembled(world, chosen, **more), assembled(Alone(), chosen, **more)
    losses, gradients, _ = train(together, chosen, world, steps, more.get("labels"))
    expected_losses, expected, _ = train(apart, chosen, Alone(), steps, more.get("labels"))
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    far = max(furthest(found, wanted) for found, wanted in zip(gradients, expected, strict=True))
    weights = together.engine.whole()
    found = far, furthest(weights, apart.engine.whole()), checksum(weights)
    together.engine.close()
    apart.engine.close()
    return found


def assert_exact(found: list[tuple[float, float, str]]) -> None:
    for rank, (gradients, weights, _) in enumerate(found):
        assert gradients < EXACT, f"rank {rank}: gradients are {gradients:.1e} from those of one process"
        assert weights < EXACT, f"rank {rank}: weights are {weights:.1e} from those of one process"
    assert len({digest for _, _, digest in found}) == 1, "ranks hold different weights"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_gradients_and_weights_are_those_of_one_process(ranks: int, packing: bool, microbatches: int) -> None:
    share = -(-13 // ranks)  # 13 samples: shares differ by one
    assert_exact(run_distributed(compare, ranks, recipe(13, -(-share // microbatches), packing=packing)))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_rank_without_a_sample_contributes_nothing(packing: bool) -> None:
    chosen = recipe(3, packing=packing)
    at = OrderState(seed=chosen.seed, epoch=0, step=0, batch_size=3)
    shares = [sum(map(len, order_of(chosen).plan(at, rank, 4).microbatches)) for rank in range(4)]
    assert sorted(shares) == [0, 1, 1, 1]
    assert_exact(run_distributed(compare, 4, chosen))


def compare_without_labels(world: World, chosen: Recipe) -> tuple[float, float, str]:
    """In each of the first steps, all samples of rank 1 have no label that counts."""
    labels = driving.dataset().labels.copy()
    at, order = OrderState(seed=chosen.seed, epoch=0, step=0, batch_size=chosen.loop.batch_size), order_of(chosen)
    for _ in range(3):
        labels[np.concatenate(order.plan(at, 1, world.size).microbatches)] = UNCOUNTED
        at = order.after(at)
    return compare(world, chosen, labels=labels)


def test_a_rank_whose_samples_have_no_label_contributes_nothing() -> None:
    assert_exact(run_distributed(compare_without_labels, 2, recipe(7, 2)))


def test_compiled_blocks_and_fused_products() -> None:
    assert_exact(run_distributed(compare_compiled, 2, recipe(10, 3, packing=True, early_pooling=True, fused_qkv=True)))


def compare_compiled(world: World, chosen: Recipe) -> tuple[float, float, str]:
    return compare(world, chosen, compiled="eager")


def test_recomputed_blocks() -> None:
    assert_exact(run_distributed(compare, 2, recipe(10, 3, recompute=True)))


def compare_buckets(world: World, bucket_bytes: int) -> list[str]:
    """Weights after three steps, with buckets of this size."""
    chosen = recipe(9, 3)
    run = assembled(world, chosen)
    gradients = run.engine._step.gradients
    made = Reduction(world, tuple(run.build.model.parameters()), bucket_bytes=bucket_bytes)
    gradients._all_reduce = type(gradients._all_reduce)(gradients._parameters, gradients.flat, made)
    assert (len(gradients._all_reduce.buckets) > 10) == (bucket_bytes < BUCKET_BYTES)
    train(run, chosen, world, 3)
    return world.gather(checksum(run.engine.whole()))


def test_the_cut_into_buckets_changes_no_bit_on_two_ranks() -> None:
    """A sum of two numbers is rounded once, whatever is summed beside it."""
    small, large = (run_distributed(compare_buckets, 2, size) for size in (1 << 10, BUCKET_BYTES))
    assert small == large
    assert len(set(small[0])) == 1


def half_the_bytes(world: World) -> tuple[float, str]:
    chosen = recipe(9, 3)
    rounded, plain = (
        assembled(world, chosen.with_settings([f"parallel.reduce_dtype={dtype}"])) for dtype in ("bf16", "fp32")
    )
    (_, [found], _), (_, [expected], _) = (train(run, chosen, world, 1) for run in (rounded, plain))
    return furthest(found, expected), checksum(rounded.engine.whole())


def test_sums_in_bf16_are_rounded_and_the_same_on_all_ranks() -> None:
    found = run_distributed(half_the_bytes, 2)
    assert all(1e-5 < far < 1e-2 for far, _ in found), found
    assert found[0] == found[1]


def started_apart(world: World) -> list[str]:
    model = tiny_model()
    model.register_buffer("kept", torch.full((3,), float(world.rank)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(world.rank)
    run = assembled(world, recipe(8), model=model)
    return [
        checksum(run.engine.whole()),
        checksum(tiny_model().double().state_dict() | {"kept": torch.zeros(3).double()}),
    ]


def test_ranks_that_start_from_different_weights_take_those_of_rank_0() -> None:
    for found, expected in run_distributed(started_apart, 2):
        assert found == expected


def skipped(world: World) -> tuple[list[bool], int, Any, list[str]]:
    """Rank 1 finds infinity in the second of four steps, under loss scaling."""
    chosen = driving.recipe(loop={"batch_size": 8})
    run = assembled(world, chosen)
    object.__setattr__(run.engine._step, "scale", Dynamic(torch.device("cpu")))
    at = OrderState(seed=0, epoch=0, step=0, batch_size=8)
    labels, finite, digests = driving.dataset().labels, [], []
    for step in range(4):
        if step == 1 and world.rank == 1:
            handle = run.build.model.classifier.register_forward_hook(lambda *given: given[-1] * float("inf"))
        accumulate(run, chosen, world, step, at, labels)
        if step == 1 and world.rank == 1:
            handle.remove()
        finite.append(bool(run.engine.update().finite))
        digests.append(checksum(run.engine.whole()))
        at = order_of(chosen).after(at)
    scalars = run.engine.state()[1]
    return finite, scalars["applied"], scalars["loss_scale"], digests


def test_all_ranks_skip_the_step_in_which_one_overflowed() -> None:
    one, other = run_distributed(skipped, 2)
    assert one == other
    finite, applied, _, digests = one
    assert finite == [True, False, True, True]
    assert applied == 3
    assert digests[0] == digests[1] != digests[2]


def broken(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no compiler on this machine")


def one_falls_back(world: World, warmed: tuple[int, ...]) -> tuple[str, str]:
    """Rank 1 cannot compile, and finds out while it warms up; rank 0 can. Who does not warm up compiles as it goes."""
    chosen = recipe(12, 3, compile="auto")
    run = assembled(world, chosen, compiled=broken if world.rank == 1 else "eager")
    decisions = (Decision(setting="techniques.compile", value="true", reason="tested"),)
    object.__setattr__(run.build, "decisions", decisions)
    if world.rank in warmed:
        run.engine.warm_up_on(run.build.layout.collate(np.arange(3)), 3)
        assert run.engine._step.gradients._all_reduce._started == [], "a sum of the warm-up, which others may not join"
    train(run, chosen, world, 3)
    return run.engine.execution.get("compile", "compiled"), checksum(run.engine.whole())


@pytest.mark.parametrize("warmed", [(1,), (0, 1)])
def test_a_rank_that_falls_back_leaves_nobody_waiting(warmed: tuple[int, ...]) -> None:
    found = run_distributed(one_falls_back, 2, warmed)
    assert [path.partition(":")[0] for path, _ in found] == ["compiled", "off"]
    assert len({digest for _, digest in found}) == 1, "ranks hold different weights"


class Unused(nn.Module):
    """Takes another way through the model on each rank: one layer of two gets no gradient there."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.layers = nn.ModuleList([nn.Linear(4, 4).double() for _ in range(2)])
        self.head = nn.Linear(4, 3).double()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[self.rank](pixels.flatten(1).double()))


class Normed(nn.Module):
    """Convolution and batch normalisation, down to one position."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.convolution(pixels)).flatten(1))


def on_images(world: World, model: nn.Module, chosen: Recipe) -> Assembled:
    generator = np.random.default_rng(0)
    pixels, labels = generator.integers(0, 256, (16, 2, 2, 1), dtype=np.uint8), generator.integers(0, 3, 16)
    cpu = torch.device("cpu")
    build = Build(
        model=model,
        forward=lambda m, b: m(b.inputs["pixel_values"]),
        layout=ImageLayout(Images(pixels), labels, cpu, mean=(0.5,), deviation=(0.5,)),
        task=task_for("classification", ("a", "b", "c"), chosen.task),
        device=cpu,
    )
    return assemble(chosen, build, 20, mesh=Mesh.over(world))


def step_on(run: Assembled, ids: np.ndarray, step: int = 0) -> None:
    run.engine.accumulate_batches([run.build.layout.collate(ids)], 8, step=step)
    run.engine.update()


def different_ways(world: World) -> list[Any]:
    torch.manual_seed(1)
    run = on_images(world, Unused(world.rank), recipe(8))
    run.engine.accumulate_batches([run.build.layout.collate(np.arange(4))], 4)
    used = [bool(layer.weight.grad.any()) for layer in run.build.model.layers]
    run.engine.update()
    return [used, checksum(run.engine.whole())]


def test_parameters_that_one_rank_does_not_use_get_the_others_gradient() -> None:
    found = run_distributed(different_ways, 2)
    assert found[0] == found[1]
    assert found[0][0] == [True, True]


def statistics(world: World) -> dict[str, Any]:
    torch.manual_seed(world.rank)
    run = on_images(world, Normed(), recipe(8))
    norm, engine = run.build.model.norm, run.engine
    # rank 1 has no sample in the second step
    step_on(run, np.arange(4) + 4 * world.rank)
    after_one = norm.running_mean.clone(), norm.num_batches_tracked.item()
    step_on(run, np.arange(8, 12) if world.rank == 0 else np.arange(0), step=1)
    mine = norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.item()
    engine.settle()
    settled = norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.item()
    engine.settle()
    logits = engine.infer(run.build.layout.collate(np.arange(16)))
    return {"one": after_one, "mine": mine, "settled": settled, "digest": checksum(engine.whole()), "logits": logits}


def test_running_statistics_follow_each_ranks_share_and_settle_to_their_mean() -> None:
    first, second = run_distributed(statistics, 2)
    assert not torch.equal(first["mine"][0], second["mine"][0]), "each rank keeps its own"
    assert torch.equal(second["one"][0], second["mine"][0]), "filler moved the running mean"
    assert (second["one"][1], second["mine"][2], first["mine"][2]) == (1, 1, 2)
    for index in range(2):
        mean = (first["mine"][index] + second["mine"][index]) / 2
        torch.testing.assert_close(first["settled"][index], mean, rtol=1e-6, atol=1e-7)
    assert first["settled"][2] == 2, "counts are rank 0's"
    assert first["digest"] == second["digest"]
    assert torch.equal(first["logits"], second["logits"])


def a_last_batch(world: World) -> tuple[list[int], str, torch.Tensor]:
    """Five images on four ranks, of a model that torch does not train on one."""
    torch.manual_seed(0)
    run = on_images(world, Normed(), recipe(8))
    order = ShuffledOrder(np.arange(13), micro_batch_size=8, fewest=2)
    at = OrderState(seed=0, epoch=0, step=1, batch_size=8)
    pieces = order.plan(at, world.rank, world.size).microbatches
    run.engine.accumulate_batches([run.build.layout.collate(ids) for ids in pieces], 5)
    run.engine.update()
    run.engine.settle()
    return [len(ids) for ids in pieces], checksum(run.engine.whole()), run.build.model.norm.running_mean


def test_an_epochs_last_batch_is_split_in_twos_and_the_others_run_filler() -> None:
    found = run_distributed(a_last_batch, 4)
    assert [sizes for sizes, _, _ in found] == [[3], [2], [0], [0]]
    assert len({digest for _, digest, _ in found}) == 1, "ranks hold different weights"
    assert found[0][2].any(), "nobody's statistics were kept"


def draws(world: World) -> tuple[list[int], int]:
    chosen = recipe(8, 2)
    run = assembled(world, chosen)
    seen = []
    run.build.model.register_forward_pre_hook(lambda *_: seen.append(torch.initial_seed()))
    train(run, chosen, world, 2)
    return seen, world.rank


def test_dropout_is_seeded_by_step_micro_batch_and_rank() -> None:
    for seen, rank in run_distributed(draws, 2):
        expected = [micro_batch_seed(0, step, index, rank) for step in range(2) for index in range(2)]
        assert [seed % 2**64 for seed in seen] == expected
    assert micro_batch_seed(0, 1, 2) == micro_batch_seed(0, 1, 2, 0), "alone, the seeds stay what they were"


def twice(world: World) -> str:
    chosen = recipe(8)
    run = assembled(world, chosen)
    at = OrderState(seed=0, epoch=0, step=0, batch_size=8)
    accumulate(run, chosen, world, 0, at, driving.dataset().labels)
    with pytest.raises(UserError) as raised:
        accumulate(run, chosen, world, 0, at, driving.dataset().labels)
    return str(raised.value)


def test_a_second_accumulate_before_the_update_is_refused() -> None:
    assert all("summed those gradients already" in message for message in run_distributed(twice, 2))


def killed(rank: int, folder: str) -> str:
    """Rank 1 is gone in the forward pass of its second step; rank 0 says how it found out."""
    place = Place(
        rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        started="paceline",
        init_method=f"file://{folder}/ranks",
    )
    chosen = recipe(8, 2)
    try:
        with joined(place, device=torch.device("cpu"), timeout_seconds=30) as world:
            run = assembled(world, chosen)
            train(run, chosen, world, 1)
            if rank == 1:
                kill = partial(os.kill, os.getpid(), signal.SIGKILL)
                run.build.model.classifier.register_forward_hook(lambda *_: kill())
            train(run, chosen, world, 1)
    except LostRank as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.slow
def test_a_rank_that_is_killed_within_a_step_is_missed_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 was killed by SIGKILL"):
        run_processes(killed, 2, str(tmp_path))
    assert time.monotonic() - began < 30
