"""What is known of the links between GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.distributed import links
from paceline.distributed.links import link_rate
from paceline.machine.facts import Facts, Gpu

STATUS = """GPU 0: NVIDIA H200 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
\t Link 2: 26.562 GB/s
GPU 1: NVIDIA H200 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
\t Link 2: 26.562 GB/s
"""


def facts(*capabilities: tuple[int, int] | None) -> Facts:
    gpus = tuple(Gpu(name="gpu", compute_capability=capability) for capability in capabilities)
    return Facts(python="3.12", platform="x", cpu_model=None, cpu_count=1, memory_bytes=None, gpus=gpus)


@pytest.mark.parametrize(
    ("capabilities", "status", "rate"),
    [
        ([(9, 0), (9, 0)], STATUS, 50e9),
        ([(10, 0)], "GPU 0: B200\n" + "\t Link 0: 53.125 GB/s\n" * 18, 900e9),
        ([(9, 0)], "GPU 0: H200\n" + "\t Link 0: 26.562 GB/s\n" * 18, 450e9),
        ([(8, 0)], "GPU 0: A100\n" + "\t Link 0: 25 GB/s\n" * 12, 300e9),
        ([(9, 0), (10, 0)], STATUS, None),
        ([(8, 6)], STATUS, None),
        ([None], STATUS, None),
        ([(9, 0)], "", None),
        ([(9, 0)], "GPU 0: NVIDIA H100 PCIe (UUID: GPU-0)\n\t Link 0: <inactive>\n", None),
        ([], STATUS, None),
    ],
    ids=["fewest", "B200", "H200", "A100", "mixed", "unlisted", "unknown", "no answer", "no links", "no GPUs"],
)
def test_the_links_limit_is_known_or_not_shown(capabilities: list[Any], status: str, rate: float | None) -> None:
    assert link_rate(facts(*capabilities), status) == rate


@pytest.mark.parametrize(
    ("other", "limit"),
    [(["same", 25e9], 25e9), (["same", 900e9], 50e9), (["same", None], None), (["another machine", 50e9], None)],
)
def test_the_slowest_gpu_of_one_machine_is_the_limit(
    other: list[Any], limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "ask", lambda command: STATUS)
    name, rate = other
    world = SimpleNamespace(gather=lambda own: [own, [own[0] if name == "same" else name, rate]])
    assert links.shared_link_rate(world, facts((9, 0))) == limit
