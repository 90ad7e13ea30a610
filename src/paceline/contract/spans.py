"""Spans: stretches of a run with a name, for whoever listens: profilers, timers.

    with span("forward", step=12):
        ...

Where nothing listens a span costs a fraction of a microsecond, so it may stand around every part of a step. A sink
hears of spans from the thread that they are in, in order and nested. An error remembers the spans that it came out of.
This module loads nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, final

from paceline.contract.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

NAMES = (
    *("epoch", "step", "data wait", "copy", "forward", "backward", "communicate", "clip", "update"),
    *("evaluate", "checkpoint"),
)
"""What a run of paceline itself is cut into; a user's loop may add any other."""


class Sink(ABC):
    """Hears of spans."""

    @abstractmethod
    def begin(self, name: str, step: int | None) -> None:
        """A span begins in this thread, inside those that have begun and not ended."""

    @abstractmethod
    def end(self, name: str) -> None:
        """The innermost span of this thread ends."""

    @abstractmethod
    def mark(self, name: str, step: int | None) -> None:
        """Something has happened at this moment."""


_sinks: tuple[Sink, ...] = ()
_changing = threading.Lock()


@contextlib.contextmanager
def listening(sink: Sink) -> Iterator[None]:
    """``sink`` hears of every span that begins inside, in whichever thread, and of its end, also if that is later."""
    global _sinks
    with _changing:
        _sinks = (*_sinks, sink)
    try:
        yield
    finally:
        with _changing:
            # the last of them: a sink may listen twice
            at = len(_sinks) - 1 - _sinks[::-1].index(sink)
            _sinks = (*_sinks[:at], *_sinks[at + 1 :])


@final
class span:
    """A stretch of a run: a context manager, and a decorator of functions.

    Args:
        name: one of ``NAMES``, or any other.
        step: the update that it belongs to, from 1; None where there is none.

    Example:
        >>> with span("forward", step=12):
        ...     pass
        >>> @span("augment")
        ... def augment(image):
        ...     return image
    """

    __slots__ = ("_heard", "_name", "_step")

    def __init__(self, name: str, *, step: int | None = None) -> None:
        self._name, self._step = name, step
        self._heard: tuple[Sink, ...] = ()

    def __enter__(self) -> None:
        # who heard the beginning hears the end
        self._heard = heard = _sinks
        for sink in heard:
            sink.begin(self._name, self._step)

    def __exit__(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        if error is not None:
            _came_out(error, self._name)
        for sink in reversed(self._heard):
            sink.end(self._name)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        name, step = self._name, self._step

        @functools.wraps(function)
        def spanned(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name, step=step):
                return function(*args, **kwargs)

        return spanned


@final
class activity(contextlib.ContextDecorator):
    """What is going on, for errors alone: a context manager and a decorator, as ``span``, of which no sink hears.

    Args:
        name: unlike that of any span.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            _came_out(error, self._name)


def came_out_of(error: BaseException) -> tuple[str, ...]:
    """Names of the spans and activities that an error came out of, the innermost first."""
    return tuple(vars(error).get(_LEFT, ()))


_LEFT = "paceline_spans"
"""Where an error keeps them."""


def _came_out(error: BaseException, name: str) -> None:
    vars(error).setdefault(_LEFT, []).append(name)


_open: Any = threading.local()


def push(name: str, *, step: int | None = None) -> None:
    """Begin a span that ``pop`` ends, where a ``with`` does not fit."""
    begun = span(name, step=step)
    begun.__enter__()
    vars(_open).setdefault("spans", []).append(begun)


def pop() -> None:
    """End the span that this thread pushed last.

    Raises:
        UserError: it has pushed none that is open.
    """
    spans = vars(_open).get("spans")
    if not spans:
        raise UserError("spans.pop()", "this thread has pushed no span that is still open", "push one before")
    spans.pop().__exit__()


def mark(name: str, *, step: int | None = None) -> None:
    """Tell that something has happened: a checkpoint is on the disk, a shape was captured."""
    for sink in _sinks:
        sink.mark(name, step)
