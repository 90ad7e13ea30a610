"""AdamW with 8-bit states as far as a plan needs it: its memory.

Source of the sizes: bitsandbytes 0.49, Optimizer2State.init_state: blocks of 256 numbers share a scale, and what has
fewer than 4,096 numbers keeps 32-bit states. torchao's blocks are of 256 too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

BLOCK, SMALLEST = 256, 4096


@final
class PlannedAdamW8bit(torch.optim.Optimizer):
    """Allocates two states for each parameter at its first update, and computes nothing.

    Args:
        groups: as of every optimizer of torch's.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The first update's allocations; nothing after it."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            for index in (1, 2) if not state else ():
                if parameter.numel() < SMALLEST:
                    state[f"state{index}"] = torch.zeros_like(parameter, dtype=torch.float32)
                else:
                    state[f"state{index}"] = torch.zeros_like(parameter, dtype=torch.uint8)
                    scales = torch.zeros(-(-parameter.numel() // BLOCK), dtype=torch.float32, device=parameter.device)
                    state[f"absmax{index}"] = scales
