"""Pipeline parallel: each rank has a stretch of the model's blocks, and micro-batches go from one to the next.

Around it each sample is one of the data axis, whose ranks sum the gradients of their stage as in DDP.

Source: Huang et al., GPipe, arXiv 1811.06965; Narayanan et al., arXiv 2104.04473. Why torch.distributed.pipelining is
not what carries it out: docs/decisions/0023-pipeline.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from paceline.compare import Results, beyond, exactly, tolerance_of
from paceline.compare.rounding import ROUGH
from paceline.contract.errors import RecipeError
from paceline.machine.device import PLANNED
from paceline.optim.gradients import Shards
from paceline.optim.state import Splitting
from paceline.optim.updates import build_updates
from paceline.recipe import Recipe
from paceline.seams import Batch, Build, Engine, Mesh
from paceline.strategies.alone import untrained
from paceline.strategies.ddp.strategy import all_reduce_of
from paceline.strategies.pipeline.find import (
    SETTING,
    WITHOUT,
    balanced,
    chain_of,
    check_blocks,
    cost_of,
    owners_of,
)
from paceline.strategies.pipeline.passes import PipelinePasses
from paceline.strategies.pipeline.schedule import CHUNKS, bubble
from paceline.strategies.pipeline.stage import Links, Stage, Stages, give_up
from paceline.strategies.strategy import Strategy, Training, torch_engine


@final
class StagedTensors(Splitting):
    """Tensors of which each rank of a pipeline has those of its own stages.

    Args:
        ranks: of the pipeline, by the name of a parameter or buffer; states of the optimizer are where their parameter
            is.
        mesh: of the run; its first rank has what is collected.
        links: of the pipeline.
    """

    def __init__(self, ranks: Mapping[str, int], mesh: Mesh, links: Links) -> None:
        self._ranks, self._mesh, self._link = ranks, mesh, links.results

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # what nobody knows is everybody's, so that it is missed or refused
        rank = self._mesh.pipe.rank
        return {name: tensor for name, tensor in tensors.items() if self._rank_of(name) in (rank, None)}

    @torch.no_grad()
    def collected(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pipe, own = self._mesh.pipe, self.own(tensors)
        described = {name: [list(one.shape), str(one.dtype).rpartition(".")[2]] for name, one in own.items()}
        of_all = pipe.gather(described)
        if self._mesh.data.rank > 0:
            return {}
        if pipe.rank > 0:
            for wait in [self._link.start_send(tensor, 0) for tensor in own.values()]:
                wait()
            return {}
        found = dict(own)
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        for rank in range(1, pipe.size):
            for name, (shape, dtype) in of_all[rank].items():
                buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                found[name] = self._link.receive_(buffer, rank).cpu()
        # in the order of the model, and behind it what only other ranks have named
        return {name: found[name] for name in [*tensors, *(name for name in found if name not in tensors)]}

    def put(self, current: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        for name, tensor in current.items():
            tensor.copy_(saved[name])

    def _rank_of(self, name: str) -> int | None:
        found = self._ranks.get(name)
        return self._ranks.get(name.rpartition(".")[0]) if found is None else found


NOT_CAPTURED = "ranks meet within each pass, and a graph of one rank does not wait for another's"

NOT_COMPARED = "the stages were not compared with the whole model, for which a GPU has no room"


@final
class Pipeline(Strategy):
    """Every rank of the pipe axis some stages; every rank of the data axis a share of each batch."""

    def __init__(self, mesh: Mesh, recipe: Recipe) -> None:
        super().__init__(mesh, recipe)
        self._schedule = recipe.parallel.schedule
        self._stages: Stages | None = None
        self._owners: Mapping[str, int] = {}

    def why_not_retried(self) -> str:
        return "ranks of a pipeline wait for each other in every pass, and for one that is out of memory too"

    def cut(self, build: Build) -> Build:
        """Leave each rank with its own stages; the first rank's weights are everybody's.

        Raises:
            RecipeError: blocks that are no chain or fewer than stages, weights of two stages, a batch norm, or a model
                that computes something else in stages.
        """
        model, pipe = build.model, self.mesh.pipe
        num_stages = pipe.size * CHUNKS[self._schedule]
        check_blocks(model, build.blocks, num_stages, pipe.size, self.mesh.whole.size)
        self.mesh.whole.broadcast_([*model.parameters(), *model.buffers()])
        model.eval()
        samples = _samples(build)
        passed: list[Tensor] = []
        chain = chain_of(model, build.blocks, lambda: passed.append(build.forward(model, samples)))
        firsts = balanced([cost_of(block) for block in build.blocks], num_stages)
        owners = owners_of(model, build.blocks, chain, firsts)
        all_stages = _stages_of(model, owners, firsts, len(build.blocks))
        kept = range(pipe.rank, num_stages, pipe.size)
        plain = _plain_results(build, samples)
        is_compared = not self.mesh.whole.any(plain is None)
        give_up(model, owners, kept)
        own = [_anchored(all_stages[index], model, owners) for index in kept]
        stages = Stages(model, own, chain, pipe, Links.of(pipe), num_outputs=passed[0].shape[1:])
        self._stages, self._owners = stages, owners
        staged = replace(build, forward=stages.staged(build.forward), meets_in_forward=True)
        if is_compared and plain is not None:
            self._compare(staged, stages, plain, samples)
        execution = {**build.execution, "pipeline": self._told(firsts, len(build.blocks))}
        notices = (*build.notices, *self._notices(), *(() if is_compared else (NOT_COMPARED,)))
        return replace(staged, execution=execution, notices=notices)

    def prepare(self, build: Build) -> Build:
        """The build whose passes go through this rank's blocks alone, whatever techniques have made of them."""
        stages = self._stages
        assert stages is not None  # ``cut`` was called
        stages.set_gates(build.blocks)
        return replace(build, forward=InStages(build, stages, self._owners))

    def engine(self, build: Build, training: Training) -> Engine:
        forward, data, pipe = build.forward, self.mesh.data, self.mesh.pipe
        assert isinstance(forward, InStages)  # what ``prepare`` made, and nothing comes after it
        ranks = {name: stage % pipe.size for name, stage in forward.owners.items()}
        own = {parameter for name, parameter in build.model.named_parameters() if ranks[name] == pipe.rank}
        training = _of_own(training, own)
        updates, gradients = build_updates(
            training.groups,
            training.recipe.optimizer,
            training.rates,
            build.device,
            untrained(build, training),
            all_reduce_of(build, training, data) if data.size > 1 else None,
            Shards(frozenset(own), pipe),
        )
        return torch_engine(
            build,
            training,
            updates,
            gradients,
            self.mesh,
            not_captured=NOT_CAPTURED,
            splitting=StagedTensors(ranks, self.mesh, forward.stages.links),
            passes=PipelinePasses(forward.stages, self._schedule, self._num_microbatches),
        )

    def _compare(self, build: Build, stages: Stages, plain: Results, samples: Batch) -> None:
        """Refuse stages that compute something else than the whole model.

        Raises:
            RecipeError: they do.
        """
        remove = stages.set_gates(build.blocks)
        try:
            with exactly(build.device):
                reason = None if build.device.type == PLANNED else _difference(build, stages, plain, samples)
        finally:
            remove()
        reason = next((found for found in self.mesh.whole.gather(reason) if found), None)
        if reason is not None:
            why = f"in {self.mesh.pipe.size} stages it is another model: {reason}"
            raise RecipeError(f"{SETTING} = {self.mesh.pipe.size}", why, WITHOUT)

    @property
    def _num_microbatches(self) -> int:
        """Those of a full step."""
        loop, shares = self.recipe.loop, self.mesh.data.size
        share = -(-loop.batch_size // shares)
        return -(-share // min(loop.micro_batch_size or share, share))

    def _told(self, firsts: Sequence[int], num_blocks: int) -> str:
        sizes = " + ".join(str(end - first) for first, end in zip(firsts, [*firsts[1:], num_blocks], strict=True))
        share, count = bubble(self._schedule, self.mesh.pipe.size, self._num_microbatches), self._num_microbatches
        of = f"{count} micro-batch{'es' if count > 1 else ''}"
        return f"{len(firsts)} stages of {sizes} blocks, {self._schedule}, {of} a step: {share:.0%} of it waiting"

    def _notices(self) -> tuple[str, ...]:
        count, ranks = self._num_microbatches, self.mesh.pipe.size
        if count >= ranks:
            return ()
        size = max(1, -(-self.recipe.loop.batch_size // self.mesh.data.size) // (4 * ranks))
        how = "one stage computes while the others wait" if count == 1 else "stages wait for each other"
        told = f"{SETTING} = {ranks}: a step has {count} micro-batch{'es' if count > 1 else ''}, so {how}"
        return (f"{told}; --set loop.micro_batch_size={size} keeps them busier",)


STRATEGY = Pipeline


@final
class InStages:
    """A build's forward pass through the stages of a rank.

    Args:
        build: whose forward pass it is.
        stages: of this rank.
        owners: by name, the stage of each parameter and buffer.
    """

    def __init__(self, build: Build, stages: Stages, owners: Mapping[str, int]) -> None:
        self._forward, self.stages, self.owners = build.forward, stages, owners

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._forward(model, batch)


def _samples(build: Build) -> Batch:
    # any will do: what is wrong with stages is wrong of all
    return build.layout.collate(np.zeros(2, np.int64))


def _plain_results(build: Build, samples: Batch) -> Results | None:
    """What the whole model makes of the samples, in evaluation mode; None where it has no room."""
    try:
        with exactly(build.device):
            logits = build.forward(build.model, samples)
            trained = {name: one for name, one in build.model.named_parameters() if one.requires_grad}
            loss = build.task.loss_sum(logits, samples)
            found = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
            return Results(logits.detach(), dict(zip(trained, found, strict=True)))
    except torch.OutOfMemoryError:
        return None


def _difference(build: Build, stages: Stages, plain: Results, samples: Batch) -> str | None:
    """Where this rank's stages differ from the whole model: logits of the last, gradients of each."""
    made, names = [], {parameter: name for name, parameter in build.model.named_parameters()}
    for stage in stages.own:
        with stages.at(stage):
            made.append(build.forward(build.model, samples))
    gradients: dict[str, Tensor] = {}
    for stage, logits in zip(reversed(stages.own), reversed(made), strict=True):
        own = {names[one]: one for one in stage.trained}
        loss = build.task.loss_sum(logits, samples)
        found = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
        gradients |= dict(zip(own, found, strict=True))
    stages.flush()
    logits = made[-1].detach() if stages.own[-1].is_last else plain.logits
    expected = Results(plain.logits, {name: plain.gradients[name] for name in gradients})
    dtype = plain.logits.dtype
    tolerance = tolerance_of(build.device, dtype) if dtype in (torch.float32, torch.float64) else ROUGH
    return beyond(type(build.model).__name__, expected, Results(logits, gradients), tolerance, ("staged", "whole"))


def _stages_of(model: nn.Module, owners: Mapping[str, int], firsts: Sequence[int], num_blocks: int) -> list[Stage]:
    """All stages of the model.

    Raises:
        RecipeError: one of them has nothing to train.
    """
    trained = [owners[name] for name, parameter in model.named_parameters() if parameter.requires_grad]
    idle = [stage for stage in range(len(firsts)) if stage not in trained]
    if idle:
        why = f"stage {idle[0] + 1} of {len(firsts)} has nothing to train, and would only compute for the others"
        raise RecipeError(f"{SETTING} with frozen blocks", why, f"--set model.train=all, or --set {SETTING}=1")
    ends = [*firsts[1:], num_blocks]
    return [
        Stage(index, first, end, is_last=end == num_blocks)
        for index, (first, end) in enumerate(zip(firsts, ends, strict=True))
    ]


def _anchored(stage: Stage, model: nn.Module, owners: Mapping[str, int]) -> Stage:
    """The stage with the trained weights that this rank has of it."""
    own = [one for name, one in model.named_parameters() if owners[name] == stage.index and one.requires_grad]
    return replace(stage, trained=tuple(own))


def _of_own(training: Training, own: set[nn.Parameter]) -> Training:
    """The training of this rank's weights alone."""
    groups = [
        replace(group, parameters=tuple(parameter for parameter in group.parameters if parameter in own))
        for group in training.groups
    ]
    kept = [index for index, group in enumerate(groups) if group.parameters]
    return replace(training, groups=[groups[index] for index in kept], rates=training.rates[:, kept])
