"""Spans as NVTX ranges, for Nsight Systems: in a domain of our own, a category a name, the step as payload.

Source: NVIDIA Tools Extension, NVTX v3; its Python package ``nvtx``. Without a tool that listens the package hands out
a domain that does nothing.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# the package is optional

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, final

from paceline.contract.errors import UserError
from paceline.contract.spans import Sink

DOMAIN = "paceline"

Title = Callable[[str, int | None], str]
"""Name and step of a span -> what stands on its range."""


def plain_title(name: str, step: int | None) -> str:
    """The span's own name: its step is in the payload."""
    return name


@final
class NvtxRanges(Sink):
    """Pushes and pops NVTX ranges.

    Args:
        title: what stands on a range; its category is the span's name in any case.

    Raises:
        UserError: the package ``nvtx`` is not installed.
    """

    def __init__(self, title: Title = plain_title) -> None:
        try:
            import nvtx
        except ImportError:
            fix = "pip install 'paceline[nvtx]'"
            raise UserError("NVTX ranges", "the package nvtx is not installed", fix) from None
        self._title = title
        self._domain: Any = nvtx.get_domain(DOMAIN)
        self._known: Any = threading.local()

    def begin(self, name: str, step: int | None) -> None:
        self._domain.push_range(self._attributes(name, step))

    def end(self, name: str) -> None:
        self._domain.pop_range()

    def mark(self, name: str, step: int | None) -> None:
        self._domain.mark(self._attributes(name, step))

    def _attributes(self, name: str, step: int | None) -> Any:
        """The event's description: one a name and thread, since title and payload are written into it."""
        known, title = vars(self._known), self._title(name, step)
        # a payload cannot be taken out again
        key = name, step is None
        if key not in known:
            known[key] = self._domain.get_event_attributes(message=title, category=name, payload=step)
            return known[key]
        found = known[key]
        if found is None:  # nobody listens
            return None
        if step is not None:
            found.payload = step
        if self._title is not plain_title:
            found.message = self._domain.get_registered_string(title)
        return found


@final
class TorchNvtxRanges(Sink):
    """The same through torch's own binding, in its domain: titles alone, without category and payload."""

    def __init__(self, title: Title = plain_title) -> None:
        from torch.cuda import nvtx

        self._title, self._nvtx = title, nvtx

    def begin(self, name: str, step: int | None) -> None:
        self._nvtx.range_push(self._title(name, step))

    def end(self, name: str) -> None:
        self._nvtx.range_pop()

    def mark(self, name: str, step: int | None) -> None:
        self._nvtx.mark(self._title(name, step))


def nvtx_ranges(title: Title = plain_title) -> Sink:
    """``NvtxRanges``, or ``TorchNvtxRanges`` where the package is missing and torch was built for GPUs.

    Raises:
        UserError: neither is there.
    """
    try:
        return NvtxRanges(title)
    except UserError:
        import torch

        if torch.version.cuda is None:
            raise
        return TorchNvtxRanges(title)
