"""A step's forward and backward passes, as one rank of a pipeline makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from paceline.contract.spans import span
from paceline.engine.step import Step
from paceline.strategies.pipeline.schedule import in_flight, passes_of
from paceline.strategies.pipeline.stage import Stages


@final
class PipelinePasses:
    """Makes all passes of a step in the order of a schedule; losses are the last rank's, told to all.

    Args:
        stages: of this rank.
        schedule: see ``passes_of``.
        count: micro-batches of a full step.
    """

    def __init__(self, stages: Stages, schedule: str, count: int) -> None:
        self._stages, self._schedule, self._count = stages, schedule, count

    @property
    def most_together(self) -> int:
        # as the first rank has it, which keeps the most: all ranks make these passes together
        ranks = self._stages.pipe.size
        first = [in_flight(self._schedule, 0, ranks, count) for count in range(1, self._count + 1)]
        return first.index(max(first)) + 1

    def __call__(
        self,
        step: Step,
        made: Callable[[int], Any],
        count: int,
        share: Tensor | float,
        seeded: Callable[[int, int], None],
    ) -> tuple[list[Tensor], list[Any]]:
        stages, ranks = self._stages, self._stages.pipe.size
        order = passes_of(self._schedule, stages.pipe.rank, ranks, count)
        batches: dict[int, Any] = {}
        waiting: dict[tuple[int, int], Tensor] = {}
        found: dict[int, tuple[Tensor, Any]] = {}
        left = sum(not one.is_forward for one in order)
        first = True
        for one in order:
            key, stage = (one.chunk, one.microbatch), stages.own[one.chunk]
            if one.is_forward:
                if one.microbatch not in batches:
                    batches[one.microbatch] = made(one.microbatch)
                seeded(one.microbatch, stage.index)
                with span("forward"), stages.at(stage):
                    loss_sum, extra = step.objective(batches[one.microbatch])
                    loss = loss_sum / share
                if one.chunk == len(stages.own) - 1:
                    del batches[one.microbatch]
                    found[one.microbatch] = loss.detach(), extra
                waiting[key] = step.scale.up(loss)
                continue
            left -= 1
            with span("backward"):
                step.gradients.add(waiting.pop(key), first=first, last=left == 0)
            first = False
        losses = [found[index][0] for index in range(count)]
        extras = [found[index][1] for index in range(count)]
        told = stages.tell(torch.stack([*losses, *extras]).float())
        stages.flush()
        return list(told[:count]), list(told[count:])
