"""Runners of a step's functions: kernel by kernel, or, in ``capture``, as CUDA graphs that are replayed."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

from torch import Tensor


class Runner(ABC):
    """Runs functions of pytrees of tensors."""

    @abstractmethod
    def run(self, function: Callable[..., Any], inputs: Sequence[Any], *options: Hashable, capture: bool = True) -> Any:
        """``function(*inputs, *options)``; ``inputs`` are pytrees of tensors, ``options`` part of what is captured.

        Args:
            capture: False: it runs eagerly, whatever has been captured.
        """

    @abstractmethod
    def scalar(self, value: float) -> Tensor | float:
        """A number that differs from call to call, in the form that ``run`` takes it in."""

    @abstractmethod
    def run_eagerly(self, function: Callable[[], Any]) -> Any:
        """Run a function kernel by kernel, on the stream and in the memory of those that are captured."""

    @abstractmethod
    def probe(self, function: Callable[[], Any]) -> None:
        """Run a function whose results nobody needs, to find out whether it can be captured."""

    @abstractmethod
    def prepare(self, function: Callable[..., Any], inputs: Sequence[Any], *options: Hashable) -> None:
        """Be ready to ``run`` with these shapes, without running. The largest first: smaller ones reuse its memory."""

    @abstractmethod
    def eager(self) -> contextlib.AbstractContextManager[None]:
        """Inside, everything runs eagerly, for who watches the host; what is captured stays for later."""

    @property
    @abstractmethod
    def replays(self) -> bool:
        """Whether anything is captured, so that steps are replayed."""

    @property
    @abstractmethod
    def execution(self) -> str:
        """What became of it, for people: what is captured, or why nothing is."""

    @abstractmethod
    def close(self) -> None:
        """Release graphs and their memory."""


@final
class Eager(Runner):
    """Every kernel launched by the host, every time.

    Args:
        reason: why, for the summary.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def run(self, function: Callable[..., Any], inputs: Sequence[Any], *options: Hashable, capture: bool = True) -> Any:
        return function(*inputs, *options)

    def scalar(self, value: float) -> Tensor | float:
        return value

    def run_eagerly(self, function: Callable[[], Any]) -> Any:
        return function()

    def probe(self, function: Callable[[], Any]) -> None:
        pass

    def prepare(self, function: Callable[..., Any], inputs: Sequence[Any], *options: Hashable) -> None:
        pass

    def eager(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @property
    def replays(self) -> bool:
        return False

    @property
    def execution(self) -> str:
        return f"eager: {self._reason}"

    def close(self) -> None:
        pass
