"""``paceline calibrate`` on a GPU: constants of the size that GPUs have, and plans use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.machine.facts import this_machine
from paceline.memory import calibrate as module
from paceline.memory.calibrate import calibrate
from paceline.memory.constants import constants_for

MIB = 2**20


def test_what_is_measured_is_what_plans_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    # other tests are on this GPU, so that what the driver counts is not looked at
    monkeypatch.setattr(module, "taken_by_others", lambda gpu: 0)
    here = this_machine()
    found = calibrate(here, progress=lambda _: None)
    assert found.gpu == torch.cuda.get_device_name()
    assert constants_for(here.gpus[0]).source.startswith("measured by paceline calibrate")
    assert all(MIB <= size <= 128 * MIB for size in found.constants.workspaces)
    assert 1 <= len(found.constants.workspaces) <= 2
    assert found.constants.context > 100 * MIB
    assert found.flops_per_second > 1e12
