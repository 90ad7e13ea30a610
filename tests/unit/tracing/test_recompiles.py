"""What was compiled in a step, from the compiler's own records."""

from __future__ import annotations

import torch

from paceline.tracing.recompiles import Recompiles


def test_each_new_shape_is_told_once() -> None:
    torch._dynamo.reset()
    twice = torch.compile(lambda x: x * 2 + 1, backend="eager", dynamic=False)
    twice(torch.ones(2))
    seen = Recompiles()
    twice(torch.ones(2))
    assert seen.new() == []
    twice(torch.ones(3))
    (reason,) = seen.new()
    assert "size" in reason, reason
    assert seen.new() == []
    other = torch.compile(lambda x: x - 1, backend="eager")
    other(torch.ones(2))
    (first,) = seen.new()
    assert first.endswith("compiled for the first time"), first
    torch._dynamo.reset()
