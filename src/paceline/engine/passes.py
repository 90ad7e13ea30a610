"""What makes the passes of a step where they are not forward and backward of one micro-batch after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from paceline.engine.step import Step


class Passes(Protocol):
    """Makes the forward and backward passes of a step in an order of its own."""

    @property
    def most_together(self) -> int:
        """Micro-batches that a step has to have for the engine to hold as much as it ever does."""

    def __call__(
        self,
        step: Step,
        made: Callable[[int], Any],
        count: int,
        share: Tensor | float,
        seeded: Callable[[int, int], None],
    ) -> tuple[list[Tensor], list[Any]]:
        """All forward and backward passes of a step; gradients add up.

        Args:
            step: its objective, loss scale and gradients.
            made: makes micro-batch number so and so.
            count: of micro-batches.
            share: what losses are divided by.
            seeded: seeds dropout of a micro-batch, and of which of several stretches of the model.

        Returns:
            Of each micro-batch its loss and what the objective handed back beside it.
        """
