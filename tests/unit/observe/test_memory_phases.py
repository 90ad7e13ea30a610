"""Bytes by span."""

from __future__ import annotations

import threading

from paceline.contract.spans import listening, mark, span
from paceline.observe.memory_phases import MemoryPhases, Phase


class Gpu:
    """Memory that is taken and given back; its peak counts from the last reading on, as that of a GPU does."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def read(self) -> tuple[int, int]:
        peak, self.peak = self.peak, self.now
        return self.now, peak


def test_a_phase_has_its_peak_and_what_it_leaves_behind() -> None:
    gpu = Gpu()
    gpu.take(100)
    phases = MemoryPhases(read=gpu.read)
    with listening(phases):
        for more in (0, 10):
            with span("step"):
                with span("forward"):
                    gpu.take(70 + more)
                    gpu.take(-20)
                mark("captured")
                gpu.take(40)
                gpu.take(-40)
                with span("backward"):
                    gpu.take(5)
                    gpu.take(-55 - more)
    # the first step reaches 190 between its spans, the second 200
    assert phases.found == {
        "forward": Phase(count=2, peak=180, left=110),
        "backward": Phase(count=2, peak=165, left=-110),
        "step": Phase(count=2, peak=200, left=0),
    }


def test_what_another_thread_reads_is_no_peak_lost() -> None:
    gpu = Gpu()
    phases = MemoryPhases(read=gpu.read)

    def other() -> None:
        with span("checkpoint"):
            pass

    thread = threading.Thread(target=other)
    with listening(phases), span("step"):
        gpu.take(30)
        gpu.take(-30)
        thread.start()
        thread.join(10)
    assert phases.found["step"].peak == 30
    assert phases.found["checkpoint"] == Phase(count=1, peak=0, left=0)
