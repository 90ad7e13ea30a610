"""Gradients and updates of a model whose weights are sharded over ranks: each rank works on its shards alone.

A shard is a plain tensor, and to an optimizer it is a parameter like any other. Every update of ours therefore works on
shards as it is; elementwise ones, such as Adam's, give each number what it would get in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.engine.gradients import Gradients
from paceline.engine.optimizer import ParameterGroup, build_optimizer
from paceline.engine.updates import DeviceGated, HostGated, Names, Updates
from paceline.errors import UserError
from paceline.recipe.parts import OptimizerPart
from paceline.seams import World
from paceline.techniques.fsdp import forget_gradients

Shards = Mapping[nn.Parameter, nn.Parameter]
"""A model's trained parameters, which are DTensors, each with this rank's shard of it: same memory, no DTensor."""


@torch.no_grad()
def shards_of(parameters: Sequence[nn.Parameter]) -> Shards:
    """Each parameter's shard on this rank as a parameter of its own."""
    # like all that is sharded, its gradient may be on another device than what computes
    return {parameter: nn.Parameter(_local(parameter)) for parameter in parameters}


@final
class ShardedGradients(Gradients):
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

    def __init__(self, model: nn.Module, shards: Shards, world: World, *, copies: int, device: torch.device) -> None:
        self._model: Any = model
        self._shards, self._world, self._copies, self._device = shards, world, copies, device
        self._found: tuple[Tensor, ...] = ()
        self._are_summed = True

    def add(self, loss: Tensor, *, first: bool, last: bool) -> None:
        if first:
            self.zero()
        self._model.set_requires_gradient_sync(last)
        self._are_summed = False
        torch.autograd.backward(loss)
        if last:
            self._take()

    def check(self) -> None:
        now = tuple(shard.grad for shard in self._shards.values())
        if len(now) != len(self._found) or any(a is not b for a, b in zip(now, self._found, strict=True)):
            raise UserError(
                "a shard's .grad is no longer the engine's",
                "zero_grad() or an assignment took it away, so clipping and loss scaling would not see it",
                "remove the call: update() forgets the gradients by itself",
            )

    def norm(self) -> Tensor:
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(self._found)])
        # squares of small fp32 numbers may vanish
        square = norms.square().sum().to(self._device)
        return (self._world.sum_(square) / self._copies).sqrt().float()

    def scale(self, factor: Tensor) -> None:
        torch._foreach_mul_(self._found, factor.to(self._found[0].device))

    def zero(self) -> None:
        if not self._are_summed:
            forget_gradients(self._model)
            self._are_summed = True
        for parameter, shard in self._shards.items():
            parameter.grad = shard.grad = None
        self._found = ()

    @torch.no_grad()
    def _take(self) -> None:
        """Hand the gradients that the backward pass has left over to the shards."""
        found = []
        for parameter, shard in self._shards.items():
            if _local(parameter).data_ptr() != shard.data_ptr():
                raise RuntimeError("a sharded weight has moved: the optimizer would change what nobody reads")
            shard.grad = torch.zeros_like(shard) if parameter.grad is None else _local(parameter.grad)
            found.append(shard.grad)
        self._found, self._are_summed = tuple(found), True


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
    return ShardedUpdates(shards, updates), ShardedGradients(model, shards, world, copies=copies, device=device)


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
