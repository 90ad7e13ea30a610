"""A store that answers in time, or says that it does not.

Torch's client of a TCPStore reads an answer without a deadline, deaf to signals. Where a machine is switched off or a
link is cut nobody closes the connection, and the client would wait until the system gives the connection up: a quarter
of an hour on Linux (tcp_retries2).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

from torch.distributed.distributed_c10d import Store

from paceline.contract.last_resort import IN_TORCH

LAST_SECONDS = 5.0
"""How long an answer may take once something has failed: everybody has waited for the time-out then."""


class Silence(RuntimeError):
    """The store is connected, and says nothing."""


@final
class AnsweringStore:
    """The calls that ranks exchange values with, each with a deadline.

    Args:
        store: of this run.
        timeout_seconds: how long an answer may take.

    Raises:
        Silence: of every call: it has not answered in time.
        RuntimeError: of every call: it is lost.
    """

    def __init__(self, store: Store, timeout_seconds: float) -> None:
        self._store, self._timeout, self._is_lost = store, timeout_seconds, False

    def hurry(self) -> None:
        """From now on, wait for ``LAST_SECONDS`` at most."""
        self._timeout = min(self._timeout, LAST_SECONDS)

    def set(self, key: str, value: str) -> None:
        self._answer(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._answer(self._store.get, key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._answer(self._store.multi_get, keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._answer(self._store.add, key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._answer(self._store.check, keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._answer(self._store.delete_key, key))

    def _answer(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._is_lost:
            raise Silence("it does not answer")
        answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((call(*arguments), None))
            except Exception as error:
                answers.put((None, error))

        # a thread that waits for ever is no hindrance to the end of the process
        thread = threading.Thread(target=ask, name=f"{IN_TORCH}ask", daemon=True)
        thread.start()
        try:
            value, error = answers.get(timeout=self._timeout)
        except queue.Empty:
            self._is_lost = True
            raise Silence(f"no answer within {self._timeout:g} s") from None
        thread.join()
        if error is not None:
            raise error
        return value
