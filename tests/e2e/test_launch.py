"""Ranks with real process groups: started by our launcher, by torchrun and by hand, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.verbs.launch.launcher import GRACE_SECONDS, SETTLE_SECONDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("forked_interpreters"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

LAUNCH = """
import sys
from paceline.verbs.launch import Ranks, launch
sys.exit(launch([sys.executable, "rank.py"], Ranks(count=2)))
"""

RANK = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path

import torch
from paceline.machine.cluster import find_place
from paceline.distributed.failures import failures_told
from paceline.distributed.group import joined

rank = int(os.environ["RANK"])
TIMEOUT = 30

def listening():
    # inodes of this process's sockets, and those that listen: address and port in hexadecimal, state 0A
    own = {os.readlink(f).partition("[")[2].rstrip("]") for f in Path("/proc/self/fd").iterdir() if f.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:
                found.append(fields[1])
    return found

def fails():
    Path("failed").write_text(str(time.monotonic()))

def body(world):
    BODY

with failures_told(), joined(
    find_place(os.environ), backend=None, device=torch.device("cpu"), timeout_seconds=TIMEOUT
) as world:
    body(world)
"""

SUM = """
    total = world.all_reduce(torch.tensor([rank + 1.0])).item()
    found = {"place": asdict(find_place(os.environ)), "total": total, "listening": listening()}
    Path(f"found-{rank}.json").write_text(json.dumps(found))
"""


def prepare(place: Path, body: str, timeout: int = 30) -> None:
    (place / "rank.py").write_text(RANK.replace("    BODY", body).replace("TIMEOUT = 30", f"TIMEOUT = {timeout}"))


def run(place: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *command],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def found(place: Path) -> list[dict[str, Any]]:
    return [json.loads((place / f"found-{rank}.json").read_text()) for rank in range(2)]


def test_our_launcher_and_nobody_from_outside(tmp_path: Path) -> None:
    prepare(tmp_path, SUM)
    done = run(tmp_path, "-c", LAUNCH)
    assert (done.returncode, done.stderr) == (0, "")
    ranks = found(tmp_path)
    assert [rank["total"] for rank in ranks] == [3.0, 3.0]
    assert ranks[0]["listening"], "the store does not listen: this test sees nothing"
    for rank in ranks:
        for address in rank["listening"]:
            assert address.startswith("0100007F:"), f"not loopback alone: {address}"


@pytest.mark.parametrize("module", ["torch.distributed.run", "torch.distributed.launch"])
def test_torchrun(tmp_path: Path, module: str) -> None:
    prepare(tmp_path, SUM)
    done = run(tmp_path, "-W", "ignore", "-m", module, "--nproc-per-node", "2", "--standalone", "rank.py")
    assert done.returncode == 0, done.stderr
    for rank, told in enumerate(found(tmp_path)):
        expected = {"rank": rank, "world_size": 2, "local_rank": rank, "local_world_size": 2}
        unset = {"is_local_guessed": False, "own_gpus": None}
        assert told["place"] == {**expected, **unset, "started": "torchrun", "init_method": "env://"}
        assert told["total"] == 3.0


@pytest.mark.parametrize(
    ("body", "code", "ends", "counts"),
    [
        (
            "    world.all_reduce(torch.ones(1))\n"
            "    if rank == 1: fails(); raise ZeroDivisionError('the cause')\n    world.all_reduce(torch.ones(1))",
            1,
            "ZeroDivisionError: the cause\npaceline: rank 1 failed first; the others were ended\n",
            {"Traceback": 1, "paceline:": 1},
        ),
        (
            "    if rank == 1: fails(); os.kill(os.getpid(), 9)\n    world.all_reduce(torch.ones(1))",
            137,
            "paceline: rank 1 failed first: ended by SIGKILL (the kernel sends it when memory runs out); "
            "the others were ended\n",
            {"Traceback": 0, "paceline:": 1},
        ),
        (
            "    if rank == 0: fails(); os.kill(os.getpid(), 9)\n    world.barrier('the end')",
            137,
            "paceline: rank 0 failed first: ended by SIGKILL (the kernel sends it when memory runs out); "
            "the others were ended\n",
            {"Traceback": 0, "paceline:": 1},
        ),
        (
            "    from paceline.contract.errors import DataError\n    with world.alone_first('reading'):\n"
            "        if rank == 0: fails(); raise DataError('empty', file='a.csv')",
            2,
            "paceline: a.csv: empty\n",
            {"Traceback": 0, "paceline:": 1},
        ),
    ],
    ids=["raises", "killed", "the first killed", "alone first"],
)
def test_the_cause_is_named_and_nothing_else(
    tmp_path: Path, body: str, code: int, ends: str, counts: dict[str, int]
) -> None:
    prepare(tmp_path, body)
    done = run(tmp_path, "-c", LAUNCH)
    assert done.returncode == code, done.stderr
    assert done.stderr.endswith(ends), done.stderr
    assert {word: done.stderr.count(word) for word in counts} == counts, done.stderr
    seconds = time.monotonic() - float((tmp_path / "failed").read_text())
    assert seconds < SETTLE_SECONDS + GRACE_SECONDS + 2, f"{seconds:.1f} s after the failure the ranks were still there"


def test_a_rank_that_hangs_is_named_after_the_time_limit(tmp_path: Path) -> None:
    prepare(tmp_path, "    if rank == 1: os.kill(os.getpid(), 19)\n    world.barrier('the end')", timeout=3)
    done = run(tmp_path, "-c", LAUNCH)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("paceline: rank 1 hangs: its process "), done.stderr
    assert "rank 1 of 2 has not reached 'the end' within 3 s" in done.stderr


def test_ranks_that_wait_in_different_collectives_are_told_which(tmp_path: Path) -> None:
    body = (
        "    world.all_reduce(torch.ones(3))\n"
        "    if rank: torch.distributed.broadcast(torch.ones(2, 4), 0)\n    else: world.all_reduce(torch.ones(2, 4))"
    )
    prepare(tmp_path, body, timeout=3)
    done = run(tmp_path, "-c", LAUNCH)
    assert done.returncode == 1, done.stderr
    one, other = "all_reduce of 2x4 Float", "broadcast of 2x4 Float"
    told = (
        f"paceline: collectives of default_pg (gloo 0): rank 0 reached number 2, {one}; rank 1 reached number 2, "
        f"{other}\n  the first that differs is number 2: rank 0 made {one}; rank 1 made {other}\n"
    )
    assert done.stderr.endswith(told), done.stderr


@pytest.mark.parametrize("body", ["world.barrier('the end')", "world.any(False)"])
def test_a_first_rank_that_is_stopped_is_not_explained_as_the_network(tmp_path: Path, body: str) -> None:
    """It holds the store that the others ask, and that says nothing either."""
    prepare(tmp_path, f"    if rank == 0: os.kill(os.getpid(), 19)\n    {body}", timeout=3)
    began = time.monotonic()
    done = run(tmp_path, "-c", LAUNCH)
    assert time.monotonic() < began + 30 + 3
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("paceline: rank 0 hangs: its process "), done.stderr
    assert "is stopped (SIGSTOP, or a debugger)" in done.stderr
    assert "network" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--gpus", "4"], ("paceline: --gpus 4", "--processes 4")),
        (["--devices", "1,1"], ("--devices 1,1",)),
        (["--gpus", "2", "--processes", "2"], ("--gpus 2 with --processes 2",)),
        (["--init", "tcp://127.0.0.1", "--rank", "0", "--world-size", "2"], ("a host and a port",)),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are there")
def test_the_command_refuses_before_any_rank_starts(
    tmp_path: Path, arguments: Sequence[str], parts: Sequence[str]
) -> None:
    (tmp_path / "r.yaml").write_text(
        "name: x\nmodel: {config: {model_type: bert}, vocabulary_size: 900}\ndata: {source: a.csv, text: t}"
    )
    done = run(tmp_path, "-m", "paceline", "train", "r.yaml", *arguments)
    assert done.returncode == 2, done.stderr
    for part in parts:
        assert part in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["r.yaml"]


def test_a_launcher_killed_in_a_collective_leaves_nobody(tmp_path: Path) -> None:
    prepare(
        tmp_path,
        "    Path(f'pid-{rank}').write_text(str(os.getpid()))\n    world.barrier('start')\n"
        "    Path(f'started-{rank}').touch()\n    if rank == 1: time.sleep(60)\n    world.all_reduce(torch.ones(1))",
    )
    with subprocess.Popen([sys.executable, "-c", LAUNCH], cwd=tmp_path, stderr=subprocess.PIPE) as launcher:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("started-*"))) < 2:
            assert launcher.poll() is None
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"orphans: {left}"
        time.sleep(0.02)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
