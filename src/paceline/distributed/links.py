"""What lies between the GPUs of a run: NVLinks, or something slower that we know nothing of."""

from __future__ import annotations

import re
import socket

from paceline.machine.facts import Facts, ask
from paceline.seams import World

LINK_RATES = {(7, 0): 25e9, (8, 0): 25e9, (9, 0): 25e9, (10, 0): 50e9}
"""Compute capability -> bytes a second that one NVLink carries in one direction.
Source: NVIDIA's data sheets of V100 (6 links, 300 GB/s in both directions together), A100 (12, 600), H100 (18, 900)
and B200 (18, 1,800)."""


def shared_link_rate(world: World, facts: Facts, *, over_gpus: bool = True) -> float | None:
    """Bytes a second that the links of every rank's GPU carry in one direction; all ranks call this.

    None across machines, whose network we know nothing of, and where ``link_rate`` is None for a rank.

    Args:
        over_gpus: whether this rank's collectives go from GPU to GPU; else its links carry none.
    """
    looks = over_gpus and facts.gpus
    own = link_rate(facts, ask(["nvidia-smi", "nvlink", "--status"]) or "") if looks else None
    found = world.gather([socket.gethostname(), own])
    machines, rates = {name for name, _ in found}, [rate for _, rate in found]
    return min(rates) if len(machines) == 1 and None not in rates else None


def link_rate(facts: Facts, status: str) -> float | None:
    """Bytes a second that the NVLinks of a GPU carry in one direction; of the GPU with the fewest.

    None where there are none, or of a generation that is not in ``LINK_RATES``: what PCIe carries depends on what lies
    between two GPUs.

    Args:
        status: what ``nvidia-smi nvlink --status`` prints: each GPU, and below it a line a link.
    """
    rates = {LINK_RATES.get(gpu.compute_capability or (0, 0)) for gpu in facts.gpus}
    gpus = re.split(r"^GPU \d+:.*$", status, flags=re.MULTILINE)[1:]
    num_links = min((len(re.findall(r"^\s*Link \d+: [\d.]+ GB/s", gpu, re.MULTILINE)) for gpu in gpus), default=0)
    rate = rates.pop() if len(rates) == 1 else None
    return num_links * rate if rate and num_links else None
