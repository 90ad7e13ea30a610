"""What the driver says of a cell's GPUs while it runs: memory in use by whomever, and energy; by nvidia-smi."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, Self

EVERY_MILLISECONDS = 200
"""Between two readings; a peak that is shorter may be missed."""


class Gauge:
    """Reads from ``__enter__`` to ``__exit__``; without nvidia-smi it knows nothing.

    Args:
        gpus: UUIDs of those that are read: others may be at somebody else's work. None of them: read nothing.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = tuple(gpus)
        self._program = shutil.which("nvidia-smi") if gpus else None
        # moment, MiB in use and watts of every round, over these GPUs
        self._readings: list[tuple[float, float, float]] = []

    def __enter__(self) -> Self:
        self._process: subprocess.Popen[str] | None = None
        if self._program is not None:
            query = ["--query-gpu=index,memory.used,power.draw", "--format=csv,noheader,nounits"]
            command = [self._program, *query, f"--id={','.join(self._gpus)}", f"--loop-ms={EVERY_MILLISECONDS}"]
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=null, stdin=null, text=True, errors="replace"
            )
            self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()

    def figures(self) -> dict[str, Any]:
        """``peak_device_bytes``, above what was in use at the beginning, and ``energy_joules``; of these GPUs together.

        None where there are no two readings, or the GPU does not tell.
        """
        rounds = self._readings
        if len(rounds) < 2:
            return {"peak_device_bytes": None, "energy_joules": None}
        joules = sum((b[0] - a[0]) * (a[2] + b[2]) / 2 for a, b in itertools.pairwise(rounds))
        mebibytes = max(used for _, used, _ in rounds) - rounds[0][1]
        return {
            "peak_device_bytes": round(mebibytes * 2**20),
            "energy_joules": round(joules, 1) if joules == joules else None,  # a driver without a meter says N/A
        }

    def _read(self, lines: IO[str] | None) -> None:
        assert lines is not None
        begun: dict[str, tuple[float, float, float]] = {}
        with lines:
            for line in lines:
                parts = [part.strip() for part in line.split(",")]
                with contextlib.suppress(ValueError):
                    index, used, watts = parts
                    if index in begun:  # the first GPU again: the round before is whole
                        self._close(begun)
                    begun[index] = time.monotonic(), float(used), float(watts) if watts[:1].isdigit() else float("nan")
        self._close(begun)

    def _close(self, begun: dict[str, tuple[float, float, float]]) -> None:
        if begun:
            moments, used, watts = zip(*begun.values(), strict=True)
            self._readings.append((min(moments), sum(used), sum(watts)))
            begun.clear()
