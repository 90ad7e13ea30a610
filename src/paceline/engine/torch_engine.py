"""The engine of one device, alone or as one rank of several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.engine.engine import Accumulated, Engine, Tensors, Update
from paceline.engine.rng import generators, micro_batch_seed
from paceline.engine.state import copy_into, without_wrappers
from paceline.engine.statistics import settle_
from paceline.engine.step import Step
from paceline.errors import UserError
from paceline.seams import Alone, World
from paceline.techniques.capture import Eager, Runner


@final
class TorchEngine(Engine):
    """Plain torch on one device; ``runner`` decides whether a step is launched or replayed.

    Args:
        model: whose parameters are trained.
        step: what a step does.
        logits: batch -> logits; for ``infer``.
        runner: runs the functions of the step.
        seed: of dropout; None leaves torch's generator to the caller.
        degrade: told why the first pass failed; makes the model run in a plainer way and says what became of the
            path, or raises.
        world: the other ranks. They meet in ``accumulate``, once for each bucket of gradients, and in ``settle``;
            nowhere else, so that each may compile, record and give up by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        logits: Callable[[Any], Tensor],
        runner: Runner,
        *,
        seed: int | None,
        degrade: Callable[[Exception], Mapping[str, str]],
        world: World = Alone(),  # noqa: B008 - it has no state
    ) -> None:
        self._model, self._step, self._logits, self._runner, self._seed = model, step, logits, runner, seed
        self._generators = generators(step.updates.parameters[0].device)
        self._degrade, self._world = degrade, world
        self._degraded: Mapping[str, str] = {}
        # an update that looks at its gate on the host cannot be recorded; what comes before it can
        blocked = step.updates.capturable
        self._update_runner = Eager(blocked) if blocked else runner
        self._first = True
        """Whether the next micro-batch is its step's first."""

    def warm_up(self, batch: Any, denominator: float) -> None:
        self._mode(training=True)
        kept = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        share = self._runner.scalar(denominator)
        # the first pass compiles and loads kernels, which may wait; the second shows what a step itself does. Neither
        # is a last one: what fails on one rank alone must not leave the others waiting in a sum
        try:
            self._step.micro(batch, share, first=True, last=False)
        except Exception as error:
            self._degraded = self._degrade(error)
            self._step.micro(batch, share, first=True, last=False)
        self._runner.probe(lambda: self._step.micro(batch, share, first=True, last=False))
        for buffer, value in kept:
            buffer.copy_(value)
        self._runner.prepare(self._step.micro, (batch, share), True, True)

    def accumulate(self, batches: Iterable[Any], denominator: float, *, step: int = 0) -> Accumulated:
        if self._world.size > 1 and not self._first:
            why = "the ranks have summed those gradients already, and what is added now would not be summed with them"
            raise UserError("engine.accumulate(...) twice", why, "give all micro-batches of an update in one call")
        self._mode(training=True)
        losses, extras = [], []
        share = self._runner.scalar(denominator)
        first, self._first = self._first, True  # what an exception leaves behind is overwritten
        for index, (batch, last) in enumerate(_with_last(batches)):
            if self._seed is not None:
                for generator in self._generators:
                    generator.manual_seed(micro_batch_seed(self._seed, step, index, self._world.rank))
            loss, extra = self._runner.run(self._step.micro, (batch, share), first, last)
            first = False
            losses.append(loss)
            extras.append(extra)
        self._step.gradients.finish()
        self._first = False
        return Accumulated(total(losses), tuple(extras))

    def update(self) -> Update:
        if self._first:
            raise UserError("engine.update()", "there are no gradients to apply", "call accumulate(...) before it")
        self._step.gradients.check()
        done = Update(*self._update_runner.run(self._step.apply_update, ()))
        self._first = True  # the next micro-batch overwrites the gradients
        return done

    @torch.no_grad()
    def infer(self, batch: Any) -> Tensor:
        self._mode(training=False)
        return self._logits(batch)

    def settle(self) -> None:
        settle_(list(self._model.buffers()), self._world)

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        updates, names = self._step.updates, self._names()
        return {"model": self.export(), "optimizer": updates.tensors(names)}, {
            "applied": updates.applied,
            "loss_scale": self._step.scale.state(),
            "numbers": updates.numbers(names),
        }

    def load(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        updates, names = self._step.updates, self._names()
        if tensors["optimizer"]:  # none before the first update, and none of plain SGD
            updates.prime()
        copy_into(self.export(), tensors["model"], "model")
        if tensors["optimizer"] or state["applied"]:
            copy_into(updates.tensors(names), tensors["optimizer"], "optimizer")
        updates.put_numbers(names, state["numbers"])
        updates.applied = state["applied"]
        self._step.scale.load(state["loss_scale"])
        self._first = True

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        copy_into(self.export(), weights, "model")

    def export(self) -> dict[str, Tensor]:
        return without_wrappers(self._model.state_dict())

    @property
    def path(self) -> Mapping[str, str]:
        return {"steps": self._runner.path, **self._degraded}

    def close(self) -> None:
        self._runner.close()
        self._model.zero_grad(set_to_none=True)

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def _mode(self, *, training: bool) -> None:
        # walking all modules costs milliseconds: only when the mode changes
        if self._model.training != training:
            self._model.train(training)


def total(scalars: Sequence[Tensor]) -> Tensor:
    """Their sum, without a launch where there is but one."""
    return scalars[0] if len(scalars) == 1 else torch.stack(list(scalars)).sum()


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
