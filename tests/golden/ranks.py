"""What a row of the table does, on ranks forked from a process that has loaded torch once."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.golden.losses import STOP_AT_CALL
from tests.golden.rows import Row, recipe

DEADLINE_SECONDS = 300.0
"""For all ranks of one run to end."""

PRELOADED = (
    "torch._dynamo",
    "transformers.models.bert.modeling_bert",
    "paceline.run.run",
)
"""Slow to import, loaded before forking; a name that is not there any more costs time alone."""


class RowError(Exception):
    """A run did not end as its row has it."""


def run(row: Row, place: Path, folder: Path) -> None:
    """Leaves ``folder``: a run folder, or what the own loop leaves."""
    if row.own_loop:
        on_ranks(1, _own_loop, folder)
        return
    plain = recipe(row, place)
    source = plain["model"].get("source")
    if source and not Path(source).exists():
        on_ranks(1, _train, recipe(Row(), place), Path(source).parent, None)
    if row.launched:
        _launch(plain, row.ranks, folder)
    else:
        on_ranks(row.ranks, _train, plain, folder, row.stop_at_call)
    if row.stop_at_call is not None:
        if not (folder / "preempted").exists():
            raise RowError("it was not stopped after a step: another stop_at_call is needed")
        on_ranks(row.resumed_ranks or row.ranks, _resume, folder)
    if row.used:
        on_ranks(1, _use, folder, place / row.data)


def on_ranks(size: int, function: Callable[..., None], *arguments: Any) -> None:
    """Run ``function(*arguments)`` in ``size`` processes with the environment that torchrun gives.

    Raises:
        RowError: one of them failed, or they did not end in time; its traceback is on standard error.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=_rank, args=(rank, size, port, function, arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        left: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while left:
            ended = multiprocessing.connection.wait(list(left), deadline - time.monotonic())
            if not ended:
                raise RowError(f"ranks {sorted(left.values())} of {size} did not end in {DEADLINE_SECONDS:.0f} s")
            for sentinel in ended:
                rank = left.pop(sentinel)
                processes[rank].join()
                if processes[rank].exitcode:
                    raise RowError(f"rank {rank} of {size} ended with exit code {processes[rank].exitcode}")
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(rank: int, size: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if size > 1:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ.update({**meeting, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)})
    import torch

    torch.set_num_threads(1)
    function(*arguments)


def _train(plain: dict[str, Any], folder: Path, stop_at_call: int | None) -> None:
    import paceline
    from paceline.contract.errors import Preempted

    if stop_at_call is not None and os.environ.get("RANK", "0") == "0":
        os.environ[STOP_AT_CALL] = str(stop_at_call)
    with contextlib.suppress(*[] if stop_at_call is None else [Preempted]):
        paceline.train(plain, out=folder)


def _resume(folder: Path) -> None:
    import paceline

    paceline.resume(folder, trust_references=True)


def _use(folder: Path, data: Path) -> None:
    """Leaves evaluated.json and predicted.csv in the run folder."""
    import paceline

    found = paceline.evaluate(folder, split="test")
    told = {"loss": found.loss, "metrics": dict(found.metrics), "samples": found.samples}
    (folder / "evaluated.json").write_text(json.dumps(told), encoding="utf-8")
    paceline.predict(folder, data, folder / "predicted.csv", settings=["data.text=text"])


def _own_loop(folder: Path) -> None:
    from tests.golden import own_loop

    own_loop.train(folder)


def _launch(plain: dict[str, Any], ranks: int, folder: Path) -> None:
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(plain), encoding="utf-8")
    command = [sys.executable, "-m", "paceline", "train", str(file), "--out", str(folder), "--processes", str(ranks)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    if ended.returncode:
        raise RowError(f"exit code {ended.returncode}\n{ended.stderr}")
