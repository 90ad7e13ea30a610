"""Chrome traces as torch.profiler writes them: an event at a time, and only what a budget needs of each.

A trace may be hundreds of megabytes of JSON. Its events are decoded one after the other and let go of, so that 170 MB
take four seconds and twice as much memory.

Sources: Trace Event Format (the document of the Chromium project); Kineto, output_json.cpp: the categories of events,
times in microseconds, and ``correlation``, by which a kernel is known to its launch. All kernels of a graph's replay
have the correlation of its cudaGraphLaunch.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import UserError, excerpt

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SPAN = "paceline: "
"""What the names of our own annotations begin with."""

LAUNCHES = ("cuda_runtime", "cuda_driver")
WORK = ("kernel", "gpu_memcpy", "gpu_memset")

_STEP = re.compile(r"(.+) (\d{1,18})")
_BETWEEN = re.compile(r"[\s,]*")
_COMPILED = "(dynamo_timed)"
_AGAIN = "trace the window again: paceline trace"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span of the thread that makes the steps; times in seconds."""

    name: str
    step: int | None
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """Things that take a while, in the order of their beginnings; times in seconds, all of one length."""

    begin: Floats
    end: Floats
    name: Ints
    """Places in ``Trace.names``."""


@dataclass(frozen=True, kw_only=True)
class Work(Stretches):
    """What the device did: kernels, copies, fills."""

    launched: Floats
    """When the host asked for it; its own beginning where that is not known."""
    stream: Ints
    replay: Ints
    """Number of the graph's replay that it was part of; -1: it was launched by itself."""


@dataclass(frozen=True, kw_only=True)
class Operators(Stretches):
    """What the host did, operator by operator; they nest within a thread. Read of runs on a CPU alone."""

    thread: Ints


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a budget needs of one rank's trace; times count from the beginning of its first span."""

    spans: tuple[Span, ...]
    """In the order of their beginnings; an outer one before those inside."""
    work: Work
    operators: Operators
    compiling: tuple[Floats, Floats]
    """Beginnings and ends of what torch's compiler did in the thread of the steps; they may nest."""
    names: tuple[str, ...]
    """Names of kernels, copies and operators."""


def read_trace(path: Path, *, operators: bool) -> Trace:
    """The trace in a gzipped JSON file.

    Args:
        operators: also read what the host did, operator by operator.

    Raises:
        UserError: no such file; it is not gzip or not JSON, or cut off; it has no span of ours around a step.
    """
    found = _Found(operators)
    for event in _events(path):
        try:
            found.take(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            problem = f"an event is not what torch.profiler writes: {excerpt(json.dumps(event))}"
            raise UserError(f"{path}: damaged", problem, _AGAIN) from None
    return found.trace(path)


@final
class _Found:
    """Columns of the events so far; times in microseconds."""

    def __init__(self, operators: bool) -> None:
        self._operators = operators
        self._names: dict[str, int] = {}
        self._spans: list[tuple[int, str, int | None, float, float]] = []
        self._work: list[tuple[float, float, int, int, int]] = []
        self._launches: list[tuple[int, float, bool]] = []
        self._host: list[tuple[float, float, int, int]] = []
        self._compiled: list[tuple[int, float, float]] = []

    def take(self, event: dict[str, Any]) -> None:
        kind = event.get("cat")
        if event.get("ph") != "X" or not isinstance(kind, str):
            return
        if kind in WORK:
            arguments = event["args"]
            begin = float(event["ts"])
            # a copy's stream is its thread in some versions
            stream = int(arguments.get("stream", event.get("tid", 0)))
            correlation = int(arguments.get("correlation", 0))
            self._work.append((begin, begin + float(event["dur"]), self._place(event["name"]), stream, correlation))
        elif kind in LAUNCHES:
            correlation = int(event["args"].get("correlation", 0))
            self._launches.append((correlation, float(event["ts"]), "GraphLaunch" in event["name"]))
        elif kind == "user_annotation" and event["name"].startswith(SPAN):
            begin, name = float(event["ts"]), event["name"][len(SPAN) :]
            numbered = _STEP.fullmatch(name)
            plain, step = (numbered[1], int(numbered[2])) if numbered else (name, None)
            self._spans.append((int(event["tid"]), plain, step, begin, begin + float(event["dur"])))
        elif kind == "cpu_op":
            begin = float(event["ts"])
            end = begin + float(event["dur"])
            if event["name"].endswith(_COMPILED):
                self._compiled.append((int(event["tid"]), begin, end))
            elif self._operators:
                self._host.append((begin, end, self._place(event["name"]), int(event["tid"])))

    def _place(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def trace(self, path: Path) -> Trace:
        threads = [thread for thread, name, *_ in self._spans if name == "step"]
        if not threads:
            why = "no span of paceline's stands around a step in it"
            fix = "trace with paceline trace; in a loop of your own, with span('step', step=n) around each step"
            raise UserError(f"{path}: nothing to reckon by", why, fix)
        main = max(set(threads), key=threads.count)
        own = sorted((span for span in self._spans if span[0] == main), key=lambda span: (span[3], -span[4]))
        zero = own[0][3]
        spans = tuple(
            Span(name=name, step=step, begin=(begin - zero) * 1e-6, end=(end - zero) * 1e-6)
            for _, name, step, begin, end in own
        )
        compiled = np.array([times for thread, *times in self._compiled if thread == main]).reshape(-1, 2)
        return Trace(
            spans=spans,
            work=self._device_work(zero),
            operators=self._host_operators(zero),
            compiling=(_seconds(compiled[:, 0], zero), _seconds(compiled[:, 1], zero)),
            names=tuple(self._names),
        )

    def _device_work(self, zero: float) -> Work:
        table = np.array(sorted(self._work), dtype=np.float64).reshape(-1, 5)
        begin, correlation = table[:, 0], table[:, 4]
        launches = np.array(sorted(self._launches), dtype=np.float64).reshape(-1, 3)
        launched, replay = begin.copy(), np.full(len(begin), -1, dtype=np.int64)
        if len(launches):
            at = np.minimum(np.searchsorted(launches[:, 0], correlation), len(launches) - 1)
            known = (launches[at, 0] == correlation) & (correlation > 0)
            # never after it began: the two clocks agree to a microsecond
            launched[known] = np.minimum(launches[at, 1], begin)[known]
            replayed = known & (launches[at, 2] > 0)
            replay[replayed] = at[replayed]
        return Work(
            begin=_seconds(begin, zero),
            end=_seconds(table[:, 1], zero),
            launched=_seconds(launched, zero),
            name=table[:, 2].astype(np.int64),
            stream=table[:, 3].astype(np.int64),
            replay=replay,
        )

    def _host_operators(self, zero: float) -> Operators:
        # an outer one before those inside
        ordered = sorted(self._host, key=lambda each: (each[3], each[0], -each[1]))
        table = np.array(ordered, dtype=np.float64).reshape(-1, 4)
        return Operators(
            begin=_seconds(table[:, 0], zero),
            end=_seconds(table[:, 1], zero),
            name=table[:, 2].astype(np.int64),
            thread=table[:, 3].astype(np.int64),
        )


def sums(codes: Ints, weights: Floats, size: int) -> Floats:
    """The sum of the weights of each code below ``size``, [size]."""
    return np.bincount(codes, weights=weights, minlength=size).astype(np.float64)


def _seconds(microseconds: Floats, zero: float) -> Floats:
    return (microseconds - zero) * 1e-6


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in the list ``traceEvents`` of the file's one object."""
    text, decoder, at = _text(path), json.JSONDecoder(strict=False), 0
    try:
        at = _after(text, 0, "{")
        while text[at : at + 1] != "}":
            key, at = decoder.raw_decode(text, at)
            at = _after(text, at, ":")
            if key != "traceEvents":
                _, at = decoder.raw_decode(text, at)
            else:
                at = _after(text, at, "[")
                while text[at : at + 1] != "]":
                    event, at = decoder.raw_decode(text, at)
                    if isinstance(event, dict):
                        yield event
                    at = _next(text, at)
                at += 1
            at = _next(text, at)
    except (ValueError, RecursionError):
        is_whole = at < len(text) - 1 and text.rstrip().endswith("}")
        why = "it is no JSON" if is_whole or not at else "it ends in the middle: the run was killed while it wrote it"
        raise UserError(f"{path}: damaged or cut off", why, _AGAIN) from None


def _next(text: str, at: int) -> int:
    """Where the next thing in a list or an object begins."""
    between = _BETWEEN.match(text, at)
    return between.end() if between else at


def _after(text: str, at: int, sign: str) -> int:
    at = _next(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"no {sign}")
    return _next(text, at + 1)


def _text(path: Path) -> str:
    try:
        with gzip.open(path) as file:
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        raise UserError(f"{path}: missing", "the window's trace was not written", _AGAIN) from None
    except gzip.BadGzipFile:
        raise UserError(f"{path}: damaged", "it is not gzip", _AGAIN) from None
    except (EOFError, zlib.error):
        why = "it ends in the middle: the run was killed while it wrote it, or the copy is not whole"
        raise UserError(f"{path}: cut off", why, _AGAIN) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read", error.strerror or "", "see that you may read it") from None
