"""What sums over GPUs cost a DDP step, by how they are cut and by how many multiprocessors NCCL may take.

    torchrun --standalone --nproc-per-node 4 benchmarks/sums_beside_backward.py --batch 64 --out FILE.jsonl

Every rank has the same batches, so that none waits for another's longer row: what a step takes beyond the same step
without sums (``sums=none``, on all GPUs at once) is the sums alone. Captured steps, as runs take them; lengths and
weights as in step_anatomy.py. Each variant is a line such as ``bucket_mib=25,ctas=8``:

- ``bucket_mib``: a bucket's size;
- ``hooked=1``: gradients are written bucket by bucket, and no sum begins: what the cutting itself costs;
- ``mark``: how a captured backward pass tells that a bucket is complete: ``event`` (as runs do) or ``counter`` (a
  kernel adds one to a number in the GPU's memory, and the stream of the sums waits until it is so large);
- ``apart=0``: a bucket may hold gradients of blocks and of embeddings;
- ``ctas``: multiprocessors that NCCL may take at most (0: as many as it likes);
- ``first``: the sums' kernels go before others that wait (a high-priority stream);
- ``bf16``: gradients are summed in bf16;
- ``copies=1``: copy engines carry the bytes (``sums_by_copies.py``), not NCCL.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from step_anatomy import MODELS, build, dataset, synchronize
from sums_by_copies import Copies, zeros

from paceline.distributed.group import joined
from paceline.engine.numerics import numerics
from paceline.machine.cluster import find_place
from paceline.machine.facts import this_machine
from paceline.optim import flat
from paceline.prepare import assemble as assembling
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.seams import Alone, Mesh, World
from paceline.strategies.ddp import buckets
from paceline.strategies.ddp import strategy as ddp
from paceline.strategies.ddp.buckets import BUCKET_BYTES, Reduction

MIB = 2**20
VARIANTS = (
    "sums=none",
    "hooked=1",
    "bucket_mib=25,apart=0",
    "bucket_mib=25",
    "bucket_mib=60",
    "bucket_mib=90",
    "bucket_mib=180",
    "bucket_mib=1000",
    "bucket_mib=1000,apart=0",
    "bucket_mib=60,ctas=8",
    "bucket_mib=25,copies=1",
    "bucket_mib=60,copies=1",
    "bucket_mib=180,copies=1",
    "bucket_mib=60,bf16=1",
    "bucket_mib=180,bf16=1",
    "sums=none",
)


VALUES: dict[str, str] = {
    "sums": "none",
    "hooked": "1",
    "mark": "event|counter",
    "bucket_mib": r"[1-9]\d*",
    "apart": "0|1",
    "ctas": r"\d+",
    "first": "1",
    "bf16": "1",
    "copies": "1",
}
"""What a variant may say of each of its parts, as a regular expression."""


def variant_of(line: str) -> str:
    """The line itself; an unknown word would be measured as plain DDP, and believed."""
    for part in line.split(","):
        name, _, value = part.partition("=")
        if name not in VALUES:
            raise argparse.ArgumentTypeError(f"{part!r}: a variant is made of {', '.join(VALUES)}")
        if not re.fullmatch(VALUES[name], value):
            raise argparse.ArgumentTypeError(f"{part!r}: {name} is {VALUES[name]}")
    return line


class Through:
    """The ranks of a run, whose gradients are summed by another group, by copies where memory allows it, or not."""

    def __init__(self, world: World, group: Any, copies: Copies | None, *, sums: bool) -> None:
        self._world, self._group, self._copies, self._sums = world, group, copies, sums
        self.begun = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def start_all_reduce(self, tensor: torch.Tensor) -> Any:
        if not self._sums:
            return lambda: None
        self.begun += 1
        if self._copies is not None and self._copies.reaches(tensor):
            return self._copies.start_all_reduce(tensor)
        return dist.all_reduce(tensor, group=self._group, async_op=True).wait


class Counter:
    """In place of an event: a number in memory that captured kernels raise and a stream waits for.

    Source: CUDA driver API, cuStreamWaitValue32 (at least, modulo 2^32).
    """

    def __init__(self, device: torch.device) -> None:
        self._value, self._awaited = torch.zeros(1, dtype=torch.int32, device=device), 0
        self._driver = ctypes.CDLL("libcuda.so.1")

    def record(self) -> None:
        self._value.add_(1)

    def wait(self, stream: Any) -> None:
        self._awaited += 1
        failed = self._driver.cuStreamWaitValue32_v2(
            ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(self._value.data_ptr()), self._awaited, 0
        )
        if failed:
            raise RuntimeError(f"cuStreamWaitValue32 returns {failed}")


def mark_of(kind: str, device: torch.device) -> Any:
    """What stands where a bucket has its event; nothing is captured on a CPU."""
    if device.type != "cuda":
        return None
    return Counter(device) if kind == "counter" else torch.cuda.Event(external=True)


def group_of(ctas: int, *, first: bool) -> Any:
    """A group whose NCCL kernels take at most ``ctas`` multiprocessors."""
    if not torch.cuda.is_available():
        return dist.new_group(backend="gloo")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=first)
    if ctas:
        options.config.min_ctas, options.config.max_ctas = 1, ctas
    return dist.new_group(backend="nccl", pg_options=options)


def seconds_of(call: Any, times: int) -> float:
    """Of one call, on the rank that took longest."""
    dist.barrier()
    synchronize()
    started = time.perf_counter()
    for _ in range(times):
        call()
    synchronize()
    taken = [0.0] * dist.get_world_size()
    dist.all_gather_object(taken, (time.perf_counter() - started) / times)
    return max(taken)


def rates(group: Any, device: torch.device) -> dict[str, float]:
    """Bus bandwidth of a sum, GB/s, by MiB."""
    found, ranks = {}, dist.get_world_size()
    for mib in (25, 90, 256) if device.type == "cuda" else (1,):
        tensor = torch.zeros(mib * MIB // 4, device=device)
        call = partial(dist.all_reduce, tensor, group=group)
        call()
        found[str(mib)] = round(tensor.nbytes * 2 * (ranks - 1) / ranks / seconds_of(call, 10) / 1e9, 1)
    return found


@contextlib.contextmanager
def shared_buffers(wanted: bool) -> Iterator[None]:
    """Inside, flat buffers are made where other ranks can read them."""
    usual = flat._zeros
    if wanted:
        flat._zeros = lambda sizes, least=None: {kind: zeros(size, *kind) for kind, size in sizes.items()}
    try:
        yield
    finally:
        flat._zeros = usual


def _reduction(said: dict[str, str], world: World, order: Any, **more: Any) -> Reduction:
    size = int(said.get("bucket_mib", BUCKET_BYTES // MIB)) * MIB
    apart = {} if said.get("apart", "1") == "1" else {"cuts": ()}
    return Reduction(world, order, **{**more, "bucket_bytes": size, **apart})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="distilbert")
    parser.add_argument("--batch", type=int, default=64, help="reviews a GPU")
    parser.add_argument("--cycles", type=int, default=10, help="times that the eight batches are taken")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variant", action="append", type=variant_of, help="in place of the list")
    parser.add_argument(
        "--traces", type=Path, help="folder for a Chrome trace of each variant's eight steps, of rank 0"
    )
    chosen = parser.parse_args()
    facts = this_machine()
    settings = {
        "model": {"config": MODELS[chosen.model]},
        "data": {"source": "builtin:random", "pad_to_multiple_of": 256},
        "loop": {"batch_size": chosen.batch, "epochs": 3},
    }
    recipe, _ = choose(Recipe.parse(settings), facts)
    place, device = find_place(os.environ), torch.device(recipe.device)
    with joined(place, device=device, timeout_seconds=120) as world:
        if device.type == "cuda":
            device = torch.device("cuda", world.local_rank)
        with numerics(recipe.techniques.precision, deterministic=False, device=recipe.device):
            measure(chosen, recipe, world, device)


def measure(chosen: argparse.Namespace, recipe: Recipe, world: World, device: torch.device) -> None:
    data = dataset(max(2000, 8 * chosen.batch), MODELS[chosen.model]["vocab_size"])
    assembled, _ = build(recipe, data, 100_000)
    made = assembled.build
    assembled.engine.close()
    shares = np.arange(8 * chosen.batch).reshape(8, chosen.batch)
    for variant in chosen.variant or VARIANTS:
        said = dict(part.split("=") for part in variant.split(","))
        number_format = "bf16" if said.get("bf16") else "fp32"
        ddp.Reduction = partial(_reduction, said)  # type: ignore[attr-defined] # a measurement looks inside
        buckets._event = partial(mark_of, said.get("mark", "event"))
        group = group_of(int(said.get("ctas", 0)), first=bool(said.get("first")))
        copies = Copies(group, device, first=bool(said.get("first"))) if said.get("copies") else None
        summing: Any = Alone() if "sums" in said else Through(world, group, copies, sums="hooked" not in said)
        with shared_buffers(copies is not None):
            rounded = recipe.with_settings([f"parallel.reduce_dtype={number_format}"])
            run = assembling.assemble(rounded, made, 100_000, mesh=Mesh(whole=summing, data=summing))
        engine = run.engine
        engine.warm_up_on(made.layout.collate(shares[0]), chosen.batch)

        def cycle(engine: Any = engine) -> None:
            for index, share in enumerate(shares):
                batch = made.layout.collate(share)
                engine.accumulate_batches([batch], chosen.batch * world.size, step=index)
                engine.update()

        for _ in range(3):
            cycle()
        begun = getattr(summing, "begun", 0)
        step = seconds_of(cycle, chosen.cycles) / len(shares)
        begun = getattr(summing, "begun", 0) - begun
        if chosen.traces:
            with torch.profiler.profile() as profile:
                cycle()
                synchronize()
            if world.is_first:
                chosen.traces.mkdir(exist_ok=True)
                profile.export_chrome_trace(
                    str(chosen.traces / f"{variant.replace('=', '-').replace(',', '_')}.json.gz")
                )
        record = {"variant": variant, "ranks": world.size, "batch": chosen.batch, "step_ms": round(1e3 * step, 3)}
        record["all_reduces_a_step"] = begun / chosen.cycles / len(shares)
        record |= {"steps": engine.execution["steps"], "bus_gb_per_second": rates(group, device)}
        record |= {"torch": torch.__version__, "card": torch.cuda.get_device_name() if device.type == "cuda" else "CPU"}
        engine.close()
        dist.destroy_process_group(group)
        if world.is_first:
            with chosen.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(
                f"{variant:40} {record['step_ms']:8.3f} ms, {begun} all-reduces  {record['bus_gb_per_second']} GB/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
