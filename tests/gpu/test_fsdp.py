"""Shards on two GPUs: they train as two whole models do, and each GPU keeps half of weights and states."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.data.dataset import Images
from paceline.data.layout import ImageLayout
from paceline.distributed.group import joined
from paceline.machine.cluster import Place
from paceline.prepare.assemble import Assembled, assemble
from paceline.seams import Build, Mesh, World
from paceline.strategies import strategy_for
from paceline.strategies.fsdp.shard import whole
from paceline.tasks import task_for
from paceline.techniques import precision
from tests.gpu.waiting import waits_are_errors
from tests.parity.driving import recipe

CUDA, STEPS, TOTAL, BATCH, SECONDS = torch.device("cuda"), 10, 50, 8, 240
ALIKE_FROM = 4
"""Steps from here on are of one micro-batch, and captured where they can be."""

ROUNDING = {"fp32": 2e-4, "bf16": 3e-2}
"""After ten steps, in which differences of a last bit grow: 5e-5 and 1.2e-2 were seen on two H200."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


class Net(nn.Module):
    def __init__(self, width: int = 1024, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.first(pixels.flatten(1)).relu()
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        return self.head(hidden)


def made(world: World, kind: str, number_format: str) -> Assembled:
    """On shards, kept on the GPU (eager, or captured) or in main memory, or whole on both GPUs."""
    generator = np.random.default_rng(0)
    images = Images(generator.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8))
    torch.manual_seed(world.rank)
    model = Net().to(CUDA)
    # with the usual epsilon AdamW turns the rounding of tiny gradients into steps of the learning rate's size
    optimizer = {"decay_all": False, "clip_norm": None, "eps": 1e-3}
    techniques = {"precision": number_format, "capture": kind == "captured"}
    parallel = {"strategy": "ddp"} if kind == "ddp" else {"strategy": "fsdp", "offload": kind == "offload"}
    chosen = recipe(techniques=techniques, optimizer=optimizer, parallel=parallel)
    build = Build(
        model=model,
        forward=lambda m, b: m(b.inputs["pixel_values"]),
        layout=ImageLayout(images, generator.integers(0, 3, 64), CUDA, mean=(0.5,), deviation=(0.5,)),
        task=task_for("classification", ("a", "b", "c"), chosen.task),
        device=CUDA,
        blocks=tuple(model.layers),
    )
    build = precision.apply(build, number_format)
    if kind == "ddp":
        return assemble(chosen, build, TOTAL, mesh=Mesh.over(world))
    return assemble(chosen, strategy_for(chosen, Mesh.over(world)).prepare(build), TOTAL, mesh=Mesh.over(world))


def fail(error: Exception) -> Any:
    raise error


def be_rank(folder: str, kind: str, number_format: str, rank: int) -> None:
    """One of two processes: trains its share of each batch; prints losses, first weights and bytes between steps."""
    place = Place(
        rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        started="paceline",
        init_method=f"file://{folder}/{kind}-ranks",
    )
    with joined(place, backend=None, device=CUDA, timeout_seconds=SECONDS / 2) as world:
        run = made(world, kind, number_format)
        losses = []
        if kind == "captured":  # as a run does; the first passes are captured at once then
            run.engine.warm_up_on(run.build.layout.collate(np.arange(BATCH // 2)), BATCH)
        for index in range(STEPS):
            ids = np.array_split((np.arange(BATCH) + BATCH * index) % 64, 2)[rank]
            # dropout-free, so that a micro-batch more or less changes the rounding alone
            parts = np.split(ids, 2) if index < ALIKE_FROM and kind != "captured" else [ids]
            batches = [run.build.layout.collate(part) for part in parts]
            # what runs eagerly for the first time, and what is captured, may wait
            watched = {"fsdp": index > ALIKE_FROM, "captured": index > 3}.get(kind, False)
            with waits_are_errors() if watched else contextlib.nullcontext():
                done = run.engine.accumulate_batches(batches, BATCH, step=index)
                run.engine.update()
            losses.append(world.all_reduce(done.loss.clone()).item())
            if index == 0:
                kept = run.engine.execution["steps"]
        path = run.engine.execution["steps"]
        del batches, done
        if kind == "captured":
            run.engine._runner.close()  # type: ignore[attr-defined]
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB that have nothing to do with the model
        said = {
            "losses": losses,
            "kept": kept,
            "path": path,
            "bytes": torch.cuda.memory_allocated(),
            "weights": {name: tensor.flatten()[:256].tolist() for name, tensor in whole(run.engine._named())},
        }
        run.engine.close()
    print(json.dumps(said))


def on_two_gpus(folder: Path, kind: str, number_format: str) -> list[dict[str, Any]]:
    """What the two processes say, in rank order."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    arguments = [sys.executable, "-m", "tests.gpu.test_fsdp", str(folder), kind, number_format]
    processes = [
        subprocess.Popen([*arguments, str(rank)], cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], kind
    return [json.loads(lines.splitlines()[-1]) for lines in said]


@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("number_format", ["fp32", "bf16"])
def test_shards_on_two_gpus_train_as_ddp_in_half_the_memory(tmp_path: Path, number_format: str) -> None:
    kinds = ("ddp", "fsdp", "offload", "captured")
    ddp, shards, offloaded, captured = (on_two_gpus(tmp_path, kind, number_format) for kind in kinds)
    assert [found["kept"] for found in captured] == ["captured: 1 graph"] * 2, "the warm-up's, and the update leaves it"
    assert [found["path"] for found in captured] == ["captured: 2 graphs"] * 2, "forward and backward, and the update"
    for kind, found in (("fsdp", shards), ("offload", offloaded), ("captured", captured)):
        assert found[0]["weights"] == found[1]["weights"], f"{kind}: the ranks gather different weights"
        assert found[0]["losses"] == pytest.approx(ddp[0]["losses"], rel=ROUNDING[number_format]), kind
        for name, values in ddp[0]["weights"].items():
            given, expected = torch.tensor(found[0]["weights"][name]), torch.tensor(values)
            close = {"rtol": ROUNDING[number_format], "atol": ROUNDING[number_format]}
            torch.testing.assert_close(given, expected, **close, msg=f"{kind}: {name}")
    for rank in range(2):
        share = shards[rank]["bytes"] / ddp[rank]["bytes"]
        assert share == pytest.approx(0.5, rel=0.1), f"rank {rank} keeps {share:.2f} of what DDP keeps"
        assert offloaded[rank]["bytes"] < 0.1 * ddp[rank]["bytes"], f"rank {rank} keeps shards on its GPU"


if __name__ == "__main__":
    be_rank(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
