"""Memory and energy as the driver tells them, read off a program that stands for nvidia-smi."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.bench.gauge import Gauge

PROGRAM = """#!/bin/sh
echo "$@" > {asked}
for used in 100 700 300; do
  echo "0, $used, {watts}"
  echo "1, 100, 50.0"
  sleep 0.1
done
exec sleep 60
"""


def figures(folder: Path, monkeypatch: pytest.MonkeyPatch, watts: str) -> dict[str, float | None]:
    program = folder / "nvidia-smi"
    program.write_text(PROGRAM.format(asked=folder / "asked", watts=watts))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    with Gauge(["GPU-1", "GPU-2"]) as gauge:
        time.sleep(0.6)
    return gauge.figures()


def test_the_peak_is_above_what_was_in_use_and_energy_is_power_over_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = figures(tmp_path, monkeypatch, "150.0")
    assert found["peak_device_bytes"] == 600 * 2**20, "both GPUs had 200 MiB in use before"
    assert found["energy_joules"] is not None
    assert 200 * 0.15 < found["energy_joules"] < 200 * 5, "200 W over two tenths of a second, or more on a busy machine"
    asked = (tmp_path / "asked").read_text()
    assert "--query-gpu=index,memory.used,power.draw" in asked
    assert "--id=GPU-1,GPU-2" in asked, "of other GPUs nothing is read: they may be at somebody else's work"


def test_a_gpu_without_a_meter_has_no_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures(tmp_path, monkeypatch, "[N/A]")
    assert found == {"peak_device_bytes": 600 * 2**20, "energy_joules": None}


def test_nothing_is_read_where_nothing_is_wanted_or_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for gpus in (["GPU-1"], []):
        with Gauge(gpus) as gauge:
            pass
        assert gauge.figures() == {"peak_device_bytes": None, "energy_joules": None}
