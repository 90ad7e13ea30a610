"""Kernels of our own count as what they are."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline.kernels
from paceline.tracing.kinds import ATTENTION, kind_of

KERNELS = Path(paceline.kernels.__file__).parent


def test_kernels_of_short_attention_count_as_attention() -> None:
    tree = ast.parse((KERNELS / "short_attention_kernels.py").read_text(encoding="utf-8"))
    launched = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    assert len(launched) == 3, "one forward, two backward"
    assert {name: kind_of(name) for name in launched} == dict.fromkeys(launched, ATTENTION)
