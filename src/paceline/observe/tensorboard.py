"""Curves for TensorBoard, an optional extra."""

from __future__ import annotations

import os
import socket
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, final

from paceline.contract.errors import RecipeError
from paceline.contract.files import disk_errors
from paceline.contract.records import EvaluationRecord, Notice, Observer, Record, RunStarted, StepRecord


def require_tensorboard() -> None:
    """Refuse early, before data and model are loaded, when TensorBoard is not installed.

    Raises:
        RecipeError: with the command that installs it.
    """
    if find_spec("tensorboard") is None:
        raise RecipeError(
            "observe.tensorboard = true",
            "the package tensorboard is not installed",
            "pip install 'paceline[tensorboard]', or --set observe.tensorboard=false",
        )


@final
class TensorBoard(Observer):
    """Writes an event file into ``folder``.

    The caller writes: torch's ``SummaryWriter`` has a thread for it, where a full disk ends in a traceback.

    Args:
        folder: where the event files go; a resumed run gives the same folder again.
        first_step: 0, or the step that the run resumes after; what was written about later steps is purged.

    Raises:
        RecipeError: TensorBoard is not installed.
        DiskFullError: no room.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        require_tensorboard()
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._folder = folder
        self._group_names: tuple[str, ...] = ()
        with disk_errors(folder):
            self._file = _event_file(folder)
            self._event(file_version="brain.Event:2")
            if first_step:
                self._event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START))
            self._file.flush()

    def observe(self, record: Record) -> None:
        from torch.utils.tensorboard.summary import text

        with disk_errors(self._folder):
            match record:
                case RunStarted():
                    self._group_names = record.group_names
                case StepRecord():
                    self._step(record)
                case EvaluationRecord():
                    values = {"loss": record.loss, **record.metrics}
                    self._scalars({f"{record.split}/{name}": value for name, value in values.items()}, record.step)
                    for of, scores in record.scores.items():
                        both = {f"{record.split}/{name} of {of}": value for name, value in scores.items()}
                        self._scalars(both, record.step)
                    train = {f"train/{name} at evaluation": value for name, value in record.train_metrics.items()}
                    self._scalars(train, record.step)
                    self._file.flush()
                case Notice():
                    # indented: Markdown shows it as it is
                    self._event(summary=text("notices", f"    {record.level}: {record.message}"))

    def close(self) -> None:
        with disk_errors(self._folder):
            self._file.close()

    def _step(self, record: StepRecord) -> None:
        values = {"train/loss": record.loss, "train/gradient norm": record.gradient_norm}
        names = self._group_names or tuple(str(index) for index in range(len(record.learning_rates)))
        values |= {f"learning rate/{name}": lr for name, lr in zip(names, record.learning_rates, strict=True)}
        if record.seconds > 0:
            values["speed/samples per second"] = record.samples / record.seconds
            values["speed/tokens per second"] = record.tokens / record.seconds
        if record.slots:
            values["speed/padding share"] = 1 - record.tokens / record.slots
        if record.peak_bytes is not None:
            values["memory/peak GiB"] = record.peak_bytes / 2**30
        if record.loss_scale is not None:
            values["fp16/loss scale"] = record.loss_scale
        if record.zero_share is not None and not record.skipped:
            values["fp16/gradients that are 0"] = record.zero_share
        self._scalars(values, record.step)

    def _scalars(self, values: dict[str, float], step: int) -> None:
        from torch.utils.tensorboard.summary import scalar

        for name, value in values.items():
            self._event(step=step, summary=scalar(name, value))

    def _event(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        RecordWriter(self._file).write(Event(wall_time=time.time(), **fields).SerializeToString())


def _event_file(folder: Path) -> BinaryIO:
    """A file that TensorBoard looks for, after all those before it: it reads them in the order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}").open("xb")
