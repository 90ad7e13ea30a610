"""The windows of a run: opened and closed at step bounds, on every rank; each leaves ``trace/steps-<first>-<last>``.

Nothing here changes what is learned. The device is waited for where a window opens and closes, and at the bound from
which the steps before it are timed; nowhere else. Threads are named to the operating system, where profilers read them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

import torch

from paceline._version import __version__
from paceline.contract.errors import RunFolderError, UserError
from paceline.contract.files import disk_errors, write_atomically
from paceline.contract.records import Notice
from paceline.contract.spans import mark
from paceline.contract.stopwatch import Stopwatch
from paceline.machine.device import stream_names
from paceline.observe.stream_names import name_streams
from paceline.recipe.windows import StepWindow
from paceline.seams import Capturing, Engine, Ids, World
from paceline.tracing.listeners import Listener
from paceline.tracing.recompiles import Recompiles

LONGEST = 15
"""Bytes that Linux keeps of a thread's name."""


def name_threads() -> None:
    """Give every thread but the main one, whose name is the process's, the name it has in Python.

    Python does so itself from 3.14 on. Where the system has no such file, or refuses it, names stay as they are: they
    are for people who look at a trace, and no run fails of them.
    """
    main = threading.main_thread()
    for thread in threading.enumerate():
        if thread is main or thread.native_id is None:
            continue
        name = thread.name.removeprefix("paceline-").encode()[:LONGEST]
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{thread.native_id}/comm").write_bytes(name)


FORMAT: Final = 1
"""The format of window.json."""

LARGE: Final = 200
"""Steps of torch's profiler from which a trace takes gigabytes of memory: it keeps some thousand events of each."""

MOST_BEFORE: Final = 20
"""Steps before a window that it is compared with, where it is longer."""


@dataclass(frozen=True, kw_only=True)
class StepMeta:
    """What one rank did in a step: its own share of the batch."""

    step: int
    epoch: int
    samples: int
    tokens: int
    slots: int
    flops: float | None
    """Operations of the model's products, computed once forward and backward; None where they are not known."""


Measure = Callable[[int, int, Sequence[Ids]], StepMeta]
"""Step, epoch and this rank's micro-batches -> what the step was."""


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A window that opens at the next step bound, or at this one."""

    eager: contextlib.ExitStack
    seconds_before: float | None
    """A step, as the run goes by itself."""
    graphs: str


@dataclass(kw_only=True)
class _Open:
    """A window that is open."""

    window: StepWindow
    prepared: _Prepared
    trained: float
    """Seconds of training when it opened."""
    recompiles: Recompiles = field(default_factory=Recompiles)
    compiled: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[int, int, Sequence[Ids]]] = field(default_factory=list)
    seconds: float | None = None
    """A step, once nobody listens any more."""


@final
class WindowRecorder:
    """Follows the loop from step bound to step bound.

    Args:
        windows: in order, none of which overlap.
        first_step: the run's steps so far.
        folder: the run's.
        listener: records inside.
        world: the ranks; every one of them has a recorder, and writes files of its own.
        device: what is waited for.
        engine: has its steps run eagerly inside, where it would replay them.
        keeps_graphs: have it replay them all the same.
        measure: what a step was.
        about: what else window.json says: device, rates, path, settings.
        tell: takes what a person should read.
        watch: counts the seconds of training.

    Raises:
        RunFolderError: nothing can be written where the windows' folders belong.
    """

    def __init__(
        self,
        windows: Sequence[StepWindow],
        *,
        first_step: int,
        folder: Path,
        listener: Listener,
        world: World,
        device: torch.device,
        engine: Engine,
        keeps_graphs: bool,
        measure: Measure,
        about: Callable[[], Mapping[str, Any]],
        tell: Callable[[Notice], None],
        watch: Stopwatch,
    ) -> None:
        self._folder, self._listener, self._world, self._device = folder / "trace", listener, world, device
        self._engine, self._keeps_graphs, self._measure, self._about = engine, keeps_graphs, measure, about
        self._tell, self._watch = tell, watch
        self._ahead = [_left(window, first_step) for window in windows if window.last > first_step]
        self._over = [window for window in windows if window.last <= first_step]
        self._cut = [window for window in windows if window.first <= first_step < window.last]
        self._earliest = first_step
        self._open: _Open | None = None
        self._prepared: _Prepared | None = None
        self._timed_from: tuple[int, float] | None = None
        """Number of steps and seconds of training at the bound from which the steps before the next window count."""
        self.written: list[Path] = []
        """Folders of the windows that were recorded."""
        _check_writable(self._folder, f".probe-{world.rank}")

    def announce(self) -> None:
        """Say which steps will be traced, and which no more."""
        for window in self._over:
            self._say(f"trace.steps = {window.asked}: {window.told} were made before; not traced in this start")
        for window in self._cut:
            self._say(f"trace.steps = {window.asked}: began before this start; what is left of it is traced")
        for window in self._ahead:
            self._say(f"{window.told} will be traced ({window.asked}, {self._listener.kind})")
            if len(window) > LARGE and self._listener.kind == "kineto":
                few = f"{window.last - 10}:{window.last}"
                self._say(
                    f"trace.steps = {window.asked}: {len(window):,} steps make a large trace; {few} shows as much",
                    warn=True,
                )
        if self._ahead and self._listener.remark:
            self._say(f"trace.kind = {self._listener.kind}: {self._listener.remark}")

    def before_step(self, step: int) -> bool:
        """At the bound before ``step``; True where it took time that is not the step's."""
        if self._open is not None or not self._ahead:
            return False
        window, took = self._ahead[0], False
        # of the first step nothing can be learned: what is done once is done in it
        timed_from = max(window.first - 1 - min(len(window), MOST_BEFORE), self._earliest + 2)
        if step == timed_from < window.first - 1:
            self._timed_from, took = (step - 1, self._trained()), True
        if step >= window.first - 1 and self._prepared is None:
            self._prepared, took = self._prepare(step), True
        if step == window.first and self._prepared is not None:
            self._begin(self._ahead.pop(0), self._prepared)
            took = True
        return took

    def after_step(self, step: int, epoch: int, microbatches: Sequence[Ids]) -> bool:
        """At the bound after ``step``, which was made of these micro-batches; True where it took time."""
        if self._open is None:
            return False
        self._open.steps.append((step, epoch, microbatches))
        for reason in self._open.recompiles.new():
            self._open.compiled.append({"step": step, "reason": reason})
            mark("recompiled", step=step)
        if step < self._open.window.last:
            return False
        self._end()
        return True

    def stop(self) -> None:
        """Stop listening: no step follows, and what is done first, such as a checkpoint, is no part of a window."""
        if self._open is not None and self._open.seconds is None and self._open.steps:
            self._stop(self._open)

    def finish(self, step: int, why: str) -> None:
        """After the run's last step, or where it stops: an open window's trace is written, what never opened is told.

        Args:
            why: for the message, such as "the run stopped early".
        """
        if self._open is not None:
            whole = self._open.window
            if self._open.steps:
                self._open.window = StepWindow(whole.first, step, whole.asked)
                self._end()
                self._say(f"trace.steps = {whole.asked}: {why} after step {step:,}, before the window's end", warn=True)
            else:
                self._ahead.insert(0, whole)
        self._take_back()
        for window in self._ahead:
            self._say(f"trace.steps = {window.asked}: never opened, {why} after step {step:,}", warn=True)
        self._ahead = []

    def close(self) -> None:
        """Stop listening, and forget a window that is open or about to be: the run has failed."""
        if self._prepared is not None:
            # the engine learns that this is no ordinary end: the other ranks may not be here
            with contextlib.suppress(_Failed), self._prepared.eager:
                raise _Failed
            # the run's own error is the one to tell: a device that is out of order fails again here
            with contextlib.suppress(RuntimeError):
                self._take_back()

    def _take_back(self) -> None:
        """Stop listening, or being about to, without a trace."""
        prepared, self._prepared = self._prepared, None
        is_open, self._open = self._open is not None, None
        if prepared is None:
            return
        if not is_open:
            self._listener.start()  # what is prepared can only be taken back so
        self._listener.stop()
        self._listener.discard()
        prepared.eager.close()

    def _prepare(self, step: int) -> _Prepared:
        """A step ahead where there is one: the first that is eager, or watched, is slower than others."""
        timed_from, self._timed_from = self._timed_from, None
        before = None
        if timed_from is not None:
            num_steps, trained = timed_from
            before = (self._trained() - trained) / (step - 1 - num_steps)
        engine = self._engine
        replays = isinstance(engine, Capturing) and engine.replays
        graphs = "none" if not replays else "replayed" if self._keeps_graphs else "launched"
        eager = contextlib.ExitStack()
        if isinstance(engine, Capturing) and not self._keeps_graphs:
            eager.enter_context(engine.eager())
        self._listener.prepare()
        return _Prepared(eager=eager, seconds_before=before, graphs=graphs)

    def _begin(self, window: StepWindow, prepared: _Prepared) -> None:
        folder = self._folder / window.name
        if self._world.is_first and folder.is_dir():
            with disk_errors(folder):
                shutil.rmtree(folder)  # of an earlier start, perhaps on more ranks
        name_threads()
        name_streams(stream_names())
        self._open = _Open(window=window, prepared=prepared, trained=self._trained())
        self._listener.start()

    def _stop(self, opened: _Open) -> None:
        # the device's last kernels belong to the window
        opened.seconds = (self._trained() - opened.trained) / len(opened.steps)
        self._listener.stop()
        opened.prepared.eager.close()
        self._prepared = None

    def _end(self) -> None:
        opened = self._open
        assert opened is not None
        if opened.seconds is None:
            self._stop(opened)
        self._open = None
        # what follows is timed from here
        self._earliest = opened.window.last
        try:
            folder = self._write(opened)
        except UserError as error:  # a full disk: the run goes on, and its checkpoints say whether it can
            self._listener.discard()
            self._say(f"the trace of {opened.window.told} is lost: {error}", warn=True)
        else:
            self.written.append(folder)
            self._say(_cost(opened, folder))

    def _write(self, opened: _Open) -> Path:
        folder, rank = self._folder / opened.window.name, self._world.rank
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._listener.save(folder / f"rank{rank}")
        text = json.dumps(self._meta(opened), indent=1)
        write_atomically(folder / f"rank{rank}.window.json", f"{text}\n".encode())
        return folder

    def _meta(self, opened: _Open) -> dict[str, Any]:
        """What the trace does not say."""
        rank, size = self._world.rank, self._world.size
        return {
            "format": FORMAT,
            "paceline": __version__,
            "torch": str(torch.__version__),
            "kind": self._listener.kind,
            "rank": rank,
            "world_size": size,
            "first_step": opened.window.first,
            "last_step": opened.window.last,
            "asked": opened.window.asked,
            "graphs": opened.prepared.graphs,
            "step_seconds": opened.seconds,
            "step_seconds_before": opened.prepared.seconds_before,
            "steps": [asdict(self._measure(*one)) for one in opened.steps],
            "recompiles": opened.compiled,
            **self._about(),
        }

    def _trained(self) -> float:
        """Seconds of training so far, the device's included: it is waited for."""
        with self._watch.phase("train"):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        return self._watch.seconds().get("train", 0.0)

    def _say(self, message: str, *, warn: bool = False) -> None:
        self._tell(Notice(message=message, level="warning" if warn else "info"))


class _Failed(Exception):
    """Stands for the run's own error."""


def _left(window: StepWindow, first_step: int) -> StepWindow:
    """What is left of a window after the run's first steps."""
    return StepWindow(max(window.first, first_step + 1), window.last, window.asked)


def _cost(opened: _Open, folder: Path) -> str:
    assert opened.seconds is not None
    before = opened.prepared.seconds_before
    told = f"traced {opened.window.told} into {folder.parent.name}/{folder.name}: {1000 * opened.seconds:.1f} ms a step"
    if before is None:
        return told
    by_hand = "eager, where they are replayed otherwise, and "
    eager = by_hand if opened.prepared.graphs == "launched" else ""
    return f"{told}, {1000 * before:.1f} ms before it; steps of a window are {eager}watched"


def _check_writable(folder: Path, name: str) -> None:
    """Refuse before training what would be refused at the window's end; leaves nothing behind."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder}: is no folder", "traces go there", "move it away")
    probe = (folder if folder.is_dir() else folder.parent) / name
    with disk_errors(probe):
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
