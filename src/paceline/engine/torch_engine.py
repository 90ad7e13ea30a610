"""The engine of one device, alone or as one rank of several."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from paceline.contract.errors import UserError
from paceline.contract.spans import activity, span
from paceline.data.mixing import mixed_batch
from paceline.engine.passes import Passes
from paceline.engine.rng import augmentation_seed, generators, micro_batch_seed
from paceline.engine.runner import Eager, Runner
from paceline.engine.statistics import settle_
from paceline.engine.step import Step
from paceline.kernels.launch import compiled_together
from paceline.machine.device import is_gpu
from paceline.optim.ema import EMA
from paceline.optim.state import NOT_SPLIT, Splitting, copy_into, without_wrappers
from paceline.optim.updates import FlatUpdates
from paceline.seams import Accumulated, Alone, Batch, Engine, Ids, StepInput, Tensors, Update, World

SEVERAL = "shards' gradients of a step of several micro-batches are kept whole between them"
"""Why such steps are not captured: what one pass leaves, another reads, wherever it has been put."""


class Collate(Protocol):
    """Makes a micro-batch of samples, as ``Layout.collate``."""

    def __call__(self, ids: Ids, draw: int | None = None, *, slots: int | None = None) -> Batch: ...


@final
class TorchEngine(Engine):
    """Plain torch on one device; ``runner`` decides whether a step runs eagerly or is replayed.

    Args:
        model: whose parameters are trained.
        step: what a step does.
        logits: batch -> logits; for ``infer``.
        runner: runs the functions of the step.
        collate: makes micro-batches on the device.
        seed: of dropout; None leaves torch's generator to the caller.
        degrade: told why the first pass failed; makes the model run in a plainer way and says what became of the
            path, or raises.
        world: the other ranks. They meet in ``accumulate``, once for each bucket of gradients, and in ``settle``; there
            each may compile, capture and give up by itself. Where weights are sharded they meet within every pass
            (``Gradients.ranks_meet``), and capture together.
        splitting: how tensors that ranks hold in pieces leave and enter whole.
        passes: makes the passes of a step, eagerly; None: ``Step.micro`` does, one micro-batch after the other.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        logits: Callable[[Any], Tensor],
        runner: Runner,
        collate: Collate,
        *,
        seed: int | None,
        degrade: Callable[[Exception], Mapping[str, str]],
        world: World = Alone(),  # noqa: B008 - it has no state
        splitting: Splitting = NOT_SPLIT,
        passes: Passes | None = None,
    ) -> None:
        self._model, self._step, self._logits, self._runner, self._seed = model, step, logits, runner, seed
        self._device = step.updates.parameters[0].device
        self._generators = generators(self._device)
        self._degrade, self._world, self._collate, self._splitting = degrade, world, collate, splitting
        self._passes = passes
        self._degraded: Mapping[str, str] = {}
        # an update that looks at its gate on the host cannot be captured; what comes before it can
        blocked = step.updates.capturable
        self._update_runner = Eager(blocked) if blocked else runner
        self._first = True
        """Whether the next micro-batch is its step's first."""
        self._owes_all_reduce = False
        """Whether the others may wait for this rank in the step's all-reduce."""

    @activity("warming up")
    def warm_up(self, given: StepInput) -> None:
        self.warm_up_on(self._made(given, 0), given.denominator, same_shapes=given.same_shapes)

    def warm_up_on(self, batch: Any, denominator: float, *, same_shapes: bool = True) -> None:
        """``warm_up`` on a micro-batch that is there already."""
        self._mode(training=True)
        put_back = self._buffers_kept()
        share = self._runner.scalar(denominator)
        if self._passes is not None:
            self._make(self._passes, lambda index: batch, self._passes.most_together, share)
            self._step.gradients.zero()
            put_back()
            return

        def micro() -> None:
            # not the last one: what fails on one rank alone must not leave the others waiting in an all-reduce
            self._step.micro(batch, share, first=True, last=False)
            self._step.gradients.zero()  # those of shards are whole so far, and no step holds them into its next pass

        # the first pass compiles kernels, all at once, the second loads them, which may wait; the one after them shows
        # what a step itself does
        try:
            with compiled_together(self._device):
                self._runner.run_eagerly(micro)
                self._step.updates.rehearse()
            self._runner.run_eagerly(micro)
        except torch.OutOfMemoryError:
            raise  # no other way of computing it was to blame
        except Exception as error:
            self._degraded = self._degrade(error)
            self._runner.run_eagerly(micro)
        self._runner.probe(micro)
        if self._step.gradients.ranks_meet:
            # what ranks do together for the first time cannot be captured: it connects them
            self._runner.run_eagerly(lambda: self._step.micro(batch, share, first=True, last=True))
            self._step.gradients.zero()
        put_back()
        if same_shapes or not self._step.gradients.ranks_meet:
            self._runner.prepare(self._step.micro, (batch, share), True, True)

    @activity("accumulating")
    def accumulate(self, given: StepInput) -> Accumulated:
        if self._passes is not None:
            made, count = partial(self._made, given), len(given.microbatches)
            return self._accumulated(self._passes, made, count, given.denominator, given.step)
        batches = (self._made(given, index) for index in range(len(given.microbatches)))
        return self.accumulate_batches(batches, given.denominator, step=given.step, same_shapes=given.same_shapes)

    @span("data wait")
    def _made(self, given: StepInput, index: int) -> Batch:
        """The step's micro-batch number ``index``, on the device."""
        at, draw, other = (given.step, index, self._world.rank), None, None
        if self._seed is not None:
            draw, other = (augmentation_seed(self._seed, *at, of_partners=which) for which in (False, True))
        batch = self._collate(given.microbatches[index], draw, slots=given.width(index))
        if given.mix is None:
            return batch
        return mixed_batch(batch, self._collate(given.partners[index], other), given.mix)

    def accumulate_batches(
        self, batches: Iterable[Any], denominator: float, *, step: int = 0, same_shapes: bool = True
    ) -> Accumulated:
        """``accumulate`` of micro-batches that are there, or are built one at a time as they are needed.

        Args:
            denominator, step, same_shapes: as in ``StepInput``.
        """
        if self._passes is not None:
            there = list(batches)
            return self._accumulated(self._passes, there.__getitem__, len(there), denominator, step)
        self._refuse_more()
        self._mode(training=True)
        losses, extras = [], []
        share, meet = self._runner.scalar(denominator), self._step.gradients.ranks_meet
        capture = same_shapes or not meet
        first, self._first = self._first, True  # what an exception leaves behind is overwritten
        self._owes_all_reduce = self._world.size > 1
        for index, (batch, last) in enumerate(_with_last(batches)):
            self._seeded(step, index)
            if meet and not (first and last):
                self._eager_from_now_on(SEVERAL)
            loss, extra = self._runner.run(self._step.micro, (batch, share), first, last, capture=capture)
            first = False
            losses.append(loss)
            extras.append(extra)
        if not losses:
            raise UserError("engine.accumulate([], ...)", "there is no micro-batch", "give the batches of an update")
        self._step.gradients.finish()
        self._first = self._owes_all_reduce = False
        return Accumulated(total(losses), tuple(extras))

    def _accumulated(
        self, passes: Passes, made: Callable[[int], Any], count: int, denominator: float, step: int
    ) -> Accumulated:
        """``accumulate`` of micro-batches whose passes are not made one after the other."""
        self._refuse_more()
        self._mode(training=True)
        self._first = True  # what an exception leaves behind is overwritten
        losses, extras = self._make(passes, made, count, self._runner.scalar(denominator), step)
        self._first = False
        return Accumulated(total(losses), tuple(extras))

    def _make(
        self, passes: Passes, made: Callable[[int], Any], count: int, share: Tensor | float, step: int = 0
    ) -> tuple[list[Tensor], list[Any]]:
        found = passes(self._step, made, count, share, partial(self._seeded, step))
        self._step.gradients.finish()
        return found

    def _refuse_more(self) -> None:
        """Refuse to accumulate twice before an update where ranks have summed what there is."""
        if (self._world.size > 1 or self._passes is not None) and not self._first:
            why = "the ranks have summed those gradients already, and what is added now would not be summed with them"
            raise UserError("engine.accumulate(...) twice", why, "give all micro-batches of an update in one call")

    def _seeded(self, step: int, index: int, stretch: int = 0) -> None:
        """Seed what micro-batch number ``index`` draws; in each of several stretches of the model it draws others."""
        if self._seed is None:
            return
        seed = micro_batch_seed(self._seed, step, index, self._world.rank + stretch * self._world.size)
        for generator in self._generators:
            generator.manual_seed(seed)

    @activity("updating")
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
            if is_gpu(self._device):
                gpu = torch.get_device_module(self._device)
                gpu.synchronize(self._device)
                gpu.empty_cache()
                gpu.reset_peak_memory_stats(self._device)

        return go_back

    def catch_up(self, error: BaseException) -> None:
        owes, self._owes_all_reduce = self._owes_all_reduce, False
        if not owes:
            return
        if self._step.gradients.all_reduce_under_way:
            raise error  # a rank begins the collectives of a step in order and once: who has begun cannot begin anew
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
            **({"average": self.ema.shadow} if self.ema is not None else {}),
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
        tensors, plain = {"model": self._named(), "optimizer": updates.tensors(names)}, {}
        if self.ema is not None:
            tensors["ema"], plain["ema"] = updates.averages(names), {"updates": self.ema.updates}
        return {stem: self._splitting.collected(named) for stem, named in tensors.items()}, {
            "applied": updates.applied,
            "loss_scale": self._step.scale.state(),
            "numbers": updates.numbers(names),
            **plain,
        }

    def load(self, tensors: Tensors, state: Mapping[str, Any] | None = None) -> None:
        if state is None:
            copy_into(self._named(), tensors["model"], "model", self._splitting)
            self._load_average(tensors)
            return
        updates, names = self._step.updates, self._names()
        if tensors["optimizer"]:  # none before the first update, and none of plain SGD
            updates.prime()
        copy_into(self._named(), tensors["model"], "model", self._splitting)
        if tensors["optimizer"] or state["applied"]:
            copy_into(updates.tensors(names), tensors["optimizer"], "optimizer", self._splitting)
        updates.put_numbers(names, state["numbers"])
        updates.applied = state["applied"]
        self._step.scale.load(state["loss_scale"])
        self._load_average(tensors, state)
        self._first = True

    def _load_average(self, tensors: Tensors, state: Mapping[str, Any] | None = None) -> None:
        """Take up a saved average; where none was saved it begins with the weights that were."""
        if self.ema is None:
            return
        if "ema" not in tensors:
            self.ema.register()
            return
        copy_into(self._step.updates.averages(self._names()), tensors["ema"], "average", self._splitting)
        if state is not None:
            self.ema.updates = state["ema"]["updates"]

    @property
    def ema(self) -> EMA | None:
        """The average of the weights, where one is kept."""
        return self._step.updates.ema

    def averaged(self) -> AbstractContextManager[None] | None:
        return None if self.ema is None else self.ema.averaged()

    def take_average(self) -> None:
        if self.ema is not None:
            self.ema.copy_to_weights()

    def whole(self) -> dict[str, Tensor]:
        return self._splitting.collected(self._named())

    @property
    def most_together(self) -> int:
        """Micro-batches that a step has to have for the engine to hold as much as it ever does."""
        return 2 if self._passes is None else self._passes.most_together

    def eager(self) -> AbstractContextManager[None]:
        return self._runner.eager()

    @property
    def replays(self) -> bool:
        return self._runner.replays

    @property
    def execution(self) -> Mapping[str, str]:
        return {"steps": self._runner.execution, **self._step.updates.execution, **self._degraded}

    def close(self) -> None:
        self._runner.close()
        self._model.zero_grad(set_to_none=True)

    def _eager_from_now_on(self, reason: str) -> None:
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

    def _named(self) -> dict[str, Tensor]:
        """Weights and buffers, as this rank holds them."""
        return without_wrappers(self._model.state_dict())

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
    """Bytes of all memory that these tensors, or this rank's shards of them, are in; shared memory counts once."""
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in own if tensor.device.type == device.type]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _with_last(batches: Iterable[Any]) -> Iterable[tuple[Any, bool]]:
    """Each batch with whether it is the last; sequences are not looked ahead into, so one batch is alive at a time."""
    if isinstance(batches, Sequence):
        yield from ((batch, index == len(batches) - 1) for index, batch in enumerate(batches))
        return
    iterator = iter(batches)
    for current in iterator:  # once, or not at all
        for following in iterator:
            yield current, False
            current = following
        yield current, True
