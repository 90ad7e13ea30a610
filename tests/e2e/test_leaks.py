"""Many runs in one process leave as much behind as a few: objects, tensors, files, threads, children."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.contract.stopwatch import Stopwatch
from tests.e2e.conftest import rows
from tests.e2e.whole_runs import recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def living() -> Counter[str]:
    """Number of what a process can leak, by kind: our objects by their classes, tensors, files, threads, children."""
    gc.collect()
    counts: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).startswith("paceline"):
            counts[f"{kind.__module__}.{kind.__qualname__}"] += 1
        elif issubclass(kind, (torch.Tensor, torch.nn.Module)):
            counts[kind.__qualname__] += 1
    counts["open files"] = len(os.listdir("/proc/self/fd"))
    counts["threads"] = len(threading.enumerate())
    counts["threads of libraries"] = len(os.listdir("/proc/self/task"))
    counts["children"] = len(Path("/proc/thread-self/children").read_text().split())
    return counts


def growth(act: Callable[[int], Any], times: int) -> dict[str, int]:
    """Return what of ``living`` has grown from a few calls to ``times``; whatever is made once is there by then."""
    few = 4
    for number in range(few):
        act(number)
    before = living()
    for number in range(few, times):
        act(number)
    after = living()
    return {kind: count - before[kind] for kind, count in after.items() if count > before[kind]}


def test_a_leak_is_seen() -> None:
    leaked: list[Any] = []
    seen = growth(lambda _: leaked.append((torch.zeros(1), Stopwatch(), os.dup(0))), 7)
    for _, _, number in leaked:
        os.close(number)
    assert {kind: seen.get(kind) for kind in ("Tensor", "paceline.contract.stopwatch.Stopwatch", "open files")} == {
        "Tensor": 3,
        "paceline.contract.stopwatch.Stopwatch": 3,
        "open files": 3,
    }


def test_twenty_runs_and_two_hundred_predictions(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    short = recipe(pretrained, reviews, loop={"max_steps": 4, "epochs": 1})
    assert growth(lambda number: paceline.train(short, out=tmp_path / f"{number}"), 20) == {}
    texts = [row["text"] for row in rows()[:4]]
    assert growth(lambda _: paceline.predict(tmp_path / "0", texts), 200) == {}
