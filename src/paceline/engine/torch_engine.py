"""The engine of one device, alone or as one rank of several."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.device import is_card
from paceline.engine.buckets import BucketSums
from paceline.engine.engine import Accumulated, Engine, Tensors, Update
from paceline.engine.rng import generators, micro_batch_seed
from paceline.engine.state import copy_into, without_wrappers
from paceline.engine.statistics import settle_
from paceline.engine.step import Step
from paceline.engine.updates import FlatUpdates
from paceline.errors import UserError
from paceline.kernels.launch import compiled_together
from paceline.seams import Alone, World
from paceline.techniques.capture import Eager, Runner

SEVERAL = "shards' gradients of a step of several micro-batches are kept whole between them"
"""Why such steps are not recorded: what one pass leaves, another reads, wherever it has been put."""


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
        world: the other ranks. They meet in ``accumulate``, once for each bucket of gradients, and in ``settle``; there
            each may compile, record and give up by itself. Where weights are sharded they meet within every pass
            (``Gradients.ranks_meet``), and record together.
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
        self._device = step.updates.parameters[0].device
        self._generators = generators(self._device)
        self._degrade, self._world = degrade, world
        self._degraded: Mapping[str, str] = {}
        # an update that looks at its gate on the host cannot be recorded; what comes before it can
        blocked = step.updates.capturable
        self._update_runner = Eager(blocked) if blocked else runner
        self._first = True
        """Whether the next micro-batch is its step's first."""
        self._owes_sums = False
        """Whether the others may wait for this rank's share of the step's sums."""

    def warm_up(self, batch: Any, denominator: float, *, alike: bool = True) -> None:
        self._mode(training=True)
        put_back = self._buffers_kept()
        share = self._runner.scalar(denominator)

        def micro() -> None:
            # not the last one: what fails on one rank alone must not leave the others waiting in a sum
            self._step.micro(batch, share, first=True, last=False)
            self._step.gradients.zero()  # those of shards are whole so far, and no step holds them into its next pass

        # the first pass compiles kernels, all at once, the second loads them, which may wait; the one after them shows
        # what a step itself does
        try:
            with compiled_together(self._device):
                self._runner.launch(micro)
                self._step.updates.rehearse()
            self._runner.launch(micro)
        except torch.OutOfMemoryError:
            raise  # no other way of computing it was to blame
        except Exception as error:
            self._degraded = self._degrade(error)
            self._runner.launch(micro)
        self._runner.probe(micro)
        if self._step.gradients.ranks_meet:
            # what ranks do together for the first time cannot be recorded: it connects them
            self._runner.launch(lambda: self._step.micro(batch, share, first=True, last=True))
            self._step.gradients.zero()
        put_back()
        if alike or not self._step.gradients.ranks_meet:
            self._runner.prepare(self._step.micro, (batch, share), True, True)

    def accumulate(
        self,
        batches: Iterable[Any],
        denominator: float,
        *,
        step: int = 0,
        alike: bool = True,
    ) -> Accumulated:
        if self._world.size > 1 and not self._first:
            why = "the ranks have summed those gradients already, and what is added now would not be summed with them"
            raise UserError("engine.accumulate(...) twice", why, "give all micro-batches of an update in one call")
        self._mode(training=True)
        losses, extras = [], []
        share, meet = self._runner.scalar(denominator), self._step.gradients.ranks_meet
        first, self._first = self._first, True  # what an exception leaves behind is overwritten
        self._owes_sums = self._world.size > 1
        for index, (batch, last) in enumerate(_with_last(batches)):
            if self._seed is not None:
                seed = micro_batch_seed(self._seed, step, index, self._world.rank)
                for generator in self._generators:
                    generator.manual_seed(seed)
            if meet and not (first and last):
                self._launch_from_now_on(SEVERAL)
            loss, extra = self._runner.run(self._step.micro, (batch, share), first, last, record=alike or not meet)
            first = False
            losses.append(loss)
            extras.append(extra)
        self._step.gradients.finish()
        self._first = self._owes_sums = False
        return Accumulated(total(losses), tuple(extras))

    def update(self) -> Update:
        if self._first:
            raise UserError("engine.update()", "there are no gradients to apply", "call accumulate(...) before it")
        self._step.gradients.check()
        done = Update(*self._update_runner.run(self._step.apply_update, ()))
        self._first = True  # the next micro-batch overwrites the gradients
        return done

    def mark(self) -> Callable[[], None]:
        put_back = self._buffers_kept()

        def go_back() -> None:
            put_back()
            self._first = True  # the next micro-batch overwrites the gradients
            self._runner.close()
            gc.collect()  # what an exception left behind may be in a circle
            if is_card(self._device):
                card = torch.get_device_module(self._device)
                card.synchronize(self._device)
                card.empty_cache()
                card.reset_peak_memory_stats(self._device)

        return go_back

    def catch_up(self, error: BaseException) -> None:
        owes, self._owes_sums = self._owes_sums, False
        if not owes:
            return
        # a rank begins the sums of a step in order and once: who has begun cannot begin anew
        begun = (BucketSums.backward.__code__, BucketSums.finish.__code__)
        if any(frame.f_code in begun for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise error
        nothing = torch.stack([parameter.sum() for parameter in self._step.updates.parameters]).sum() * 0.0
        self._step.gradients.add(nothing, first=True, last=True)
        self._step.gradients.finish()

    def held(self) -> Mapping[str, int]:
        updates = self._step.updates
        if isinstance(updates, FlatUpdates):
            updates.prime()  # its states are there from the start; those of torch's optimizers would be made by this
        parameters = list(self._model.parameters())
        kinds: dict[str, Sequence[Tensor]] = {
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer states": list(updates.tensors(self._names()).values()),
        }
        return {kind: _bytes_on(self._device, tensors) for kind, tensors in kinds.items()}

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

    def launching(self) -> AbstractContextManager[None]:
        return self._runner.launching()

    @property
    def replays(self) -> bool:
        return self._runner.replays

    @property
    def path(self) -> Mapping[str, str]:
        return {"steps": self._runner.path, **self._degraded}

    def close(self) -> None:
        self._runner.close()
        self._model.zero_grad(set_to_none=True)

    def _launch_from_now_on(self, reason: str) -> None:
        if not isinstance(self._runner, Eager):
            self._runner.close()
            self._runner = self._update_runner = Eager(reason)

    def _buffers_kept(self) -> Callable[[], None]:
        """What puts the model's buffers, such as running statistics, back to what they are now."""
        kept = [(buffer, buffer.clone()) for buffer in self._model.buffers()]

        def put_back() -> None:
            for buffer, value in kept:
                buffer.copy_(value)

        return put_back

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def _mode(self, *, training: bool) -> None:
        # walking all modules costs milliseconds: only when the mode changes
        if self._model.training != training:
            self._model.train(training)


def total(scalars: Sequence[Tensor]) -> Tensor:
    """Their sum, without a launch where there is but one."""
    return scalars[0] if len(scalars) == 1 else torch.stack(list(scalars)).sum()


def _bytes_on(device: torch.device, tensors: Iterable[Any]) -> int:
    """Of all memory that these tensors, or this rank's shards of them, are in; shared memory counts once."""
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in own if tensor.device.type == device.type]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


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
