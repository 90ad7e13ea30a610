"""What torch's flight recorder has of a rank's last collectives."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.distributed import recorder
from paceline.distributed.recorder import BEFORE, MOST, recorded
from paceline.seams import World
from tests.testing.distributed import run_distributed


def made(world: World) -> Any:
    """Collectives and a message of two ranks."""
    dist.all_reduce(torch.ones(3))
    dist.broadcast(torch.ones(2, 4, dtype=torch.int64), 0)
    dist.send(torch.ones(1), 1) if world.is_first else dist.recv(torch.ones(1), 0)
    dist.all_reduce(torch.tensor(1.0))
    deadline = time.monotonic() + 10  # gloo's own thread notes that one is done
    while {group["at"] for group in recorded().values()} != {3} and time.monotonic() < deadline:
        time.sleep(0.01)
    return recorded()


def test_torch_records_what_ranks_on_the_cpu_do() -> None:
    expected = {"1": "all_reduce of 3 Float", "2": "broadcast of 2x4 Long", "3": "all_reduce of 1 Float"}
    for found in run_distributed(made, 2):
        (group,) = found
        assert group.startswith("default_pg (gloo ")
        assert found[group] == {"at": 3, "ops": expected}


def entry(number: int, state: str, **other: Any) -> dict[str, Any]:
    """As NCCL's recorder writes it."""
    whose = {"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "is_p2p": False}
    what = {"input_sizes": [[8], [2]], "input_dtypes": ["BFloat16", "BFloat16"]}
    return {**whose, **what, "collective_seq_id": number, "state": state, "retired": state == "completed", **other}


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What NCCL's recorder holds; gloo's holds nothing."""
    entries: list[dict[str, Any]] = []
    for name, held in zip(recorder.DUMPS, (entries, []), strict=True):
        answer = lambda held=held: json.dumps({"version": "2.10", "entries": held})  # noqa: E731
        monkeypatch.setattr(sys.modules["torch._C._distributed_c10d"], name, answer, raising=False)
    return entries


def test_a_gpu_is_at_the_first_that_is_not_done_however_far_its_host_is_ahead(recordings: list[dict[str, Any]]) -> None:
    recordings += [entry(number, "completed") for number in range(1, 100)]
    recordings += [entry(100, "started"), *(entry(number, "scheduled") for number in range(101, 300))]
    found = recorded()["default_pg (nccl 0)"]
    assert found["at"] == 100
    assert [*map(int, found["ops"])] == [*range(100 - BEFORE, 100 - BEFORE + MOST)]
    assert found["ops"]["100"] == "all_reduce of 8, 2 BFloat16"


def test_messages_are_left_out_and_a_recorder_that_is_off_tells_nothing(recordings: list[dict[str, Any]]) -> None:
    assert recorded() == {}
    recordings.append(entry(7, "started", is_p2p=True))
    assert recorded() == {}


def test_a_process_without_torch_tells_nothing() -> None:
    code = "import sys; from paceline.distributed.recorder import recorded; assert recorded() == {}"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
