"""All-reduce on GPUs: replayed backward passes sum what eager ones do, and two GPUs train as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.data.dataset import Images
from paceline.data.layout import ImageLayout
from paceline.distributed.group import joined
from paceline.machine.cluster import Place
from paceline.prepare.assemble import Assembled, assemble
from paceline.seams import Alone, Build, Mesh, World
from paceline.tasks import task_for
from paceline.techniques import precision
from tests.gpu.waiting import waits_are_errors
from tests.parity.driving import recipe

CUDA, STEPS, BATCH = torch.device("cuda"), 20, 8

SECONDS = 240


class Net(nn.Module):
    """Deep and wide enough for several buckets and for a backward pass that takes a while."""

    def __init__(self, width: int = 2048, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.first(pixels.flatten(1)).relu()
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        return self.head(hidden)


def made(world: World, capture: bool, reduce_dtype: str = "fp32") -> Assembled:
    generator = np.random.default_rng(0)
    images = Images(generator.integers(0, 256, (64, 8, 8, 1), dtype=np.uint8))
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        model = Net().to(CUDA)
    settings = {
        "techniques": {"precision": "fp32", "capture": capture},
        "parallel": {"bucket_mib": 25, "reduce_dtype": reduce_dtype},
    }
    chosen = recipe(**settings, optimizer={"decay_all": False})
    layout = ImageLayout(images, generator.integers(0, 3, 64), CUDA, mean=(0.5,), deviation=(0.5,))
    build = Build(
        model=model,
        forward=lambda m, b: m(b.inputs["pixel_values"]),
        layout=layout,
        task=task_for("classification", ("a", "b", "c"), chosen.task),
        device=CUDA,
    )
    return assemble(chosen, precision.apply(build, "fp32"), 50, mesh=Mesh.over(world))


def step(run: Assembled, index: int, rank: int = 0, ranks: int = 1) -> None:
    """One step: a share of 8 samples in two micro-batches. Every 5th is cut otherwise, at another place a rank, so that
    one replays where another launches."""
    ids = np.array_split((np.arange(BATCH) + BATCH * index) % 64, ranks)[rank]
    cut = 1 + rank if index % 5 == 4 else len(ids) // 2
    run.engine.accumulate_batches([run.build.layout.collate(part) for part in np.split(ids, [cut])], BATCH, step=index)
    run.engine.update()


@final
class Doubles(World):
    """Two ranks that do the same, on one GPU: a sum doubles, on a stream of its own, as NCCL's do."""

    rank, size, local_rank = 0, 2, 0

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(2)

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            tensor.mul_(2)
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)

    def broadcast_(self, tensors: Sequence[Tensor]) -> None: ...

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def share(self, value: Any) -> Any:
        return value

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self, what: str) -> None: ...

    def alone_first(self, what: str) -> Any: ...


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sums_behind_a_replayed_backward_pass_are_those_beside_an_eager_one(dtype: str) -> None:
    """A sum that began before its gradients were there, or an update before its sums, would show in the bits."""
    eager, captured = (made(Doubles(), capture, reduce_dtype=dtype) for capture in (False, True))
    assert len(captured.engine._step.gradients._all_reduce.buckets) > 4
    for index in range(STEPS):
        for run in (eager, captured):
            step(run, index)
        weights = captured.engine.whole()
        different = [n for n, tensor in eager.engine.whole().items() if not torch.equal(tensor, weights[n])]
        assert different == [], f"step {index}"
    assert captured.engine.execution["steps"].startswith("captured"), captured.engine.execution
    with waits_are_errors():
        for index in range(STEPS, STEPS + 4):
            step(captured, index)
    for run in (eager, captured):
        run.engine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("capture", [False, True], ids=["eager", "captured"])
def test_two_gpus_train_as_one(capture: bool, tmp_path: Path) -> None:
    alone = made(Alone(), capture)
    for index in range(STEPS):
        step(alone, index)
    expected = {name: tensor.cpu() for name, tensor in alone.engine.whole().items()}
    alone.engine.close()
    found = on_two_gpus(tmp_path, capture)
    assert [said["steps"].split(":")[0] for said in found] == ["captured" if capture else "eager"] * 2, found
    assert found[0]["weights"] == found[1]["weights"], "the GPUs hold different weights"
    for name, tensor in expected.items():
        given = torch.tensor(found[0]["weights"][name], dtype=tensor.dtype)
        # AdamW turns rounding of tiny gradients into steps of the learning rate's size
        torch.testing.assert_close(given, tensor.flatten()[: len(given)], rtol=1e-3, atol=1e-4, msg=name)


def on_two_gpus(folder: Path, capture: bool) -> list[dict[str, Any]]:
    """What the two processes say, in rank order."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    arguments = [sys.executable, "-m", "tests.gpu.test_ddp", str(folder), str(int(capture))]
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
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(lines.splitlines()[-1]) for lines in said]


def be_rank(folder: str, capture: bool, rank: int) -> None:
    """One of two processes: trains its share of each batch, and prints its path and each tensor's first weights."""
    place = Place(
        rank=rank,
        world_size=2,
        local_rank=rank,
        local_world_size=2,
        started="paceline",
        init_method=f"file://{folder}/ranks",
    )
    with joined(place, device=CUDA, timeout_seconds=SECONDS / 2) as world:
        run = made(world, capture)
        for index in range(STEPS):
            step(run, index, world.rank, world.size)
        weights = {name: tensor.flatten()[:512].tolist() for name, tensor in run.engine.whole().items()}
        said = {"steps": run.engine.execution["steps"], "weights": weights}
        run.engine.close()
    print(json.dumps(said))


if __name__ == "__main__":
    be_rank(sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]))
