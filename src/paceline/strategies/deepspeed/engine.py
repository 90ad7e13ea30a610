"""The engine of a run under DeepSpeed: ours to the loop, DeepSpeed's own behind it.

DeepSpeed runs the passes, sums gradients into shards, and updates these. One number decides about an update here too:
the norm of all gradients, which DeepSpeed takes over its shards. It clips by it as we do, and skips the update where it
is not finite; we report it, count the updates that were made, and take the learning rates from that count.

Losses are sums divided by the label count of the global batch, so that gradients only ever add up. DeepSpeed takes
their mean over ranks: the loss is multiplied by the number of ranks before it. The loss scale of fp16 is ours:
DeepSpeed is told the current one, multiplies the loss by it, and takes it out of norm and gradients.

Source: Rajbhandari et al., ZeRO, SC 2020; Ren et al., ZeRO-Offload, USENIX ATC 2021; DeepSpeed 0.19's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.contract.errors import UserError
from paceline.contract.spans import activity, span
from paceline.engine.rng import augmentation_seed, generators, micro_batch_seed
from paceline.engine.statistics import settle_
from paceline.engine.step import Objective
from paceline.engine.torch_engine import Collate, total
from paceline.machine.device import PLANNED
from paceline.optim.scaling import LossScale
from paceline.seams import Accumulated, Batch, Engine, Forward, StepInput, Tensors, Update, World
from paceline.strategies.deepspeed.states import States


@final
class Passes(nn.Module):
    """The build's whole forward pass as a module, which is what DeepSpeed takes hold of.

    Args:
        model: under its own name, so that it keeps the names of its weights.
        forward: of the build, with all that techniques made of it.
    """

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, batch: Batch) -> Tensor:
        """Logits."""
        return self._forward(self.model, batch)


@final
class DeepSpeedEngine(Engine):
    """A rank of several.

    Args:
        theirs: DeepSpeed's engine, around ``Passes``.
        optimizer: that was given to it.
        states: of this model and optimizer; None: a plan, which has none to save.
        objective: whose forward pass goes through ``theirs``.
        logits: batch -> logits, through it too.
        scale: of the loss.
        rates: [steps, groups]: learning rate of each applied update.
        collate: makes micro-batches on the device.
        seed: of dropout.
        world: all ranks.
        device: that computes.
        close: lets go of ``theirs``.
        compared: what came of the first pass beside a plain one.
    """

    def __init__(
        self,
        theirs: Any,
        optimizer: torch.optim.Optimizer,
        states: States | None,
        objective: Objective,
        logits: Callable[[Batch], Tensor],
        scale: LossScale,
        rates: NDArray[np.float64],
        collate: Collate,
        *,
        seed: int,
        world: World,
        device: torch.device,
        close: Callable[[], None],
        compared: str,
    ) -> None:
        self._theirs, self._optimizer, self._states = theirs, optimizer, states
        self._objective, self._logits, self._scale, self._rates = objective, logits, scale, rates
        self._collate, self._seed, self._world, self._device = collate, seed, world, device
        self._close, self._compared = close, compared
        self._generators = generators(device)
        self._applied = 0
        self._is_accumulated = False

    @activity("warming up")
    def warm_up(self, given: StepInput) -> None:
        """A whole step whose gradients are no numbers: DeepSpeed then leaves weights and states as they are."""
        kept = [(buffer, buffer.clone()) for buffer in self._theirs.module.buffers()]
        self._mode(training=True)
        loss_sum, _ = self._objective(self._made(given, 0))
        self._backward(loss_sum * torch.nan, last=True)
        self._step()
        for buffer, value in kept:
            buffer.copy_(value)

    @activity("accumulating")
    def accumulate(self, given: StepInput) -> Accumulated:
        if self._is_accumulated:
            why = "the ranks have summed those gradients already, and what is added now would not be summed with them"
            raise UserError("engine.accumulate(...) twice", why, "give all micro-batches of an update in one call")
        self._mode(training=True)
        losses, extras = [], []
        for index in range(len(given.microbatches)):
            batch = self._made(given, index)
            seed = micro_batch_seed(self._seed, given.step, index, self._world.rank)
            for generator in self._generators:
                generator.manual_seed(seed)
            with span("forward"):
                loss_sum, extra = self._objective(batch)
                loss = loss_sum / given.denominator
            with span("backward"):
                self._backward(loss, last=index == len(given.microbatches) - 1)
            losses.append(loss.detach())
            extras.append(extra)
        self._is_accumulated = True
        return Accumulated(total(losses), tuple(extras))

    @activity("updating")
    def update(self) -> Update:
        if not self._is_accumulated:
            raise UserError("engine.update()", "there are no gradients to apply", "call accumulate(...) before it")
        rates = self._rates[min(self._applied, len(self._rates) - 1)]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = float(rate)
        with span("update"):
            norm, is_made = self._step()
        self._applied += is_made
        self._is_accumulated = False
        finite = torch.tensor(is_made, device=self._device)
        self._scale.adapt(finite)
        return Update(torch.as_tensor(norm, dtype=torch.float32, device=self._device), finite)

    @torch.no_grad()
    def infer(self, batch: Batch) -> Tensor:
        self._mode(training=False)
        return self._logits(batch)

    def settle(self) -> None:
        settle_(list(self._theirs.module.buffers()), self._world)

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        assert self._states is not None
        tensors = {"model": self._states.weights(), "optimizer": self._states.optimizer_states(self._applied)}
        return tensors, {"applied": self._applied, "loss_scale": self._scale.state(), "numbers": {}}

    def load(self, tensors: Tensors, state: Mapping[str, Any] | None = None) -> None:
        assert self._states is not None
        self._states.put_weights(tensors["model"])
        if state is None:
            return
        if tensors["optimizer"] or state["applied"]:
            self._states.put_optimizer_states(tensors["optimizer"], state["applied"])
        self._applied = state["applied"]
        self._scale.load(state["loss_scale"])
        self._is_accumulated = False

    def whole(self) -> dict[str, Tensor]:
        assert self._states is not None
        return self._states.weights()

    @property
    def execution(self) -> Mapping[str, str]:
        steps = "eager (DeepSpeed's engine moves and frees tensors between passes)"
        return {"steps": steps, "compared": self._compared}

    def close(self) -> None:
        self._close()

    @span("data wait")
    def _made(self, given: StepInput, index: int) -> Batch:
        """The step's micro-batch number ``index``, on the device."""
        draw = augmentation_seed(self._seed, given.step, index, self._world.rank)
        return self._collate(given.microbatches[index], draw, slots=given.width(index))

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        self._theirs.set_gradient_accumulation_boundary(last)
        if self._device.type != PLANNED:
            self._theirs.optimizer.loss_scale = self._scale_now()
        self._theirs.backward(loss * self._world.size)

    def _step(self) -> tuple[Any, bool]:
        """The norm of all gradients, scale taken out, and whether the update was made."""
        self._theirs.step()
        return self._theirs.get_global_grad_norm(), bool(self._theirs.was_step_applied())

    def _scale_now(self) -> float:
        return float(self._scale.up(torch.ones((), device=self._device)))

    def _mode(self, *, training: bool) -> None:
        # walking all modules costs milliseconds: only when the mode changes
        if self._theirs.module.training != training:
            self._theirs.module.train(training)
