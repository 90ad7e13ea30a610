"""Spans as NVTX ranges, for Nsight Systems: in a domain of our own, a category a name, the step as payload.

Source: NVIDIA Tools Extension, NVTX v3; its Python package ``nvtx``. Without a tool that listens the package hands out
a domain that does nothing.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# the package is optional

from __future__ import annotations

import threading
from typing import Any, final

from paceline.errors import UserError
from paceline.spans import Sink

DOMAIN = "paceline"


@final
class NvtxRanges(Sink):
    """Pushes and pops NVTX ranges.

    Raises:
        UserError: the package ``nvtx`` is not installed.
    """

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError:
            fix = "pip install 'paceline[nvtx]'"
            raise UserError("NVTX ranges", "the package nvtx is not installed", fix) from None
        self._domain: Any = nvtx.get_domain(DOMAIN)
        self._known: Any = threading.local()

    def begin(self, name: str, step: int | None) -> None:
        self._domain.push_range(self._attributes(name, step))

    def end(self, name: str) -> None:
        self._domain.pop_range()

    def mark(self, name: str, step: int | None) -> None:
        self._domain.mark(self._attributes(name, step))

    def _attributes(self, name: str, step: int | None) -> Any:
        """The event's description: one a name and thread, since the payload is written into it."""
        known = vars(self._known)
        # a payload cannot be taken out again
        key = name, step is None
        if key not in known:
            known[key] = self._domain.get_event_attributes(message=name, category=name, payload=step)
        elif step is not None:
            known[key].payload = step
        return known[key]
