"""AdamW whose states take 8 or 4 bits a number: by a library, or, as far as a plan needs it, by its memory alone.

Which library has which is ``recipe.parts.optimizer.LOW_BIT``. The update is the library's own.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022; Li et al., Memory Efficient Optimizers
with 4-bit States, NeurIPS 2023. Sizes are those of bitsandbytes 0.49, Optimizer2State.init_state, and of torchao 0.18,
optim/subclass_*.py: a scale in fp32 for each block of 256 numbers, of 128 with 4 bits. What has fewer than 4,096
numbers keeps its states whole.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, final

import torch

from paceline.contract.errors import RecipeError
from paceline.machine.device import PLANNED
from paceline.recipe.parts import OptimizerPart
from paceline.recipe.parts.optimizer import LOW_BIT

CLASSES: Final = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}
"""``optimizer.type`` -> what both libraries call it, in their module ``optim``."""

SMALLEST: Final = 4096
"""Numbers of a parameter from which its states are narrow."""


def low_bit_optimizer(settings: list[dict[str, Any]], part: OptimizerPart) -> torch.optim.Optimizer:
    """AdamW with narrow states, of the library that ``optimizer.low_bit`` names, else the first that has it.

    Args:
        settings: groups of parameters as of every optimizer of torch's.
        part: with a ``type`` of ``LOW_BIT``.

    Raises:
        RecipeError: the library is not installed, or is too old to have it.
    """
    if settings[0]["params"][0].device.type == PLANNED:
        return PlannedLowBit(settings, bits=4 if part.type == "adamw4bit" else 8)
    libraries = LOW_BIT[part.type] if part.low_bit == "auto" else (part.low_bit,)
    for library in libraries:
        try:
            kind = getattr(importlib.import_module(f"{library}.optim"), CLASSES[part.type])
        except (ImportError, AttributeError):
            continue
        return kind(settings, lr=part.lr, betas=part.betas, eps=part.eps)  # type: ignore[no-any-return]
    neither = "neither is" if len(libraries) > 1 else "it is not"
    raise RecipeError(
        f"optimizer.type = {part.type}",
        f"needs {' or '.join(libraries)}, and {neither} installed, or too old to have it",
        f"pip install 'paceline[{libraries[0]}]'",
    )


def library_of(optimizer: torch.optim.Optimizer) -> Mapping[str, str]:
    """Which library carries out the updates, for ``execution`` in the summary; empty where it is torch itself."""
    name = type(optimizer).__module__.partition(".")[0]
    if name not in {library for libraries in LOW_BIT.values() for library in libraries}:
        return {}
    try:
        release = f" {version(name)}"
    except PackageNotFoundError:
        release = ""
    return {"optimizer": f"{type(optimizer).__name__} of {name}{release}"}


@final
class PlannedLowBit(torch.optim.Optimizer):
    """Allocates two states for each parameter at its first update, and computes nothing.

    Args:
        groups: as of every optimizer of torch's.
        bits: of a state's number, 8 or 4.
    """

    def __init__(self, groups: list[dict[str, Any]], bits: int) -> None:
        super().__init__(groups, {})
        self._bits = bits

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """The first update's allocations; nothing after it."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            for index in (1, 2) if not state else ():
                if parameter.numel() < SMALLEST:
                    state[f"state{index}"] = torch.zeros_like(parameter, dtype=torch.float32)
                    continue
                device, block = parameter.device, 128 if self._bits == 4 else 256
                codes = -(-parameter.numel() * self._bits // 8)
                state[f"state{index}"] = torch.zeros(codes, dtype=torch.uint8, device=device)
                scales = torch.zeros(-(-parameter.numel() // block), dtype=torch.float32, device=device)
                state[f"absmax{index}"] = scales
