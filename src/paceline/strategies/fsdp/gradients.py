"""Gradients and updates of a model whose weights are sharded over ranks: each rank works on its shards alone.

A shard is a plain tensor, and to an optimizer it is a parameter like any other. Every update of ours therefore works on
shards as it is; elementwise ones, such as Adam's, give each number what it would get in one process.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.contract.errors import UserError
from paceline.optim.ema import EMA
from paceline.optim.flat import FlatLayout
from paceline.optim.gradients import Gradients
from paceline.optim.optimizer import ParameterGroup, build_optimizer
from paceline.optim.updates import DeviceGated, HostGated, Names, Updates
from paceline.recipe.parts import EmaPart, OptimizerPart
from paceline.seams import World
from paceline.strategies.fsdp.shard import forget_gradients, join_streams

Shards = Mapping[nn.Parameter, nn.Parameter]
"""A model's trained parameters, which are DTensors, each with this rank's shard of it: same memory, no DTensor."""


@torch.no_grad()
def shards_of(parameters: Sequence[nn.Parameter]) -> Shards:
    """Each parameter's shard on this rank as a parameter of its own."""
    # like all that is sharded, its gradient may be on another device than what computes
    return {parameter: nn.Parameter(_local(parameter)) for parameter in parameters}


class _Summed(Gradients):
    """The shards' gradients. torch's FSDP sums and scatters them in a step's last backward pass, block by block.

    Before that, the gradients of earlier micro-batches are kept whole, as no rank hears of another. A parameter without
    a gradient counts as zeros; the ranks must agree on which those are.

    Args:
        model: what ``fully_shard`` was applied to.
        shards: of the parameters that are trained.
        world: all ranks.
        copies: how often each shard is there: groups of ranks that hold a whole model each.
        device: that computes.
    """

    ranks_meet = True

    def __init__(self, model: nn.Module, shards: Shards, world: World, *, copies: int, device: torch.device) -> None:
        self._model: Any = model
        self._shards, self._world, self._copies, self._device = shards, world, copies, device
        self._are_summed = True

    def add(self, loss: Tensor, *, first: bool, last: bool) -> None:
        if first:
            self.zero()
        self._model.set_requires_gradient_sync(last)
        self._are_summed = False
        torch.autograd.backward(loss)
        if last:
            for parameter, shard in self._shards.items():
                if _local(parameter).data_ptr() != shard.data_ptr():
                    raise RuntimeError("a sharded weight has moved: the optimizer would change what nobody reads")
            self._take()
            self._are_summed = True
        join_streams(self._model, self._device)

    @abstractmethod
    def _take(self) -> None:
        """Hand the gradients that the backward pass has left over to the shards."""

    def zero(self) -> None:
        if not self._are_summed:
            forget_gradients(self._model)
            self._are_summed = True

    def _global_norm(self, squares: Tensor) -> Tensor:
        """
        Args:
            squares: sum of this rank's, in fp64: squares of small fp32 numbers may vanish.
        """
        return (self._world.all_reduce(squares.to(self._device)) / self._copies).sqrt().float()


@final
class ShardedGradients(_Summed):
    """Gradients of shards where they are computed with: in one flat buffer a number format, which stays where it is.

    FSDP adds what it has summed to the ``.grad`` that a weight has, so that each is there from the start, as zeros, and
    a captured step finds it where it was.
    """

    def __init__(self, model: nn.Module, shards: Shards, world: World, *, copies: int, device: torch.device) -> None:
        super().__init__(model, shards, world, copies=copies, device=device)
        self._flat = FlatLayout([tuple(shards.values())]).allocate()
        for (parameter, shard), view in zip(shards.items(), self._flat.views, strict=True):
            shard.grad, parameter.grad = view, _sharded_like(parameter, view)
        # of a weight FSDP writes to it, of its shard the optimizer reads it
        self._users = (*shards, *shards.values())
        self._placed = tuple(user.grad for user in self._users)

    def _take(self) -> None:
        pass  # they are there

    def check(self) -> None:
        # every step pays for this: no loop in Python
        if not all(map(is_, map(attrgetter("grad"), self._users), self._placed)):
            raise _taken_away("a parameter's .grad")

    def norm(self) -> Tensor:
        norms = [torch.linalg.vector_norm(buffer, dtype=torch.float64) for buffer in self._flat.buffers]
        return self._global_norm(torch.stack(norms).square().sum())

    def scale(self, factor: Tensor) -> None:
        for buffer in self._flat.buffers:
            buffer.mul_(factor)

    def zero(self) -> None:
        super().zero()
        for buffer in self._flat.buffers:
            buffer.zero_()


@final
class OffloadedGradients(_Summed):
    """Gradients of shards in main memory: new ones each step, since FSDP waits for a sum to what is there already."""

    def __init__(self, model: nn.Module, shards: Shards, world: World, *, copies: int, device: torch.device) -> None:
        super().__init__(model, shards, world, copies=copies, device=device)
        self._found: tuple[Tensor, ...] = ()

    def check(self) -> None:
        now = tuple(shard.grad for shard in self._shards.values())
        if len(now) != len(self._found) or any(a is not b for a, b in zip(now, self._found, strict=True)):
            raise _taken_away("a shard's .grad")

    def norm(self) -> Tensor:
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(self._found)])
        return self._global_norm(norms.square().sum())

    def scale(self, factor: Tensor) -> None:
        torch._foreach_mul_(self._found, factor.to(self._found[0].device))

    def zero(self) -> None:
        super().zero()
        for parameter, shard in self._shards.items():
            parameter.grad = shard.grad = None
        self._found = ()

    @torch.no_grad()
    def _take(self) -> None:
        for parameter, shard in self._shards.items():
            shard.grad = torch.zeros_like(shard) if parameter.grad is None else _local(parameter.grad)
        self._found = tuple(shard.grad for shard in self._shards.values() if shard.grad is not None)


def _taken_away(what: str) -> UserError:
    return UserError(
        f"{what} is no longer the engine's",
        "zero_grad() or an assignment took it away, so clipping and loss scaling would not see it",
        "remove the call: update() forgets the gradients by itself",
    )


@final
class ShardedUpdates(Updates):
    """Updates of the shards, known to the outside by the parameters that they are shards of.

    Args:
        shards: of the trained parameters.
        updates: of the shards.
    """

    def __init__(self, shards: Shards, updates: Updates) -> None:
        self._shards, self._updates = shards, updates
        self.parameters = tuple(shards)
        self.capturable = updates.capturable

    def apply(self, gradients: Gradients, factor: Tensor, finite: Tensor) -> None:
        self._updates.apply(gradients, factor, finite)

    @property
    def applied(self) -> int:
        return self._updates.applied

    @applied.setter
    def applied(self, count: int) -> None:
        self._updates.applied = count

    def prime(self) -> None:
        self._updates.prime()

    def tensors(self, names: Names) -> dict[str, Tensor]:
        """As of every update; what is shaped like a shard is one too, and a DTensor of the parameter's whole shape."""
        parameters = {names[parameter]: parameter for parameter in self._shards}
        found = {}
        for key, tensor in self._updates.tensors(self._named(names)).items():
            parameter = parameters[key.rpartition(".")[0]]
            found[key] = _sharded_like(parameter, tensor) if tensor.ndim else tensor
        return found

    def numbers(self, names: Names) -> dict[str, float]:
        return self._updates.numbers(self._named(names))

    def put_numbers(self, names: Names, numbers: Mapping[str, float]) -> None:
        self._updates.put_numbers(self._named(names), numbers)

    @property
    def ema(self) -> EMA | None:
        return self._updates.ema

    def keep(self, ema: EMA | EmaPart) -> None:
        self._updates.keep(ema)

    def averages(self, names: Names) -> dict[str, Tensor]:
        parameters = {names[parameter]: parameter for parameter in self._shards}
        found = self._updates.averages(self._named(names))
        return {name: _sharded_like(parameters[name], tensor) for name, tensor in found.items()}

    def _named(self, names: Names) -> Names:
        return {shard: names[parameter] for parameter, shard in self._shards.items()}


def build_sharded_updates(
    model: nn.Module,
    groups: Sequence[ParameterGroup],
    part: OptimizerPart,
    rates: NDArray[np.float64],
    device: torch.device,
    world: World,
) -> tuple[Updates, Gradients]:
    """The recipe's optimizer over this rank's shards, behind its gate, and the gradients it works on.

    Args:
        model: what ``fully_shard`` was applied to.
        groups: what ``parameter_groups`` found in it.
        rates: [steps, groups].
        device: that computes; shards may be in main memory.
    """
    shards = shards_of([parameter for group in groups for parameter in group.parameters])
    local = [replace(group, parameters=tuple(shards[p] for p in group.parameters)) for group in groups]
    first: Any = next(iter(shards))
    # where the shards are the host's, so is the gate; one wait a step, among those for weights and gradients
    on_host = first.device.type == "cpu"
    optimizer = build_optimizer(local, part, fused=not on_host)
    updates = HostGated(optimizer, rates) if on_host else DeviceGated(optimizer, rates, device)
    mesh = first.device_mesh
    copies = 1 if mesh.ndim == 1 else mesh.size(0)
    kind = ShardedGradients if first.device.type == device.type else OffloadedGradients
    gradients = kind(model, shards, world, copies=copies, device=device)
    # states are there from the start: made by the first update, in the pool of captured steps, they would be taken for
    # something that a step leaves behind, and all that was captured would be dropped
    updates.rehearse()
    return ShardedUpdates(shards, updates), gradients


@torch.no_grad()
def _local(tensor: Any) -> Tensor:
    # no detach(), which a DTensor takes forty times as long for, hundreds of times a step
    return tensor.to_local()  # type: ignore[no-any-return]


def _sharded_like(parameter: Any, local: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
