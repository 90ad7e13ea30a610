"""``paceline bench comm``: what is measured, what is made of it, and the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from paceline.contract.errors import UserError
from paceline.machine.cluster import RENDEZVOUS
from paceline.machine.facts import Facts, Gpu
from paceline.seams import World
from paceline.testing import ports
from paceline.testing.distributed import run_distributed, run_processes
from paceline.verbs.bench import app, comm, start
from paceline.verbs.bench.comm import (
    OPERATIONS,
    Measurement,
    bench_comm,
    measured,
    sizes,
    table,
)
from paceline.verbs.bench.start import parse_size

NAMES = ["all-reduce", "all-gather", "reduce-scatter"]
RANK = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}


def measures(world: World, largest_bytes: int) -> tuple[Measurement, ...]:
    comm.ROW_SECONDS = 0.01
    return measured(world, torch.device("cpu"), largest_bytes)


@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_is_measured_at_every_size_alike_on_all_ranks(size: int) -> None:
    first, *others = run_distributed(measures, size, 4096)
    assert all(other == first for other in others), "ranks agree on the number of calls and on the figures"
    assert [(each.operation, each.bytes) for each in first] == [(name, n) for name in NAMES for n in (1024, 4096)]
    for each in first:
        assert (each.backend, each.device, each.ranks) == ("gloo", "cpu", size)
        assert comm.FEWEST <= each.calls <= comm.MOST
        factor = (2 if each.operation == "all-reduce" else 1) * (size - 1) / size
        assert each.bus_bytes_per_second == pytest.approx(factor * each.bytes / each.seconds)
        assert each.link_bytes_per_second is None


def test_a_message_that_ranks_cannot_share_evenly_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = run_distributed(measures, 3, 1024)
    assert {each.bytes for each in first} == {1020}


def collectives(world: World) -> list[list[float]]:
    """Each operation once, on a message of 0, 1, 2, ... times the rank's number from 1."""
    found = []
    for operation in OPERATIONS:
        whole = torch.arange(2.0 * world.size) * (world.rank + 1)
        result = operation.prepare(whole, world.size, world.rank)
        closure = result.__closure__ or ()
        tensors = {name: cell.cell_contents for name, cell in zip(result.__code__.co_freevars, closure, strict=True)}
        result()
        found.append(tensors["part" if operation.name == "reduce-scatter" else "whole"].tolist())
    return found


def test_the_collectives_do_what_their_names_say() -> None:
    for rank, (reduced, gathered, scattered) in enumerate(run_distributed(collectives, 2)):
        assert reduced == [0, 3, 6, 9]
        assert gathered == [0, 1, 4, 6], "the first half of rank 0, the second of rank 1"
        assert scattered == [0, 3, 6, 9][2 * rank : 2 * rank + 2]


def collective_by_its_older_name(world: World) -> list[float]:
    hidden = {
        name: vars(dist).pop(name) for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name)
    }
    calls = []
    older = {name: getattr(dist, name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor")}
    vars(dist).update({name: lambda out, source, name=name: calls.append(name) for name in older})
    try:
        for operation in OPERATIONS[1:]:
            operation.prepare(torch.zeros(4), world.size, world.rank)()
    finally:
        vars(dist).update(hidden | older)
    return calls


def test_older_releases_of_torch_are_served() -> None:
    assert run_distributed(collective_by_its_older_name, 2) == [["all_gather_into_tensor", "reduce_scatter_tensor"]] * 2


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1024, [1024]),
        (5000, [1024, 4096, 5000]),
        (16384, [1024, 4096, 16384]),
        (2**28, [2**n for n in range(10, 29, 2)]),
    ],
)
def test_messages_grow_fourfold_up_to_the_largest(largest: int, expected: list[int]) -> None:
    assert sizes(largest) == expected


# links


# what is printed


def figures(limit: float | None) -> list[Measurement]:
    first = Measurement(
        operation="all-reduce",
        backend="nccl",
        device="NVIDIA H200",
        ranks=4,
        bytes=1024,
        calls=100,
        seconds=12.34e-6,
        bus_bytes_per_second=1.23e9,
        link_bytes_per_second=limit,
    )
    large = replace(first, bytes=2**28, seconds=1.42e-3, bus_bytes_per_second=347e9)
    return [replace(each, operation=name) for name in NAMES for each in (first, large)]


def test_the_table_has_a_line_a_size_beside_the_links_limit() -> None:
    head, names, units, small, large = table(figures(450e9)).splitlines()
    assert head.startswith("nccl, 4 ranks, NVIDIA H200: ")
    assert head.endswith("the links of a rank carry 450 GB/s each way")
    assert names.split() == NAMES
    assert units.split() == ["us", "GB/s", "of", "link"] * 3
    assert small.split() == ["1", "KiB", *["12.3", "1.23", "0%"] * 3]
    assert large.split() == ["256", "MiB", *["1,420.0", "347.00", "77%"] * 3]
    assert len({len(line) for line in (names, units, small, large)}) == 1, "columns stand below one another"


def test_a_limit_that_is_not_known_is_not_shown() -> None:
    printed = table(figures(None))
    assert "link" not in printed
    assert "%" not in printed


# the command


@pytest.mark.parametrize(
    ("text", "size"), [("64M", 2**26), ("64 MiB", 2**26), ("1k", 1024), ("512KB", 2**19), ("2g", 2**31), ("2000", 2000)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1M", "1.5M", "64X", "1023", "5G", "999999999999", "\x1b[31m"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="it is a size from 1K to 4G") as caught:
        parse_size(text)
    assert caught.value.what.isprintable()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RENDEZVOUS:
        monkeypatch.delenv(name, raising=False)


def test_one_process_has_nobody_to_measure_with(alone: None) -> None:
    with pytest.raises(UserError, match="bench comm: one rank") as caught:
        bench_comm()
    assert caught.value.fix == "paceline bench comm --gpus N, or --processes N"


def test_a_single_rank_of_torchrun_is_not_told_to_start_ranks(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (RANK | {"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "one"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="bench comm: one rank") as caught:
        bench_comm()
    assert caught.value.fix == "torchrun --nproc-per-node 2 -m paceline bench comm"


@pytest.mark.parametrize("variables", [{}, RANK | {"WORLD_SIZE": "1"}], ids=["alone", "a world of one"])
@pytest.mark.parametrize(("gpus", "expected"), [(0, {"processes": 2}), (1, {"processes": 2}), (4, {"gpus": 4})])
def test_by_itself_it_measures_between_all_gpus_or_two_processes(
    gpus: int, expected: dict[str, int], variables: dict[str, str], alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    machine = Facts(
        python="3.12",
        platform="x",
        cpu_model=None,
        cpu_count=1,
        memory_bytes=None,
        gpus=(Gpu(name="gpu", compute_capability=(9, 0)),) * gpus,
        versions={"torch": "2.13"},
        torch_cuda="13.0",
    )
    monkeypatch.setattr(start, "this_machine", lambda: machine)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(start, "choose_ranks", lambda *_, **options: asked.append(options))
    monkeypatch.setattr(start, "launch", lambda *_: 0)
    assert start.start_ranks(gpus=None, devices=None, processes=None) == 0
    assert [{name: value for name, value in options.items() if value} for options in asked] == [expected]


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert start.start_ranks(gpus=None, devices=None, processes=None) is None
    with pytest.raises(UserError, match="--gpus 2: this process is a rank already"):
        start.start_ranks(gpus=2, devices=None, processes=None)


def test_a_mistake_is_told_without_loading_torch() -> None:
    code = (
        "import sys; from paceline.verbs.bench import start; start.parse_size('1M'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def writes(rank: int, port: int, out: str) -> None:
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(values)
    comm.ROW_SECONDS = 0.01
    bench_comm(largest_bytes=1024, out=Path(out))


def test_rank_0_alone_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    run_processes(writes, 2, free_port, str(tmp_path / "new" / "comm.jsonl"))
    printed = capsys.readouterr().out
    assert "[rank 0] gloo, 2 ranks, cpu: " in printed
    assert "[rank 1]" not in printed
    rows = [json.loads(line) for line in (tmp_path / "new" / "comm.jsonl").read_text().splitlines()]
    assert [row["operation"] for row in rows] == NAMES
    assert set(rows[0]) == set(Measurement.__dataclass_fields__)


def test_a_folder_as_file_is_refused_before_anything_is_measured(tmp_path: Path, free_port: int) -> None:
    with pytest.raises(UserError, match="it is a folder"):
        run_processes(writes, 2, free_port, str(tmp_path))


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


def test_the_help_names_every_option() -> None:
    shown = CliRunner().invoke(app, ["comm", "--help"]).output
    assert {"--gpus", "--devices", "--processes", "--largest", "--out"} <= set(re.findall(r"--\w+", shown))


@pytest.mark.slow
def test_the_command_starts_ranks_and_prints_their_table(tmp_path: Path) -> None:
    out = tmp_path / "comm.jsonl"
    code = "from paceline.verbs.bench import app; app()"
    options = ["comm", "--processes", "2", "--largest", "4K", "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS} | {
        "OMP_NUM_THREADS": "1"
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gloo, 2 ranks, cpu") == 1
    assert len(out.read_text().splitlines()) == 6
