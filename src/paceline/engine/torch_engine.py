"""The engine of one process and one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.engine.engine import Accumulated, Engine, Tensors, Update
from paceline.engine.gradients import FlatGradients
from paceline.engine.rng import micro_batch_seed
from paceline.engine.scaling import LossScale
from paceline.engine.state import copy_into, optimizer_numbers, optimizer_tensors, prime, put_numbers, without_wrappers
from paceline.engine.step import Objective, apply_update, micro
from paceline.engine.updates import Updates


@final
class TorchEngine(Engine):
    """Plain torch: eager, one device.

    Args:
        model: whose parameters are trained.
        objective: batch -> (loss sum, extra).
        logits: batch -> logits; for ``infer``.
        updates: the optimizer behind its gate.
        scale: loss scaling.
        clip_norm: largest gradient norm; None: no clipping.
        seed: of dropout; None leaves torch's generator to the caller.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        logits: Callable[[Any], Tensor],
        updates: Updates,
        scale: LossScale,
        *,
        clip_norm: float | None,
        seed: int | None,
    ) -> None:
        self._model, self._objective, self._logits = model, objective, logits
        self._updates, self._scale, self._clip_norm, self._seed = updates, scale, clip_norm, seed
        trained = [p for group in updates.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._gradients = FlatGradients(trained)

    def accumulate(self, batches: Iterable[Any], denominator: float, *, step: int = 0) -> Accumulated:
        self._mode(training=True)
        losses, extras = [], []
        for index, (batch, last) in enumerate(_with_last(batches)):
            if self._seed is not None:
                torch.manual_seed(micro_batch_seed(self._seed, step, index))
            loss, extra = micro(self._objective, self._gradients, self._scale, batch, denominator, last)
            losses.append(loss)
            extras.append(extra)
        return Accumulated(torch.stack(losses).sum(), tuple(extras))

    def update(self) -> Update:
        return Update(*apply_update(self._gradients, self._scale, self._updates, self._clip_norm))

    @torch.no_grad()
    def infer(self, batch: Any) -> Tensor:
        self._mode(training=False)
        return self._logits(batch)

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        tensors = {"model": self.export(), "optimizer": optimizer_tensors(self._updates.optimizer, self._names())}
        return tensors, {
            "applied": self._updates.applied,
            "loss_scale": self._scale.state(),
            "numbers": optimizer_numbers(self._updates.optimizer, self._names()),
        }

    def load(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        if tensors["optimizer"]:  # none before the first update, and none of plain SGD
            prime(self._updates.optimizer)
            self._gradients.zero()
        copy_into(self.export(), tensors["model"], "model")
        copy_into(optimizer_tensors(self._updates.optimizer, self._names()), tensors["optimizer"], "optimizer")
        put_numbers(self._updates.optimizer, self._names(), state["numbers"])
        self._updates.applied = state["applied"]
        self._scale.load(state["loss_scale"])

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        copy_into(self.export(), weights, "model")

    def export(self) -> dict[str, Tensor]:
        return without_wrappers(self._model.state_dict())

    def close(self) -> None:
        self._model.zero_grad(set_to_none=True)

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def _mode(self, *, training: bool) -> None:
        # walking all modules costs milliseconds: only when the mode changes
        if self._model.training != training:
            self._model.train(training)


def _with_last(batches: Iterable[Any]) -> Iterable[tuple[Any, bool]]:
    """Each batch with whether it is the last; sequences are not looked ahead into, so one batch is alive at a time."""
    if isinstance(batches, Sequence):
        yield from ((batch, index == len(batches) - 1) for index, batch in enumerate(batches))
        return
    iterator = iter(batches)
    current = next(iterator)
    for following in iterator:
        yield current, False
        current = following
    yield current, True
