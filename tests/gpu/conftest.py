"""Tests of what only a GPU can show; run with ``pytest tests/gpu`` on a machine that has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and this machine has none"))
