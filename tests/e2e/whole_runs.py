"""Whole runs that are stopped, killed and compared."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.records import RunRecord
from paceline.engine import torch_engine
from paceline.engine.step import Step
from paceline.optim.gradients import FlatGradients
from paceline.recipe import Recipe
from paceline.run.checkpoint.store import CheckpointStore
from paceline.seams import StepInput

STEPS = 12
"""Of ``recipe``: 2.4 epochs of five steps, the last of them of 6 samples, in micro-batches of 4."""

Steps = list[tuple[int, int, tuple[int, ...]]]


class Crashed(Exception):
    """Stands for whatever ends a process without a word."""


def recipe(model: Path, data: Path, /, **changes: Any) -> Recipe:
    """Twelve steps with dropout, warm-up, accumulation, an evaluation an epoch and the best weights kept."""
    base: dict[str, Any] = {
        "model": {"source": str(model)},
        "data": {"source": str(data), "splits": {"validation": 0.15, "test": 0.15}},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup": 3},
        "loop": {"epochs": 3, "max_steps": STEPS, "batch_size": 9, "micro_batch_size": 4},
        "device": "cpu",
        "observe": {"console": "off", "report": False},
    }
    for key, value in changes.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return Recipe.parse(base)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that a run leaves, but for times."""

    model: bytes
    tensors: dict[str, torch.Tensor]
    engine: dict[str, Any]
    progress: dict[str, Any]
    final: dict[str, Any]
    summary: dict[str, Any]
    lines: list[dict[str, Any]]


def outcome(record: RunRecord) -> Outcome:
    """What is in the folder of a finished run."""
    folder = Path(record.folder)
    last = CheckpointStore(folder / "checkpoints", 1).newest()
    stems = sorted(path.stem for path in last.folder.glob("*.safetensors"))
    named = {f"{stem}/{name}": tensor for stem in stems for name, tensor in last.tensors(stem).items()}
    summary = json.loads((folder / "summary.json").read_bytes())
    timed = (
        "seconds",
        "overlapped_seconds",
        "first_update_seconds",
        "samples_per_second",
        "tokens_per_second",
        "folder",
        "decisions",
        "notices",
    )
    return Outcome(
        model=next((folder / "model").glob("*.safetensors")).read_bytes(),
        tensors=named,
        engine=dict(last.state["engine"]),
        progress=_without_times(last.state["progress"]),
        final={split: dict(found) for split, found in record.final.items()},
        summary=_without_times({key: value for key, value in summary.items() if key not in timed}),
        lines=lines(folder, "step", "evaluation"),
    )


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Bit for bit."""
    assert found.tensors.keys() == expected.tensors.keys()
    other = [name for name, tensor in expected.tensors.items() if not torch.equal(tensor, found.tensors[name])]
    assert not other, f"{len(other)} tensors of the last checkpoint differ, such as {other[:3]}"
    assert found.model == expected.model, "the saved model differs"
    for field in ("engine", "progress", "final", "summary", "lines"):
        assert getattr(found, field) == getattr(expected, field), f"{field} differs"


def lines(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of some kinds, without times."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [_without_times(line) for line in read if line["kind"] in kinds]


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(inner) for key, inner in value.items() if key != "seconds"}
    return [_without_times(inner) for inner in value] if isinstance(value, list | tuple) else value


class Disturb:
    """Sends signals or raises in the middle of a step: after the first micro-batch of step ``at``, counted from 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signals: dict[int, signal.Signals] = {}
        self.crash_at: int | None = None
        self._micro = Step.micro
        self._accumulate = torch_engine.TorchEngine.accumulate
        self._step = 0
        self._is_first = True
        disturb = self

        def accumulate(engine: Any, given: StepInput) -> Any:
            disturb._step, disturb._is_first = given.step + 1, True
            return disturb._accumulate(engine, given)

        monkeypatch.setattr(torch_engine.TorchEngine, "accumulate", accumulate)
        monkeypatch.setattr(Step, "micro", lambda *given: disturb._after(self._micro, *given))
        add = FlatGradients.add  # of engines that make their passes in another order
        monkeypatch.setattr(FlatGradients, "add", lambda *given, **named: disturb._after(add, *given, **named))

    def _after(self, made: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = made(*arguments, **named)
        if self._is_first:
            self._is_first = False
            if self._step in self.signals:
                os.kill(os.getpid(), self.signals.pop(self._step))
            if self._step == self.crash_at:
                self.crash_at = None
                raise Crashed
        return result
