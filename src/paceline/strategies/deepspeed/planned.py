"""What DeepSpeed's engine holds, and when: a plan runs this in its place, on a GPU that is not there.

DeepSpeed's own engine needs a real device. This one computes nothing: it allocates and frees what that one does, by the
rules of its code (``deepspeed/runtime/zero`` of 0.19: ``stage_1_and_2.py``, ``stage3.py``), around the real forward and
backward pass. ``tests/parity/test_deepspeed_memory.py`` holds both beside each other, phase by phase. What lies in main
memory is there too, on the device ``cpu``.

Of N processes each holds, in bytes of P trained weights in fp32:

- stages 1 and 2: the weights in a flat buffer (4 P) and a copy of its own shard, which is what is updated (4 P / N).
  With the first gradient comes a buffer into which gradients move (4 P, at most 2 GB); ranks sum what is in it in a
  copy of as much. Gradients of the own shard get a buffer of their own (4 P / N), and in the update lie flat once more.
- stage 3: shards of the weights (4 P / N), their copy (4 P / N), the buffer (4 P, from the start) and gradients of the
  shards (4 P / N). Weights are gathered for the pass, and let go of when their gradients are there. Linear layers are
  functions of DeepSpeed's own (``linear.py``), which under autocast keep what they are given as it is, and no copies
  of weights in 16 bits.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.optim.state import prime
from paceline.seams import Batch
from paceline.strategies.deepspeed.library import PERSISTENT, SHARDED

HOST = torch.device("cpu")

PREFETCHED = 50_000_000
"""Numbers of weights that stage 3 gathers ahead in one go, at most: DeepSpeed's own default."""

ALIGNED = 2
"""A flat buffer's numbers are a multiple of this and of the ranks (``nccl_start_alignment_factor``)."""


class Planned(nn.Module, ABC):
    """DeepSpeed's engine, as far as ``DeepSpeedEngine`` asks for it and a plan can know.

    Args:
        module: the build's passes.
        optimizer: of the trained parameters, which shards replace.
        config: that DeepSpeed would be told, see ``library.configuration``.
        device: that computes.
        num_ranks: that share each batch; this is the first.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        device: torch.device,
        num_ranks: int,
    ) -> None:
        super().__init__()
        zero = config["zero_optimization"]
        self.module, self._updated, self._device, self._num_ranks = module, optimizer, device, num_ranks
        self.optimizer = self
        """The loss scale is all that is asked of it."""
        self.loss_scale = 1.0
        self._bucket_numel: int = zero["reduce_bucket_size"]
        self._is_offloaded = "offload_optimizer" in zero
        self._state_device = HOST if self._is_offloaded else device
        self._weight_device = HOST if "offload_param" in zero else device
        self._is_last = True
        self._bucket: Tensor | None = None
        self._filled = 0
        self._waiting: list[tuple[nn.Parameter, Tensor]] = []
        """Gradients that are not summed over ranks yet, and whose they are."""
        self._groups: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
        self._shares: list[Tensor] = []
        """What the optimizer updates, a flat shard a group."""
        with torch.no_grad():
            self._split()
        for group, share in zip(optimizer.param_groups, self._shares, strict=True):
            group["params"] = [share.requires_grad_()]
        for parameter in self._trained():
            parameter.register_post_accumulate_grad_hook(self._take)

    def forward(self, batch: Batch) -> Tensor:
        """Logits."""
        logits: Tensor = self.module(batch)
        return logits

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        """Whether the next backward pass is the last before an update."""
        self._is_last = is_last

    def backward(self, loss: Tensor) -> None:
        """A pass, and what sums its gradients."""
        loss.backward()
        with torch.no_grad():
            self._ended()

    @torch.no_grad()
    def step(self) -> None:
        """An update of the own shard, group by group."""
        self._measure()
        groups = self._updated.param_groups
        for group, share in zip(groups, self._shares, strict=True):
            share.grad = self._flat_gradients(share)
            # DeepSpeed updates one group at a time, too
            self._updated.param_groups = [group]
            self._updated.step()
            share.grad = None
        self._updated.param_groups = groups
        self._forget()

    def get_global_grad_norm(self) -> float:
        """Gradients hold nothing, so any number will do."""
        return 1.0

    def was_step_applied(self) -> bool:
        """No gradient of a plan overflows."""
        return True

    def forget(self) -> None:
        """Let go of what the optimizer's states were made from."""
        for share in self._shares:
            share.grad = None

    @abstractmethod
    def _split(self) -> None:
        """Take hold of the weights, and make what lives as long as the run."""

    @abstractmethod
    def _take(self, parameter: Tensor) -> None:
        """A gradient is there."""

    @abstractmethod
    def _reduce(self) -> None:
        """Sum what is in the bucket over the ranks."""

    @abstractmethod
    def _ended(self) -> None:
        """A backward pass has ended."""

    @abstractmethod
    def _measure(self) -> None:
        """The norm of the own gradients, whose squares are summed in fp64, a tensor at a time."""

    def _flat_gradients(self, share: Tensor) -> Tensor:
        """The gradients of a shard, in one tensor more."""
        return torch.empty(share.numel(), device=self._device).to(share.device)

    def _forget(self) -> None:
        """Let go of what lives from the first gradient to the update."""

    def _trained(self) -> Sequence[nn.Parameter]:
        return [parameter for group in self._groups for parameter in group]

    def _move_into_bucket(self, parameter: nn.Parameter) -> None:
        """The gradient lies in the bucket from now on, where that has room for it at all."""
        gradient, size = parameter.grad, parameter.numel()
        assert gradient is not None
        if self._filled + size > self._bucket_numel:
            self._reduce()
        if self._bucket is None:
            self._bucket = self._new_bucket()
        if size <= self._bucket_numel:
            gradient = self._bucket[self._filled : self._filled + size].view_as(parameter)
            self._filled += size
        self._waiting.append((parameter, gradient))
        parameter.grad = None

    def _new_bucket(self) -> Tensor:
        return torch.empty(self._bucket_numel, device=self._device)

    def _squared(self, size: int) -> None:
        torch.empty(size, dtype=torch.float64, device=self._device)


@final
class PlannedWhole(Planned):
    """Stages 1 and 2: every rank has all weights.

    Args:
        shards_gradients: stage 2, which moves each gradient as soon as it is there; stage 1 does so after the last pass
            before an update.
    """

    def __init__(self, *arguments: Any, shards_gradients: bool) -> None:
        self._shards_gradients = shards_gradients
        super().__init__(*arguments)
        self._summed: Tensor | None = None
        """Gradients of the own shard, over all micro-batches so far."""
        self._own: Tensor | None = None
        """Those of this pass."""

    def _split(self) -> None:
        self._is_own: dict[nn.Parameter, bool] = {}
        for group in self._groups:
            size = sum(parameter.numel() for parameter in group)
            step = ALIGNED * self._num_ranks
            flat = torch.cat([*(p.detach().view(-1) for p in group), torch.empty(-size % step, device=self._device)])
            at, share = 0, flat.numel() // self._num_ranks
            for parameter in group:
                self._is_own[parameter] = at < share
                parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
            self._shares.append(flat[:share].clone().to(self._state_device))
        if self._is_offloaded:
            # through which gradients of earlier micro-batches come back
            self._passage = torch.empty(max(p.numel() for p in self._trained()), device=self._device)

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if self._bucket is None:
            self._bucket = self._new_bucket()
        if self._shards_gradients:
            self._move_into_bucket(parameter)

    def _reduce(self) -> None:
        sums = None
        if self._num_ranks > 1 and self._waiting:
            # whoever sums may hold on to it until all of this is over
            sums = torch.cat([gradient.reshape(-1) for _, gradient in self._waiting])
        for parameter, _ in self._waiting:
            if not self._is_own[parameter]:
                continue
            if self._is_offloaded:
                self._squared(parameter.numel())
            elif self._own is None:
                self._own = torch.empty(sum(p.numel() for p, own in self._is_own.items() if own), device=self._device)
        del sums
        self._waiting.clear()
        self._filled = 0

    def _ended(self) -> None:
        if not self._shards_gradients:
            if not self._is_last:
                return
            for parameter in self._trained():
                if parameter.grad is not None:
                    self._move_into_bucket(parameter)
        self._reduce()
        self._summed = self._own if self._summed is None else self._summed
        self._own = self._bucket = None

    def _measure(self) -> None:
        if not self._is_offloaded:
            self._squared(max(p.numel() for p, own in self._is_own.items() if own))

    def _flat_gradients(self, share: Tensor) -> Tensor:
        # those that are offloaded are in main memory by now
        return torch.empty_like(share) if self._is_offloaded else super()._flat_gradients(share)

    def _forget(self) -> None:
        self._summed = None


@final
class PlannedShards(Planned):
    """Stage 3: every rank has a shard of each weight, but of small ones."""

    def _split(self) -> None:
        trained = self._trained()
        sizes = {parameter: -(-parameter.numel() // self._num_ranks) for parameter in trained}
        self._shards = torch.empty(sum(sizes.values()), device=self._weight_device)
        self._comes_and_goes: dict[nn.Parameter, torch.Size] = {}
        # no gradient goes on from an embedding, so that nobody hears of the end of its backward pass
        self._stay = {p for m in self.module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        at = 0
        for parameter, size in sizes.items():
            shape = parameter.shape
            if self._num_ranks == 1 and self._weight_device == self._device:
                parameter.data = self._shards[at : at + size].view(shape)
            elif parameter.numel() <= PERSISTENT:
                parameter.data = torch.empty(shape, device=self._device)
            else:
                parameter.data = torch.empty(0, device=self._device)
                self._comes_and_goes[parameter] = shape
            at += size
        for group in self._groups:
            self._shares.append(torch.empty(sum(sizes[p] for p in group), device=self._state_device))
        self._bucket = self._new_bucket()
        self._summed = torch.empty(at, device=self._state_device)
        self._largest = max(sizes.values())

    def forward(self, batch: Batch) -> Tensor:
        for together in self._in_buckets():
            # ranks send into one tensor, out of which weights are copied
            arrived = torch.empty(
                sum(self._comes_and_goes[p].numel() for p in together) if self._num_ranks > 1 else 0,
                device=self._device,
            )
            for parameter in together:
                parameter.data = torch.empty(self._comes_and_goes[parameter], device=self._device)
            del arrived
        with _own_linear_layers():
            logits = super().forward(batch)
        if not torch.is_grad_enabled():
            self._let_go()
        return logits

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._move_into_bucket(parameter)
        if parameter in self._comes_and_goes and parameter not in self._stay:
            parameter.data = torch.empty(0, device=self._device)

    def _reduce(self) -> None:
        if len(self._waiting) > 1:
            torch.cat([gradient.reshape(-1) for _, gradient in self._waiting])
        self._waiting.clear()
        self._filled = 0

    def _ended(self) -> None:
        self._reduce()
        self._let_go()

    def _in_buckets(self) -> Iterator[list[nn.Parameter]]:
        """Weights that are gathered in one go."""
        together, numel = list[nn.Parameter](), 0
        for parameter, shape in self._comes_and_goes.items():
            if together and numel + shape.numel() > PREFETCHED:
                yield together
                together, numel = [], 0
            together.append(parameter)
            numel += shape.numel()
        yield together

    def _let_go(self) -> None:
        for parameter in self._comes_and_goes:
            parameter.data = torch.empty(0, device=self._device)

    def _measure(self) -> None:
        self._squared(self._largest)


class _Linear(torch.autograd.Function):
    """``LinearFunctionForZeroStage3``: what is saved is the input before autocast, and the weight itself."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kind = x.device.type
        context.autocast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind)}
        context.autocast["enabled"] = torch.is_autocast_enabled(kind)
        context.save_for_backward(x, weight, bias)
        y = x.matmul(weight.t())
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(context: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (slope,), (x, weight, bias), needed = slopes, context.saved_tensors, context.needs_input_grad
        flat = slope.reshape(-1, slope.shape[-1])
        with torch.autocast(**context.autocast):
            of_x = slope.matmul(weight) if needed[0] else None
            of_weight = flat.t().matmul(x.reshape(-1, x.shape[-1])) if needed[1] else None
            of_bias = slope.sum(list(range(slope.dim() - 1))) if bias is not None and needed[2] else None
        return of_x, of_weight, of_bias


@contextlib.contextmanager
def _own_linear_layers() -> Iterator[None]:
    """Inside, linear layers are DeepSpeed's, which puts them there in the same way."""
    torchs = functional.linear
    functional.linear = lambda x, weight, bias=None: _Linear.apply(x, weight, bias)  # type: ignore[assignment,no-untyped-call]
    try:
        yield
    finally:
        functional.linear = torchs


def planned(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    device: torch.device,
    num_ranks: int,
) -> Planned:
    """What stands in for DeepSpeed's engine, see ``Planned``."""
    stage = config["zero_optimization"]["stage"]
    made: Planned
    if stage == SHARDED:
        made = PlannedShards(module, optimizer, config, device, num_ranks)
    else:
        made = PlannedWhole(module, optimizer, config, device, num_ranks, shards_gradients=stage == 2)
    prime(optimizer)  # as ``States`` does
    made.forget()
    return made
