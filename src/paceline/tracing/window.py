"""A traced window as it lies in a run folder: one trace and one file of facts a rank.

::

    trace/steps-91-100/
      rank0.trace.json.gz   torch.profiler's trace, with the spans in it
      rank0.window.json     what the trace does not say: tokens, peaks, settings
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from paceline.contract.errors import UserError
from paceline.tracing.chrome import Trace, read_trace

FORMAT = 1


class _Facts(BaseModel):
    """Frozen; what a later version adds is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class TracedStep(_Facts):
    """What this rank had to do in a step."""

    step: int
    epoch: int
    samples: int
    tokens: int
    slots: int
    flops: float | None = None


class Recompile(_Facts):
    """The compiler was asked again, and why."""

    step: int
    reason: str = ""


class WindowFacts(_Facts):
    """A rank's window.json."""

    format: Literal[1]
    paceline: str = ""
    torch: str = ""
    kind: Literal["kineto", "nsys"]
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    device: str
    first_step: int
    last_step: int
    graphs: Literal["launched", "replayed", "none"] = "none"
    """``launched``: the run replays graphs, and launched its kernels one by one for the window's sake."""
    steps: tuple[TracedStep, ...] = ()
    peak_flops: float | None = None
    execution: dict[str, Any] = Field(default_factory=dict, validation_alias=AliasChoices("execution", "path"))
    settings: dict[str, Any] = Field(default_factory=dict)
    recompiles: tuple[Recompile, ...] = ()

    @property
    def on_gpu(self) -> bool:
        """Whether the steps were made on a device of its own."""
        return self.device != "cpu"


@dataclass(frozen=True, kw_only=True)
class RankWindow:
    """One rank's part of a window."""

    facts: WindowFacts
    trace: Trace


@dataclass(frozen=True, kw_only=True)
class Window:
    """A window of whole steps, of all ranks of the run, in rank order."""

    folder: Path
    ranks: tuple[RankWindow, ...]

    @property
    def facts(self) -> WindowFacts:
        """The first rank's."""
        return self.ranks[0].facts


def windows_in(run_folder: Path) -> list[Path]:
    """The folders of a run's traced windows, by their first step."""
    folders = (path for path in run_folder.glob("trace/steps-*-*") if path.is_dir())
    return sorted(folders, key=lambda path: [int(part) if part.isdecimal() else 0 for part in path.name.split("-")[1:]])


def read_window(folder: Path) -> Window:
    """All ranks' traces of a window and what stands beside them.

    Raises:
        UserError: no window is there, or one of another version; a rank's files are missing, damaged or cut off; the
            trace is nsys' own.
    """
    first = read_facts(folder / "rank0.window.json")
    if first.kind == "nsys":
        why = "nsys keeps what it saw in a file of its own, which this does not read"
        raise UserError(f"{folder}: no trace to read", why, "open it in Nsight Systems, or trace with --kind kineto")
    ranks = []
    for rank in range(first.world_size):
        path = folder / f"rank{rank}.window.json"
        if rank and not path.exists():
            why = f"the run had {first.world_size} ranks, and only all together say who waited for whom"
            fix = f"copy rank{rank}.window.json and rank{rank}.trace.json.gz from the machine that it ran on"
            raise UserError(f"{folder}: rank {rank} is missing", why, fix)
        facts = read_facts(path) if rank else first
        if (facts.rank, facts.first_step, facts.last_step) != (rank, first.first_step, first.last_step):
            why = f"it is of rank {facts.rank}, steps {facts.first_step} to {facts.last_step}"
            raise UserError(f"{path}: of another window", why, "put the files of one run's window into the folder")
        trace = read_trace(folder / f"rank{rank}.trace.json.gz", operators=not facts.on_gpu)
        _check(folder, facts, trace)
        ranks.append(RankWindow(facts=facts, trace=trace))
    return Window(folder=folder, ranks=tuple(ranks))


def read_facts(path: Path) -> WindowFacts:
    """A rank's window.json.

    Raises:
        UserError: it is missing or damaged, or of another version.
    """
    try:
        plain = json.loads(path.read_bytes())
    except FileNotFoundError:
        why = f"there is no {path.name}" if path.parent.is_dir() else "there is no such folder"
        raise UserError(
            f"{path.parent}: no traced window", why, "give a folder trace/steps-FIRST-LAST of a run"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read", error.strerror or "", "see that you may read it") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: damaged or cut off", "it is no JSON", "trace the window again") from None
    if isinstance(plain, dict) and plain.get("format") != FORMAT:
        why = (
            f"it has format {plain.get('format')!r}, written by paceline {plain.get('paceline', '?')}; known: {FORMAT}"
        )
        raise UserError(f"{path}: of another version", why, "read it with the version that wrote it, or trace again")
    try:
        return WindowFacts.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise UserError(f"{path}: damaged", f"{where}: {first['msg']}", "trace the window again") from None


def _check(folder: Path, facts: WindowFacts, trace: Trace) -> None:
    """Refuse a trace that lacks steps, or what the GPU did in them."""
    there = {span.step for span in trace.spans if span.name == "step"}
    missing = [step for step in range(facts.first_step, facts.last_step + 1) if step not in there]
    if missing:
        what = f"{folder}: rank {facts.rank}'s trace has no step {missing[0]}"
        raise UserError(what, "it was cut off, or is of another window", "trace the window again")
    if facts.on_gpu and not len(trace.work.begin):
        what = f"{folder}: rank {facts.rank}'s trace has no kernels"
        why = f"the profiler saw nothing of {facts.device}: only one tool at a time can look at a GPU"
        raise UserError(what, why, "end other profilers, such as nsys or DCGM's, and trace again")
