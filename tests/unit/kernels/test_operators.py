"""Operators are there for whoever puts them into a graph, in a process that has imported nothing else."""

from __future__ import annotations

import subprocess
import sys


def test_fusion_brings_the_operators_that_it_puts_into_graphs() -> None:
    code = "import torch, paceline.techniques.fusion; torch.ops.paceline.bias_gelu, torch.ops.paceline.residual_norm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
