"""What torch compiled anew, step by step: the compiler's own records, read where it is loaded at all."""

from __future__ import annotations

import sys
from typing import Any, final


@final
class Recompiles:
    """Counts the compiler's work since it was asked last; costs nothing where nothing was ever compiled."""

    def __init__(self) -> None:
        self._seen = self._last()

    def new(self) -> list[str]:
        """Why something was compiled since the last call, one reason a compilation."""
        records = _records()
        found: list[str] = []
        for record in reversed(records):
            if record is self._seen:
                break
            found.append(_reason(record))
        self._seen = records[-1] if records else None
        return found[::-1]

    @staticmethod
    def _last() -> Any:
        records = _records()
        return records[-1] if records else None


def _records() -> list[Any]:
    """The compiler's last 64 compilations, in order."""
    # not imported here: that takes seconds
    compiler = sys.modules.get("torch._dynamo.utils")
    return list(compiler.get_compilation_metrics()) if compiler is not None else []


def _reason(record: Any) -> str:
    why = (
        getattr(record, "recompile_reason", None)
        or getattr(record, "fail_reason", None)
        or "compiled for the first time"
    )
    name = getattr(record, "co_name", None)
    first = str(why).strip().partition("\n")[0]
    return f"{name}: {first}" if name else first
