"""Whole runs on several ranks: each a process forked from one that has loaded everything, joined through a file."""

from __future__ import annotations

import itertools
import os
import pkgutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.errors import DiskFullError, PacelineError
from paceline.contract.records import RunRecord
from paceline.machine.cluster import Place
from paceline.recipe import Recipe
from paceline.run.loop import Loop
from paceline.verbs.train import resume, train
from tests.e2e.whole_runs import Disturb, Outcome
from tests.testing.distributed import run_processes

DEADLINE = 60
"""Seconds in which all ranks have to end, whatever happens."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What happens to one rank, after the first micro-batch of a step where it is a signal."""

    rank: int
    signals: Mapping[int, signal.Signals] = field(default_factory=dict)
    """Step, from 1 -> signal."""
    stop_in: str = ""
    """Dotted path of a function, before a call of which it is sent SIGTERM."""
    call: int = 1
    """Of its calls, counted from 1."""
    folder: str | None = None
    """Its current folder."""
    settings: Sequence[str] = ()
    """Of its recipe alone."""
    out: str | None = None
    """Its run folder."""
    begins: Mapping[str, Any] | None = None
    """A recipe with which it begins a run where the others resume one."""
    disk_full_at: str = ""
    """What there is no room for."""
    late_batches: float = 0.0
    """Seconds that it takes longer to make a batch."""
    report: Path | None = None
    """A folder where every rank leaves a file with what it failed of: for where one of them is killed."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a rank ended."""

    record: RunRecord | None
    error: PacelineError | None
    samples: list[tuple[int, int, tuple[int, ...]]]
    """Of every step: epoch, step of the epoch, global batch."""
    shares: list[tuple[int, ...]]
    """Of every step: this rank's samples."""
    encodings: int
    """How often this rank encoded texts."""


def on_ranks(
    size: int,
    meeting: str,
    asked: Recipe | Sequence[str],
    folder: Path | str,
    *,
    trouble: Trouble | None = None,
    timeout_seconds: float = 30,
) -> list[Ended]:
    """Train on ``size`` ranks, or resume with settings where those are given in place of a recipe.

    Args:
        meeting: where ranks meet, as ``--init`` has it.
    """
    plain = asked.plain() if isinstance(asked, Recipe) else list(asked)
    return run_processes(
        one_rank, size, size, meeting, plain, folder, trouble, timeout_seconds, timeout_seconds=DEADLINE
    )


def one_rank(
    rank: int,
    size: int,
    meeting: str,
    asked: Any,
    folder: Path | str,
    trouble: Trouble | None,
    timeout_seconds: float,
) -> Ended:
    """In a process of its own, so that nothing need be put back."""
    samples: list[Any] = []
    shares: list[Any] = []
    encodings = _watched(samples, shares)
    settings: Sequence[str] = ()
    if trouble is not None and trouble.rank == rank:
        Disturb(pytest.MonkeyPatch()).signals.update(trouble.signals)
        os.chdir(trouble.folder or ".")
        settings = trouble.settings
        folder = trouble.out or folder
        asked = trouble.begins or asked
        _fill_disk(trouble.disk_full_at)
        _stop_in(trouble.stop_in, trouble.call)
        _slow_down(trouble.late_batches)
    place = Place(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        started="environment" if size > 1 else "alone",
        init_method=meeting if size > 1 else None,
    )
    others: Any = {"place": place, "timeout_seconds": timeout_seconds}
    record, error = None, None
    try:
        if isinstance(asked, dict):
            record = train(Recipe.parse(asked).with_settings(settings), out=folder, **others)
        else:
            record = resume(folder, [*asked, *settings], **others)
    except PacelineError as raised:
        error = raised.with_traceback(None)
    assert not torch.distributed.is_initialized(), "a process group was left open"
    if trouble is not None and trouble.report:
        (trouble.report / f"rank-{rank}").write_text(str(error))
    watched: Any = {"samples": samples, "shares": shares, "encodings": len(encodings)}
    return Ended(record=record, error=_sendable(error), **watched)


class Told(PacelineError):
    """Stands for an error of another process: its class by name, its text and its exit code."""

    def __init__(self, kind: str, text: str, exit_code: int) -> None:
        self.kind, self.exit_code = kind, exit_code
        super().__init__(text)

    def __reduce__(self) -> Any:
        return Told, (self.kind, str(self), self.exit_code)


def _sendable(error: PacelineError | None) -> Told | None:
    return None if error is None else Told(type(error).__name__, str(error), error.exit_code)


def _watched(samples: list[Any], shares: list[Any]) -> list[int]:
    import paceline.data.prepare as prepare

    step, encode, encodings = Loop._step, prepare.encode_texts, list[int]()

    def noted_step(loop: Loop) -> None:
        at = loop.progress.order
        plan = loop.job.course.plan(at)
        samples.append((at.epoch, at.step, tuple(plan.samples.tolist())))
        shares.append(tuple(number for ids in plan.microbatches for number in ids.tolist()))
        step(loop)

    def noted_encode(*arguments: Any, **named: Any) -> Any:
        encodings.append(1)
        return encode(*arguments, **named)

    Loop._step, prepare.encode_texts = noted_step, noted_encode  # type: ignore[method-assign]
    return encodings


def _slow_down(seconds: float) -> None:
    from paceline.data.packed_layout import PackedLayout

    collate = PackedLayout.collate

    def late(layout: PackedLayout, *arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return collate(layout, *arguments, **named)

    PackedLayout.collate = late  # type: ignore[method-assign]


def _fill_disk(at: str) -> None:
    import paceline.run.checkpoint.store as store

    room = store.require_room

    def require_room(folder: Path, needed: int, what: str) -> None:
        if what == at:
            raise DiskFullError(f"{folder}: no room for {what}", f"{needed:,} bytes needed, 5 bytes free")
        room(folder, needed, what)

    store.require_room = require_room


def _stop_in(where: str, call: int) -> None:
    if not where:
        return
    original, calls = pkgutil.resolve_name(where), itertools.count(1)

    def signalled(*arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **named)

    pytest.MonkeyPatch().setattr(where, signalled)


def alike(found: Outcome, expected: Outcome, tolerance: float = 1e-6) -> None:
    """Weights and evaluations are equal up to rounding; what is counted is equal."""
    assert found.tensors.keys() == expected.tensors.keys()
    states = torch.stack([tensor.double().norm() for name, tensor in expected.tensors.items() if "optimizer/" in name])
    for name, tensor in expected.tensors.items():
        # states are sums of gradients, and some of these are nothing but what is left where larger ones cancel out
        scale = tensor.double().norm() if name.startswith(("model/", "ema/")) else 10 * states.norm()
        far = (found.tensors[name].double() - tensor.double()).norm() / scale.clamp(min=1e-3)
        assert far <= tolerance, f"{name}: {far:.1e} away, relative to {scale:.1e}"
    for counted in ("step", "applied", "samples", "tokens", "best_step", "order"):
        assert found.progress[counted] == expected.progress[counted], counted
    assert [_counts(e) for e in found.progress["evaluations"]] == [_counts(e) for e in expected.progress["evaluations"]]
    for one, other in zip(found.progress["evaluations"], expected.progress["evaluations"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=tolerance)
    assert found.final.keys() == expected.final.keys()
    for split, metrics in expected.final.items():
        assert found.final[split] == pytest.approx(metrics, rel=tolerance), split


def _counts(evaluation: Mapping[str, Any]) -> Any:
    return [evaluation[name] for name in ("split", "step", "epoch", "samples", "metrics", "confusion")]
