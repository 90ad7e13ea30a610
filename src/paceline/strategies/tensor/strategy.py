"""Tensor parallel: ranks share every block, each with some attention heads and some columns of the MLP.

Around it each sample is one of the data axis, whose ranks sum gradients as in DDP.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198, for random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from paceline.compare import Results, beyond_rounding, exactly, results, trial_of
from paceline.contract.errors import ModelError, RecipeError
from paceline.machine.device import PLANNED
from paceline.optim.gradients import Shards
from paceline.optim.state import Splitting
from paceline.optim.updates import build_updates
from paceline.seams import Batch, Build, Engine, World
from paceline.strategies.alone import untrained
from paceline.strategies.ddp.strategy import all_reduce_of
from paceline.strategies.strategy import Strategy, Training, torch_engine
from paceline.strategies.tensor.cut import SETTING, apply_cut, cuts_of, found_in
from paceline.strategies.tensor.shard import Cut

NOT_CAPTURED = "ranks meet inside each block, and a graph of one rank does not wait for another's"

NOT_COMPARED = "the cut model was not compared with the whole one, for which a GPU has no room"


@final
class TensorParallel(Strategy):
    """Every rank of the tensor axis a shard of each block; every rank of the data axis a share of each batch."""

    def why_not_retried(self) -> str:
        return "ranks that share blocks meet in every one, and one that is out of memory leaves the others waiting"

    def cut(self, build: Build) -> Build:
        """Cut the build's blocks over the ranks; the first rank's weights are everybody's.

        Raises:
            RecipeError: blocks that cannot be cut, heads that do not divide, or a model that computes something else
                once it is cut.
        """
        model, world = build.model, self.mesh.tensor
        # shards of different models would go unnoticed
        self.mesh.whole.broadcast_([*model.parameters(), *model.buffers()])
        for _ in found_in(model, build.blocks, world.size, self.mesh.whole.size):  # refused before anything is computed
            pass
        with exactly(build.device):
            plain = plain_results(build)
        # the others would wait inside blocks for a rank that is out of memory
        is_compared = not self.mesh.whole.any(plain is None)
        reason = difference(build, world, plain) if is_compared and plain is not None else None
        reason = next((found for found in world.gather(reason) if found), None)
        if reason is not None:
            why = f"cut over {world.size} processes it is another model: {reason}"
            raise RecipeError(f"{SETTING} = {world.size}", why, f"--set {SETTING}=1")
        apply_cut(model, build.blocks, world)
        execution = {**build.execution, "tensor": f"{world.size} shards of each block"}
        notices = build.notices if is_compared else (*build.notices, NOT_COMPARED)
        return replace(build, execution=execution, notices=notices, meets_in_forward=True)

    def engine(self, build: Build, training: Training) -> Engine:
        data, tensor, model = self.mesh.data, self.mesh.tensor, build.model
        cuts = cuts_of(model)
        shards = Shards(frozenset(p for name, p in model.named_parameters() if name in cuts), tensor)
        updates, gradients = build_updates(
            training.groups,
            training.recipe.optimizer,
            training.rates,
            build.device,
            untrained(build, training),
            all_reduce_of(build, training, data) if data.size > 1 else None,
            shards,
        )
        splitting = CutTensors(cuts, self.mesh.whole, tensor)
        return torch_engine(
            build, training, updates, gradients, self.mesh, not_captured=NOT_CAPTURED, splitting=splitting
        )


STRATEGY = TensorParallel


def plain_results(build: Build, dtype: torch.dtype | None = None) -> Results | None:
    """What a copy of the whole model makes of two samples, without dropout; None where it has no room.

    Args:
        dtype: that it computes in; None: fp32.
    """
    try:
        return results(_copy(build, dtype), build.forward, build.task, _samples(build))
    except torch.OutOfMemoryError:
        return None


def _copy(build: Build, dtype: torch.dtype | None) -> Any:
    return trial_of(build.model) if dtype is None else trial_of(build.model).to(dtype)


def _samples(build: Build) -> Batch:
    # any will do: what is wrong with a cut is wrong of all
    return build.layout.collate(np.zeros(2, np.int64))


def difference(build: Build, world: World, plain: Results) -> str | None:
    """Where a copy of the build's model differs once it is cut: logits, then gradients; None where it does not.

    Computed in fp32 without dropout, as packing is. The model and torch's random numbers stay as they are.

    Args:
        plain: what the whole model makes of the same samples.
    """
    names = [next(name for name, module in build.model.named_modules() if module is block) for block in build.blocks]

    def both(plain: Results, dtype: torch.dtype | None = None) -> tuple[Results, Results]:
        trial = _copy(build, dtype)
        apply_cut(trial, [trial.get_submodule(name) for name in names], world)
        cuts = cuts_of(trial)
        shards = {name: cuts[name].shard(whole) if name in cuts else whole for name, whole in plain.gradients.items()}
        return Results(plain.logits, shards), results(trial, build.forward, build.task, _samples(build))

    def in_fp64() -> tuple[Results, Results]:
        whole = plain_results(build, torch.float64)
        assert whole is not None  # fp64 of a small batch
        return both(whole, torch.float64)

    with exactly(build.device):
        name = type(build.model).__name__
        return beyond_rounding(name, *both(plain), in_fp64, ways=("cut", "whole"), anywhere=world.any)


@final
class CutTensors(Splitting):
    """Tensors of which ranks keep shards, and others, which are the same on all of them.

    Args:
        cuts: by the parameter's name, of those that are cut; states of the optimizer are cut as their parameter is.
        whole: all ranks of the run, of which the first has what is collected.
        tensor: the ranks along the tensor axis.
    """

    def __init__(self, cuts: Mapping[str, Cut], whole: World, tensor: World) -> None:
        self._cuts, self._whole, self._tensor = cuts, whole, tensor

    def shape(self, name: str, tensor: Tensor) -> torch.Size:
        cut = self._cut(name, tensor)
        return tensor.shape if cut is None else cut.whole_shape(tensor.shape)

    @torch.no_grad()
    def collected(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._check_alike({name: tensor for name, tensor in tensors.items() if self._cut(name, tensor) is None})
        found = {}
        for name, tensor in tensors.items():
            cut = self._cut(name, tensor)
            whole = tensor if cut is None else self._gathered(cut, tensor)
            if self._whole.is_first:
                found[name] = whole if cut is None else whole.cpu()
        return found

    def put(self, current: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        for name, tensor in current.items():
            cut = self._cut(name, tensor)
            tensor.copy_(saved[name] if cut is None else cut.shard(saved[name]))

    def _cut(self, name: str, tensor: Tensor) -> Cut | None:
        if name in self._cuts:
            return self._cuts[name]
        return self._cuts.get(name.rpartition(".")[0]) if tensor.ndim else None

    def _gathered(self, cut: Cut, shard: Tensor) -> Tensor:
        whole = shard.new_zeros(cut.whole_shape(shard.shape))
        cut.put(whole, shard)
        self._tensor.all_reduce(whole.view(-1).view(torch.uint8))  # as bytes: beside zeros no bit changes
        return whole

    def _check_alike(self, tensors: Mapping[str, Tensor]) -> None:
        """Make sure that all ranks have the same of what each keeps whole; a collective.

        Raises:
            ModelError: they have not.
        """
        if not tensors or next(iter(tensors.values())).device.type == PLANNED:
            return
        sums = [_bits(tensor) for tensor in tensors.values()]
        digest = hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()[:16]
        if len(set(self._tensor.gather(digest))) > 1:
            what = f"{SETTING} = {self._tensor.size}: ranks have come to differ in weights that each keeps whole"
            why = "something in this model, or on this machine, computes otherwise on each rank"
            raise ModelError(what, f"{why}; no checkpoint of it is saved", f"--set {SETTING}=1")


def _bits(tensor: Tensor) -> Tensor:
    """A sum over a tensor's bits that differs where one of them does, on its own device."""
    plain = tensor.detach().contiguous().view(-1)
    size = plain.element_size()
    number = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return plain.view(number).sum(dtype=torch.int64) if plain.numel() else torch.zeros((), dtype=torch.int64)
