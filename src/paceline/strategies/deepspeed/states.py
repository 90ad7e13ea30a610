"""Weights and states of an optimizer under DeepSpeed: whole, out and in, by name; never a file of its own.

Stage 3 keeps a shard of each weight, all stages keep shards of the optimizer's states. What leaves is whole and plain,
so that a checkpoint of any number of ranks is one of every other, and of every other strategy.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.optim.state import copy_into, prime, require_same, without_wrappers
from paceline.seams import World

Keys = tuple[str, ...]
"""Names of an optimizer's states that are as large as a weight, as torch calls them."""


class States(ABC):
    """What a run has learned, and what its optimizer remembers.

    Args:
        model: that DeepSpeed has taken over.
        engine: DeepSpeed's, around it.
        optimizer: that was given to it; knows of shards alone by now.
        found: the package.
        world: all ranks.
    """

    def __init__(
        self, model: nn.Module, engine: Any, optimizer: torch.optim.Optimizer, found: Any, world: World
    ) -> None:
        self._model, self._zero, self._optimizer, self._found = model, engine.optimizer, optimizer, found
        self._world = world
        self._primed()

    @property
    @abstractmethod
    def shards(self) -> Sequence[Tensor]:
        """What the optimizer updates: flat shards, one or more a group of parameters."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Weights and buffers by their plain names, whole; of split ones on the first rank alone. A collective."""

    @abstractmethod
    def put_weights(self, saved: Mapping[str, Tensor]) -> None:
        """Take up whole weights and buffers, which every rank has, by their plain names. A collective.

        Raises:
            CheckpointError: names or shapes differ.
        """

    def optimizer_states(self, applied: int) -> dict[str, Tensor]:
        """``parameter.key`` -> state, whole, on the first rank alone. A collective.

        Args:
            applied: updates so far.
        """
        saved = {}
        for name, parameter in self._trained():
            for key in self._keys():
                tensor = self._found.utils.safe_get_full_optimizer_state(parameter, key)
                if self._world.is_first:
                    saved[f"{name}.{key}"] = tensor.cpu()
            if self._world.is_first and self._counts():
                saved[f"{name}.step"] = torch.tensor(float(applied))
        return saved

    def put_optimizer_states(self, saved: Mapping[str, Tensor], applied: int) -> None:
        """Take up whole states, which every rank has. A collective.

        Raises:
            CheckpointError: names or shapes differ.
        """
        whole = {name: self._shape_of(parameter) for name, parameter in self._trained()}
        states = {f"{name}.{key}": shape for name, shape in whole.items() for key in self._keys()}
        steps = {f"{name}.step": torch.Size() for name in whole} if self._counts() else {}
        placeholders = {name: torch.empty(shape, device="meta") for name, shape in (states | steps).items()}
        require_same(placeholders, saved, "optimizer")
        for name, parameter in self._trained():
            for key in self._keys():
                self._put_state(parameter, key, saved[f"{name}.{key}"])
        self._count(applied)

    @abstractmethod
    def _put_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Copy this rank's share of a whole state."""

    @abstractmethod
    def _shape_of(self, parameter: nn.Parameter) -> torch.Size:
        """Its whole shape."""

    @contextlib.contextmanager
    def _with_shards(self) -> Iterator[None]:
        """Inside, the optimizer's groups have the shards that it is to update."""
        yield

    @torch.no_grad()
    def _primed(self) -> None:
        """Have the optimizer allocate its states now: they are there to be loaded, and no first step takes longer."""
        without = [shard for shard in self.shards if shard.grad is None]
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0  # no weight changes
        with self._with_shards():
            prime(self._optimizer)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for shard in without:
            shard.grad = None
        self.forget()

    def forget(self) -> None:
        """Have the optimizer remember nothing, as before a first step."""
        for shard in self.shards:
            with self._in_memory(shard):
                for value in self._optimizer.state[shard].values():
                    if isinstance(value, Tensor):
                        value.zero_()  # SGD has taken decay for a gradient

    @contextlib.contextmanager
    def _in_memory(self, shard: Tensor) -> Iterator[None]:
        """Inside, the shard and its states are there to be changed."""
        yield

    def _count(self, applied: int) -> None:
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(applied)

    def _counts(self) -> bool:
        return any("step" in state for state in self._optimizer.state.values())

    def _keys(self) -> Keys:
        states = (self._optimizer.state[shard] for shard in self.shards)
        return tuple(key for key, value in next(states, {}).items() if isinstance(value, Tensor) and value.ndim)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, one) for name, one in self._model.named_parameters() if one.requires_grad)


@final
class WholeWeights(States):
    """Stages 1 and 2: every rank has the weights, and a shard of their fp32 copy and its states."""

    @property
    def shards(self) -> Sequence[Tensor]:
        return list(self._zero.single_partition_of_fp32_groups)

    def weights(self) -> dict[str, Tensor]:
        return without_wrappers(self._model.state_dict())

    def put_weights(self, saved: Mapping[str, Tensor]) -> None:
        copy_into(self.weights(), saved, "model")
        self._zero.refresh_fp32_params()

    def _put_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        self._found.utils.safe_set_full_optimizer_state(parameter, value, key)

    def _shape_of(self, parameter: nn.Parameter) -> torch.Size:
        return parameter.shape

    def _primed(self) -> None:
        super()._primed()
        # what reads a state by its parameter looks into this table, which is made in a first step otherwise
        self._zero._lazy_init_hp_params_optimizer_state()


class ShardedWeights(States):
    """Stage 3: every rank has a shard of each weight and of its states."""

    @property
    def shards(self) -> Sequence[Tensor]:
        return list(self._zero.fp32_partitioned_groups_flat)

    def weights(self) -> dict[str, Tensor]:
        whole = {}
        for name, tensor in self._named():
            with self._gathered(tensor):
                if self._world.is_first:
                    # a gathered weight is let go of again; one at a time, and in main memory
                    whole[name] = tensor.detach().cpu().clone() if isinstance(tensor, nn.Parameter) else tensor
        return without_wrappers(whole)

    @torch.no_grad()
    def put_weights(self, saved: Mapping[str, Tensor]) -> None:
        current = without_wrappers(dict(self._named()))
        placeholders = {name: torch.empty(self._shape_of(one), device="meta") for name, one in current.items()}
        require_same(placeholders, saved, "model")
        saved = without_wrappers(saved)
        for name, tensor in current.items():
            with self._gathered(tensor, changed=True):
                tensor.copy_(saved[name])
        self._refresh()

    def _refresh(self) -> None:
        """Have the shards that are updated be those of the weights again."""
        self._zero.refresh_fp32_params()

    def _gathered(self, tensor: Tensor, *, changed: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Inside, the weight is whole on all ranks; ``changed``: the first rank's is everybody's behind it."""
        if not isinstance(tensor, nn.Parameter):
            return contextlib.nullcontext()
        gathered: contextlib.AbstractContextManager[Any] = self._found.zero.GatheredParameters(
            [tensor], modifier_rank=0 if changed else None
        )
        return gathered

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """What a state dict has, but in shards: also a shared weight under each of its names."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            yield name, named.get(name, tensor)

    def _put_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        shard: Any = parameter
        own = self._found.utils.safe_get_local_optimizer_state(parameter, key)
        size = shard.ds_tensor.numel()
        piece = value.to(own).flatten()[size * self._world.rank :][:size]
        own = own.clone().zero_()  # a last shard is filled up with zeros
        own[: piece.numel()] = piece
        self._found.utils.safe_set_local_optimizer_state(parameter, own, key)

    def _shape_of(self, parameter: Any) -> torch.Size:
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    @contextlib.contextmanager
    def _with_shards(self) -> Iterator[None]:
        self._zero._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            self._zero._clear_fp32_optimizer_param_groups()


@final
class ShardsOnDisk(ShardedWeights):
    """Stage 3 whose shards and states are on a disk, but for the small; DeepSpeed reads them group by group."""

    @contextlib.contextmanager
    def _in_memory(self, shard: Tensor) -> Iterator[None]:
        index = self._index(shard)
        if not self._zero._swappable_optimizer_subgroup(index):
            yield
            return
        self._zero._optimizer_states_and_gradient_swap_in(index)
        try:
            yield
        finally:
            self._zero._optimizer_states_and_gradient_swap_out(index)

    @torch.no_grad()
    def _primed(self) -> None:
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0  # no weight changes
        for index, shard in enumerate(self.shards):
            with self._in_memory(shard):
                gradient, shard.grad = shard.grad, torch.zeros_like(shard)
                self._zero._optimizer_step(index)
                shard.grad = gradient
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.forget()

    @torch.no_grad()
    def _refresh(self) -> None:
        for shard, weights in zip(self.shards, self._zero.fp16_partitioned_groups_flat, strict=True):
            with self._in_memory(shard):
                shard.copy_(weights)

    def _index(self, shard: Tensor) -> int:
        return next(index for index, one in enumerate(self.shards) if one is shard)
