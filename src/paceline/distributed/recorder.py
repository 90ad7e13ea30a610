"""The last collectives of this rank, by torch's flight recorder, which is on where nobody turns it off.

It is asked in this process, as JSON: the files that torch writes of itself are pickles, which nobody here opens.
Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, its JSON of version 2.10.
"""

from __future__ import annotations

import json
import sys
from typing import Any

DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Torch's functions: NCCL's recorder, where there is one, and gloo's."""

MOST, BEFORE = 40, 8
"""So many of a group are told, and so many of them from before the one that is under way: with GPUs, the host runs
ahead."""

Collectives = dict[str, dict[str, Any]]
"""Group -> ``at``, the number of the one that is under way, or else of the last; and ``ops``, what each number was."""


def recorded() -> Collectives:
    """The last collectives of each group that this rank has begun; of a process without torch, none.

    It may be called beside a main thread that waits in one. Messages between two ranks are left out: their numbers are
    no one else's.
    """
    torch = sys.modules.get("torch._C._distributed_c10d")
    groups: dict[str, dict[int, tuple[str, bool]]] = {}
    for name in DUMPS:
        dump = getattr(torch, name, None)
        for entry in json.loads(dump()).get("entries", ()) if dump else ():
            if not entry["is_p2p"]:
                backend, _, operation = entry["profiling_name"].rpartition(":")
                sizes = ", ".join("x".join(map(str, size)) or "1" for size in entry["input_sizes"])
                what = f"{operation} of {sizes} {', '.join(dict.fromkeys(entry['input_dtypes']))}"
                done = entry["retired"] or entry["state"] == "completed"
                group = f"{entry['process_group'][-1]} ({backend} {entry['process_group'][0]})"
                groups.setdefault(group, {})[entry["collective_seq_id"]] = what, done
    return {group: _last(ops) for group, ops in groups.items()}


def _last(ops: dict[int, tuple[str, bool]]) -> dict[str, Any]:
    at = next((number for number, (_, done) in ops.items() if not done), max(ops))
    numbers = [number for number in sorted(ops) if number >= at - BEFORE][:MOST]
    return {"at": at, "ops": {str(number): ops[number][0] for number in numbers}}
