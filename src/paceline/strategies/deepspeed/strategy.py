"""DeepSpeed: ZeRO's three stages and its offload, by DeepSpeed's own engine; see ``engine`` for how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.machine.device import PLANNED, is_gpu
from paceline.machine.disk import require_disk
from paceline.optim.optimizer import build_optimizer
from paceline.optim.scaling import Dynamic, Unscaled
from paceline.seams import Batch, Build, Engine, Forward
from paceline.strategies.deepspeed.engine import DeepSpeedEngine, Passes
from paceline.strategies.deepspeed.first import difference, plain_results
from paceline.strategies.deepspeed.library import SHARDED, configuration, initialized, library, stage_of
from paceline.strategies.deepspeed.planned import planned
from paceline.strategies.deepspeed.states import ShardedWeights, ShardsOnDisk, States, WholeWeights
from paceline.strategies.strategy import Strategy, Training

WITHOUT = (
    "--set parallel.strategy=auto --set parallel.stage=null --set parallel.offload=none"
    " --set parallel.offload_folder=null"
)

EQUAL = "the first pass in DeepSpeed's engine equals a plain one"
NOT_HERE = "a plan has nothing to compare"
NOT_COMPARED = "not with a plain pass, for which a GPU has no room"


@final
class Zero(Strategy):
    """Every rank a shard of the states; of gradients from stage 2, of weights in stage 3."""

    def why_not_retried(self) -> str:
        return "DeepSpeed sums gradients within the passes, and one that is out of memory leaves the others waiting"

    def prepare(self, build: Build) -> Build:
        """The build with a forward pass that goes through DeepSpeed's engine, once there is one.

        Raises:
            RecipeError: deepspeed is not installed, or cannot reach the disk that is asked for.
        """
        part = self.recipe.parallel
        if build.device.type != PLANNED:
            if part.offload_folder is not None:
                require_disk(part.offload_folder, on_gpu=is_gpu(build.device))
            library(build.device)
        stage = stage_of(part)
        away = "" if part.offload == "none" else f", {part.offload} in main memory"
        away += "" if part.offload_folder is None else ", states on a disk"
        execution = {**build.execution, "parallel": f"deepspeed: ZeRO stage {stage}{away}"}
        through = Through(build.model, build.forward)
        return replace(build, forward=through, execution=execution, meets_in_forward=stage == SHARDED)

    def engine(self, build: Build, training: Training) -> Engine:
        world, model, recipe, device = self.mesh.data, build.model, training.recipe, build.device
        part, through = recipe.parallel, build.forward
        assert isinstance(through, Through)  # what ``prepare`` made, and nothing comes after it
        # shards of different models would go unnoticed
        world.broadcast_([*model.parameters(), *model.buffers()])
        # a fused update takes what is on a GPU; what is offloaded is not
        fused = is_gpu(device) and part.offload == "none" and recipe.optimizer.type != "sgd"
        optimizer = build_optimizer(training.groups, recipe.optimizer, fused=fused)
        num_trained = sum(parameter.numel() for group in training.groups for parameter in group.parameters)
        config = configuration(part, recipe.optimizer.clip_norm, num_trained)
        if device.type == PLANNED:
            # a plan, which saves nothing and compares nothing
            theirs: Any = planned(Passes(model, through.plain), optimizer, config, device, world.size)
            through.engine = theirs
            return self._around(theirs, optimizer, None, build, training, lambda: None, NOT_HERE)
        plain = plain_results(build, through.plain, world)
        theirs, close = initialized(Passes(model, through.plain), optimizer, config, device, world)
        through.engine = theirs
        kind: type[States] = ShardedWeights if stage_of(part) == SHARDED else WholeWeights
        if part.offload_folder is not None:
            kind = ShardsOnDisk
        states = kind(model, theirs, optimizer, library(device), world)
        if plain is not None:
            reason = difference(theirs, library(device).utils.safe_get_full_grad, build, *plain, world)
            if reason is not None:
                close()
                why = f"in its engine this is another model: {reason}"
                raise RecipeError(f"parallel.strategy = deepspeed, stage {stage_of(part)}", why, WITHOUT)
            states.forget()
        compared = EQUAL if plain is not None else NOT_COMPARED
        return self._around(theirs, optimizer, states, build, training, close, compared)

    def _around(
        self,
        theirs: Any,
        optimizer: torch.optim.Optimizer,
        states: States | None,
        build: Build,
        training: Training,
        close: Callable[[], None],
        compared: str,
    ) -> Engine:
        return DeepSpeedEngine(
            theirs,
            optimizer,
            states,
            training.objective,
            lambda batch: build.forward(build.model, batch),
            Dynamic(build.device, training.recipe.optimizer.loss_scale) if build.loss_scaling else Unscaled(),
            training.rates,
            build.layout.collate,
            seed=training.recipe.seed,
            world=self.mesh.data,
            device=build.device,
            close=close,
            compared=compared,
        )


STRATEGY = Zero


@final
class Through:
    """A build's forward pass by way of DeepSpeed's engine; before there is one, as it is.

    Args:
        model: whose passes these are; others, such as a trial's copy, never go through the engine.
        plain: the build's forward pass.
    """

    def __init__(self, model: nn.Module, plain: Forward) -> None:
        self._model, self.plain = model, plain
        self.engine: nn.Module | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.engine is None or model is not self._model:
            return self.plain(model, batch)
        logits: Tensor = self.engine(batch)
        return logits
