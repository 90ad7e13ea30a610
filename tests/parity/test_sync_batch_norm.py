"""Synchronised batch norms: ranks with unequal shares, and filler, compute what one process does with all of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline

# this one and dynamo are loaded so that the server from which ranks are forked loads them, once
import paceline.run.run
from paceline.contract.errors import ModelError, RecipeError
from paceline.data.dataset import Dataset, Images, Origins
from paceline.data.order import OrderState, ShuffledOrder
from paceline.engine.statistics import fewest_together, running_statistics
from paceline.machine.facts import this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.prepare.assemble import assemble, assemble_build
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.seams import Mesh, World
from paceline.techniques.sync_batch_norm import apply_sync_batch_norm
from paceline.verbs.train import train
from tests.distributed.splitting import Exact, furthest
from tests.e2e.ranks import on_ranks, one_rank
from tests.e2e.test_out_of_memory import Full, fill
from tests.parity import driving
from tests.testing.distributed import run_distributed, run_processes
from tests.testing.tiny import tiny_resnet_config

CLOSE, STEPS, SAMPLES, BATCH = 1e-9, 4, 22, 6
"""The last batch has four samples; shares of 3 and 3, and of 3 and 1 by hand."""


def network() -> nn.Module:
    """Batch norms of images, of vectors, without weights, and with a running mean of all batches."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)),
            *(nn.BatchNorm2d(4, affine=False, momentum=None), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            *(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 5)),
        )
    return model.double()


def samples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    # ranks' means lie far apart: images are dark or bright by turns
    pixels = generator.integers(0, 128, (SAMPLES, 8, 8, 3), dtype=np.uint8)
    pixels[1::2] += 127
    return pixels, generator.integers(0, 5, SAMPLES)


def floats(pixels: np.ndarray) -> Tensor:
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2).double() / 255 - 0.5) / 0.5


def by_hand(batches: list[np.ndarray], rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """A plain loop; with ranks, one that sums gradients, over the first part of each batch and over the rest."""
    pixels, labels = samples()
    model = network()
    if world > 1:
        # the example of the page
        apply_sync_batch_norm(model, dist.all_reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        share = batch if world == 1 else np.split(batch, [3])[rank]
        losses = F.cross_entropy(model(floats(pixels[share])), torch.from_numpy(labels[share]), reduction="sum")
        optimizer.zero_grad()
        (losses / len(batch)).backward()
        for parameter in model.parameters() if world > 1 else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return dict(model.state_dict())


def on_two_by_hand(world: World, batches: list[np.ndarray]) -> dict[str, Tensor]:
    return by_hand(batches, world.rank, world.size)


def test_in_a_plain_loop_unequal_shares_are_the_whole_batch() -> None:
    batches = [np.arange(at, min(at + BATCH, SAMPLES)) for at in (0, 6, 12, 18)]
    expected = by_hand(batches)
    for rank, found in enumerate(run_distributed(on_two_by_hand, 2, batches)):
        far = furthest(found, expected)
        assert far < CLOSE, f"rank {rank}: {far:.1e} from one process with the whole batch"
        assert torch.equal(found["4.num_batches_tracked"], expected["4.num_batches_tracked"])


def recipe(sync: bool, **parallel: Any) -> Recipe:
    return driving.recipe(
        parallel={"sync_batch_norm": sync, **parallel},
        loop={"batch_size": BATCH, "shuffle": False},
        optimizer={"type": "sgd", "lr": 0.1, "weight_decay": 0.0, "decay_all": False},
    )


def by_engine(world: World, chosen: Recipe, filler_at: int | None = None) -> tuple[dict[str, Tensor], int]:
    """Weights after the steps, and how many forward passes there were."""
    pixels, labels = samples()
    data = Dataset(
        inputs=Images(pixels),
        labels=labels,
        kind="classification",
        label_names=tuple("abcde"),
        splits={"train": np.arange(SAMPLES)},
        origins=Origins(("made",), np.zeros(SAMPLES, np.int32), np.zeros(SAMPLES, np.int64)),
        fingerprint="made",
    )
    model, mesh = network(), Mesh(data=world)
    if world.size == 1:
        chosen = chosen.with_settings(["parallel.sync_batch_norm=false", "parallel.strategy=auto"])
    normalisation = ((0.5,) * 3, (0.5,) * 3)
    build = assemble_build(
        chosen, model, data, Exact(), torch.device("cpu"), blocks=(), normalisation=normalisation, mesh=mesh
    )
    layout = _Exactly(build.layout, pixels)
    run = assemble(chosen, replace(build, layout=layout), 20, mesh=mesh)
    order = ShuffledOrder(np.arange(SAMPLES), micro_batch_size=BATCH, shuffle=False, fewest=fewest_together(model))
    at = OrderState(seed=0, epoch=0, step=0, batch_size=BATCH)
    for step in range(STEPS):
        plan = order.plan(at, world.rank, world.size)
        pieces = plan.microbatches
        if step == filler_at and world.size > 1:
            pieces = (plan.samples,) if world.is_first else (np.empty(0, np.int64),)
        run.engine.accumulate_batches([layout.collate(ids) for ids in pieces], len(plan.samples), step=step)
        run.engine.update()
        at = order.after(at)
    before = {name: tensor.clone() for name, tensor in run.engine.whole().items()}
    run.engine.settle()
    after = run.engine.whole()
    kept = not after or furthest(after, before) == 0
    assert kept or not chosen.parallel.sync_batch_norm, "ranks kept other running statistics"
    return before, len(running_statistics(model))


class _Exactly:
    """The layout's batches, in fp64."""

    def __init__(self, layout: Any, pixels: np.ndarray) -> None:
        self._layout, self._pixels = layout, pixels

    def collate(self, ids: np.ndarray, draw: int | None = None, *, slots: int | None = None) -> Any:
        batch = self._layout.collate(ids)
        exact = floats(self._pixels[ids if len(ids) else [0, 1]])
        return replace(batch, inputs={"pixel_values": exact})


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("filler_at", [None, 1], ids=["shares", "filler"])
def test_two_ranks_are_one_process_with_the_whole_batch(strategy: str, filler_at: int | None) -> None:
    chosen = recipe(True, strategy=strategy)
    ((expected, _),) = run_distributed(by_engine, 1, chosen)
    found = run_distributed(by_engine, 2, chosen, filler_at)
    far = furthest(found[0][0], expected)
    # the norm that clips comes in fp32 from shards
    assert far < (CLOSE if strategy == "ddp" else 1e-6), f"{far:.1e} from one process with the whole batch"
    assert found[1][1] == 0, "a rank would put running statistics back that all ranks share"


def test_without_it_two_ranks_are_not_one_process() -> None:
    """The comparison can fail."""
    ((expected, _),) = run_distributed(by_engine, 1, recipe(False))
    assert furthest(run_distributed(by_engine, 2, recipe(False))[0][0], expected) > 1e-3


def test_statistics_far_from_zero_keep_their_digits() -> None:
    model = nn.BatchNorm1d(2)
    apply_sync_batch_norm(model, lambda sums: sums)
    given = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)) + torch.tensor([1e4, -3e4])
    expected = nn.BatchNorm1d(2).double()(given.double()).float()
    torch.testing.assert_close(model(given), expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_torchs_batch_norm(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3)
    nn.init.normal_(plain.weight)
    ours = copy.deepcopy(plain)
    shared = apply_sync_batch_norm(ours, lambda sums: sums)
    assert copy.deepcopy(ours)._over_ranks is shared, "a copy of the model has the same ranks"
    given, gradient = torch.randn(4, 3, 5, 5).to(kind), torch.randn(4, 3, 5, 5).to(kind)
    found = []
    for layer in (plain, ours):
        leaf = given.clone().requires_grad_()
        out = layer(leaf)
        out.backward(gradient)
        found.append((out, leaf.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var))
    close = {"rtol": 1e-4, "atol": 1e-5} if kind is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for expected, own in zip(*found, strict=True):
        assert own.dtype == expected.dtype
        torch.testing.assert_close(own, expected, **close)
    ours.load_state_dict(plain.state_dict())
    assert torch.equal(ours.eval()(given), plain.eval()(given)), "an evaluation is the layer's own"


class _Own(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_models_that_cannot_have_it_are_refused() -> None:
    with pytest.raises(ModelError, match=r"Linear has no batch norm\n.*leave parallel\.sync_batch_norm out"):
        apply_sync_batch_norm(nn.Linear(2, 2), lambda sums: sums)
    with pytest.raises(ModelError, match="1 of Sequential is a _Own"):
        apply_sync_batch_norm(nn.Sequential(nn.BatchNorm2d(3), _Own(3)), lambda sums: sums)


def whole(sync: bool = True, **loop: Any) -> Recipe:
    """Thirteen images through a ResNet that makes one position of them, in batches of five, five and three."""
    return Recipe.parse(
        {
            "model": {"config": tiny_resnet_config(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])},
            "data": {
                "source": "builtin:random",
                "random": {"samples": 20, "image": (8, 8, 1)},
                "splits": {"train": 13, "validation": 7, "test": 0},
            },
            "optimizer": {"type": "sgd", "lr": 0.05},
            "loop": {"epochs": 2, "batch_size": 5, **loop},
            "parallel": {"sync_batch_norm": sync},
            "device": "cpu",
            "observe": {"console": "off", "report": False},
        }
    )


def test_a_whole_run_on_two_ranks_is_that_of_one_process_and_takes_shares_of_one_sample(tmp_path: Path) -> None:
    ended = on_ranks(2, f"file://{tmp_path}/meeting", whole(), tmp_path / "two")
    assert [rank.error for rank in ended] == [None, None]
    assert [len(rank.shares[2]) for rank in ended] == [2, 1], "a sample by itself on its rank is not alone"
    record = train(whole(), out=tmp_path / "one")
    told = {d.setting: d.reason for d in record.decisions}
    assert told["parallel.sync_batch_norm"] == "one process has nobody to share with"
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert furthest(two, one) < 1e-4
    found = paceline.evaluate(tmp_path / "two", split="validation")
    assert found.loss == pytest.approx(record.final["validation"]["loss"], rel=1e-4)


def test_a_run_that_is_resumed_on_its_ranks_has_the_same_bits(tmp_path: Path) -> None:
    chosen = whole(checkpoint_every=2, save_best=False).with_settings(["schedule.type=constant", "schedule.warmup=0"])
    parts = chosen.with_settings(["loop.max_steps=4"])
    for name, asked in (("straight", chosen), ("parts", parts), ("parts", ["loop.max_steps=null"])):
        ended = on_ranks(2, f"file://{tmp_path}/meeting-{name}-{len(str(asked))}", asked, tmp_path / name)
        assert [rank.error for rank in ended] == [None, None]
    one, two = (tmp_path / name / "model" / "model.safetensors" for name in ("straight", "parts"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_of_texts_is_refused_before_anything_begins_also_in_one_process(tmp_path: Path, size: int) -> None:
    plain = whole().with_settings(["model.config.model_type=bert", "data.random.image=null"]).plain()
    plain["model"]["config"] = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1}
    plain["model"]["config"] |= {"num_attention_heads": 2, "intermediate_size": 16}
    ended = on_ranks(size, f"file://{tmp_path}/meeting", Recipe.parse(plain), tmp_path / "run")
    assert {rank.error and rank.error.exit_code for rank in ended} == {2}
    assert all("bert has no batch norm" in str(rank.error) for rank in ended), str(ended[0].error)
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def full_on_one(rank: int, size: int, *arguments: Any) -> Any:
    """A rank whose memory is full in the middle of a forward pass."""
    if rank == 1:
        fill(Full(most=0, from_step=2), pytest.MonkeyPatch())
    return one_rank(rank, size, *arguments)


def test_a_rank_that_is_full_ends_the_run_of_all(tmp_path: Path) -> None:
    given = 2, f"file://{tmp_path}/meeting", whole().plain(), tmp_path / "run", None, 30
    ended = run_processes(full_on_one, 2, *given, timeout_seconds=60)
    assert getattr(ended[1].error, "kind", None) == "MemoryFullError", ended[1].error
    assert "rank 1" in str(ended[0].error), ended[0].error


def test_auto_leaves_off_what_cannot_hold_a_meeting_of_ranks() -> None:
    facts = facts_with([gpu_for("h200")] * 2, this_machine())
    chosen, decisions = choose(whole().with_settings(["device=auto"]), facts, 2)
    reasons = {decision.setting: decision.reason for decision in decisions}
    for name in ("capture", "compile"):
        assert getattr(chosen.techniques, name) is False
        assert "ranks meet" in reasons[f"techniques.{name}"]
    alone, _ = choose(whole().with_settings(["device=auto"]), facts, 1)
    assert alone.techniques.capture is True, "one process meets nobody"


@pytest.mark.parametrize("setting", ["loop.on_oom=split", "techniques.recompute=true", "techniques.compile=true"])
def test_what_cannot_meet_is_refused_before_anything_loads(setting: str) -> None:
    facts = this_machine()
    with pytest.raises(RecipeError, match="meet"):
        choose(whole().with_settings([setting]), facts, 2)
