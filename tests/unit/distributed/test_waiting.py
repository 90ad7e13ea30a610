"""Ranks that have not come are reported after some seconds, and only those."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from paceline.distributed import waiting
from paceline.distributed.exchange import LostRank
from paceline.distributed.group import joined
from paceline.distributed.waiting import Waiting
from paceline.machine.cluster import Place, Starter
from tests.testing.distributed import run_processes
from tests.testing.ports import free_port


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "REPORT_AFTER_SECONDS", 0.0)


def at(rank: int, size: int, started: Starter = "environment", init: str = "env://", local: int | None = None) -> Place:
    local = rank if local is None else local
    return Place(rank=rank, world_size=size, local_rank=local, local_world_size=size, started=started, init_method=init)


@pytest.mark.parametrize(
    ("place", "missing", "line"),
    [
        (at(0, 2), [1], "rank 0 waits for rank 1 of 2 at 127.0.0.1:29500, for 600 s (--timeout)"),
        (at(1, 4), [0, 2], "rank 1 waits for ranks 0, 2 of 4 at"),
        (at(3, 4), [0], "rank 3 waits for rank 0 of 4 at"),
        (at(0, 4, "srun", "tcp://a:1"), [2, 3], "rank 0 waits for ranks 2, 3 of 4 at"),
        (at(2, 4, "srun", "tcp://a:1", local=0), [0], "rank 2 waits for rank 0 of 4 at"),
    ],
)
def test_missing_ranks_are_named_once(
    place: Place, missing: list[int], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = Waiting(place, 600)
    for _ in range(2):
        waits.report("127.0.0.1:29500", lambda: missing)
    told = capsys.readouterr().err
    assert told.startswith(f"paceline: {line}")
    assert told.count("\n") == 2
    unset = "unset MASTER_ADDR MASTER_PORT RANK WORLD_SIZE\n"
    assert told.endswith(unset) == (place.started == "environment")


@pytest.mark.parametrize(
    ("place", "missing"),
    [(at(0, 2, "paceline"), [1]), (at(0, 2, "torchrun"), [1]), (at(2, 4), [3]), (at(3, 4, "srun", "tcp://a:1"), [0])],
    ids=["our launcher watches", "torchrun watches", "an earlier rank tells", "another of its machine tells"],
)
def test_the_others_are_silent(place: Place, missing: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    Waiting(place, 600).report("a:1", lambda: missing)
    assert capsys.readouterr().err == ""


def test_nothing_is_said_before_its_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(waiting, "REPORT_AFTER_SECONDS", 60.0)
    Waiting(at(0, 2), 600).report("a:1", lambda: [1])
    assert capsys.readouterr().err == ""


def joins_alone(_: int, rank: int, init: str) -> None:
    waiting.REPORT_AFTER_SECONDS = 0.2
    with (
        pytest.raises(LostRank),
        joined(at(rank, 3, init=init), device=torch.device("cpu"), timeout_seconds=1.5),
    ):
        pass


@pytest.mark.parametrize(
    ("way", "rank", "missing"),
    # at an address nobody but rank 0 knows who is there; in a file all do
    [("tcp", 0, "ranks 1, 2"), ("tcp", 1, "rank 0"), ("file", 0, "ranks 1, 2"), ("file", 1, "ranks 0, 2")],
)
def test_a_rank_that_joins_alone_tells_whom_it_waits_for(
    way: str, rank: int, missing: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    point = f"127.0.0.1:{free_port()}" if way == "tcp" else str(tmp_path / "meet")
    run_processes(joins_alone, 1, rank, f"{way}://{point}")
    told = capfd.readouterr()
    assert re.search(rf"rank {rank} waits for {missing} of 3 at {re.escape(point)}, for 1.5 s", told.out + told.err)
