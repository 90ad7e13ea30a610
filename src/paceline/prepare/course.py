"""The steps of a run: which samples each takes, how many there are, and the largest among them.

Worked out in this one place for ``train``, ``plan`` and ``memory``, so that what is planned is what is done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import final

import torch

from paceline.contract.errors import RecipeError
from paceline.data.dataset import Dataset, Tokens
from paceline.data.mixing import draw, partners
from paceline.data.order import OrderState, ShuffledOrder, StepPlan
from paceline.data.sampler import sampling_weights
from paceline.engine.statistics import check_smallest, fewest_together
from paceline.machine.device import is_gpu
from paceline.recipe import Recipe
from paceline.seams import Build, Ids, Mesh, StepInput
from paceline.strategies import strategy_for

LOOKED_AHEAD = 2000
"""Steps among which the largest is looked for: on 8 ranks a fifth of a second at 32 texts a rank, 0.6 s at 128."""


MOST_STEPS = 50_000_000
"""Steps of a run. Their learning rates are computed before the first: of more, the table would fill the memory."""


@final
class Course:
    """The steps that one rank of a run takes, in their order.

    Args:
        recipe: checked against this machine.
        dataset: with a training split.
        build: of the recipe; knows the sizes of samples and what their losses are divided by.
        mesh: the ranks; samples are split over its data axis.

    Raises:
        RecipeError: there is no step, or more than ``MOST_STEPS``.
    """

    def __init__(self, recipe: Recipe, dataset: Dataset, build: Build, mesh: Mesh) -> None:
        loop, train = recipe.loop, dataset.splits["train"]
        self._recipe, self._dataset, self._build, self._mesh = recipe, dataset, build, mesh
        self.strategy = strategy_for(recipe, mesh)
        self._order = ShuffledOrder(
            train,
            micro_batch_size=loop.micro_batch_size or loop.batch_size,
            shuffle=loop.shuffle,
            drop_last=loop.drop_last,
            lengths=dataset.inputs.lengths if isinstance(dataset.inputs, Tokens) else None,
            # alone, a sample may have no spread to be normalised by
            fewest=fewest_together(build.model),
            weights=sampling_weights(dataset.labels[train]) if loop.sampler == "balanced" else None,
        )
        self.steps_per_epoch = self._order.steps_per_epoch(loop.batch_size)
        if not self.steps_per_epoch:
            raise RecipeError(
                f"loop.batch_size = {loop.batch_size}",
                f"with drop_last, {len(train)} training samples make no whole batch",
                f"--set loop.batch_size={len(train)}, or --set loop.drop_last=false",
            )
        self.total_steps = min(loop.max_steps or sys.maxsize, self.steps_per_epoch * loop.epochs)
        if self.total_steps > MOST_STEPS:
            raise RecipeError(
                f"a run of {self.total_steps:,} steps",
                f"{loop.epochs:,} epochs of {self.steps_per_epoch:,} steps; at most {MOST_STEPS:,} steps are planned",
                f"--set loop.max_steps={MOST_STEPS // 10}",
            )
        self.start = OrderState(seed=recipe.seed, epoch=0, step=0, batch_size=loop.batch_size)

    def under(self, recipe: Recipe) -> Course:
        """The same steps under a recipe with other micro-batches."""
        return Course(recipe, self._dataset, self._build, self._mesh)

    def check_smallest(self) -> None:
        """Refuse steps with a micro-batch of one sample that the model cannot be trained on.

        Raises:
            RecipeError: names the layer, and settings that work.
        """
        loop, train, size = self._recipe.loop, self._dataset.splits["train"], self._mesh.data.size
        check_smallest(self._build, self._order, loop, train, total_steps=self.total_steps, world_size=size)

    def after(self, at: OrderState) -> OrderState:
        """The place after the step at ``at``."""
        return self._order.after(at)

    def plan(self, at: OrderState) -> StepPlan:
        """The step that begins at ``at``, as this rank takes part in it."""
        return self._order.plan(at, self._mesh.data.rank, self._mesh.data.size)

    def of_all_ranks(self, at: OrderState, size: int | None = None) -> Sequence[Ids]:
        """The micro-batches of every rank in the step at ``at``, rank by rank: for who tells of the whole step.

        Args:
            size: ranks that the samples are split over; None: those of the run.
        """
        return self._order.of_all_ranks(at, size or self._mesh.data.size)

    def input(self, at: OrderState, step: int) -> StepInput:
        """What the engine of this rank is given of the step at ``at``.

        Args:
            step: the run's updates before it.
        """
        plan = self.plan(at)
        denominator = self._build.task.denominator(self._dataset.labels[plan.samples])
        return self._shared(at, self._mixed(plan, StepInput(step, plan.microbatches, denominator)))

    def own_share(self, at: OrderState) -> float:
        """Return what part of the denominator of the step at ``at`` is of this rank's samples; 0 where it has none."""
        plan, labels, task = self.plan(at), self._dataset.labels, self._build.task
        own = sum(task.denominator(labels[ids]) for ids in plan.microbatches if len(ids))
        return own / task.denominator(labels[plan.samples])

    def warms_up(self, device: torch.device) -> bool:
        """Whether a run makes its largest micro-batch once before its first step.

        On a GPU, where those that follow find room in the memory that it leaves, and what does not fit is known at
        once; elsewhere where there is something to compile, or micro-batches may be split.
        """
        return is_gpu(device) or self._recipe.techniques.compile is True or self._recipe.loop.on_oom == "split"

    def largest(self, at: OrderState, done: int = 0) -> StepInput:
        """The micro-batch with the most positions among the next steps, up to ``LOOKED_AHEAD``: for a warm-up.

        Where ranks meet within a pass, one that has the same shapes on all ranks, if there is any. All ranks choose
        the same step then.

        Args:
            at: where the steps begin.
            done: the run's updates before them.
        """
        return max(self._ahead(at, done), key=lambda found: found[0])[1]

    def largest_of_each_shape(self) -> list[StepInput]:
        """The first micro-batch of each shape among the run's first ``LOOKED_AHEAD`` steps, the largest first."""
        found: dict[tuple[bool, int, int], StepInput] = {}
        for size, given in self._ahead(self.start, 0):
            found.setdefault(size, given)
        return [found[size] for size in sorted(found, reverse=True)]

    def largest_step(self) -> StepInput:
        """The step, among the first ``LOOKED_AHEAD``, whose largest micro-batch has the most positions."""
        at, best, most = self.start, self.start, (-1, -1)
        for _ in range(min(self.total_steps, LOOKED_AHEAD)):
            size = max((self._build.layout.size(ids).slots, len(ids)) for ids in self.plan(at).microbatches)
            if size > most:
                best, most = at, size
            at = self.after(at)
        return self.input(best, 0)

    def _ahead(self, at: OrderState, done: int) -> Iterator[tuple[tuple[bool, int, int], StepInput]]:
        """This rank's micro-batches of the next steps, each by itself, with what they are ranked by."""
        for _ in range(min(self.total_steps - done, LOOKED_AHEAD)):
            plan = self.plan(at)
            given = self._shared(at, self._mixed(plan, StepInput(0, plan.microbatches, 1)))
            for index, ids in enumerate(given.microbatches):
                width = given.width(index)
                size = given.same_shapes, width or self._build.layout.size(ids).slots, len(ids)
                alone = replace(given, microbatches=(ids,), denominator=len(ids) or 1, widths=(width,))
                yield size, replace(alone, partners=given.partners[index : index + 1])
            at = self.after(at)

    def _mixed(self, plan: StepPlan, given: StepInput) -> StepInput:
        """The input with how images are mixed, where they are."""
        part, shape = self._recipe.data.augment, self._dataset.image_shape
        if shape is None or not part.mixes:
            return given
        mix = draw(part, self._recipe.seed, given.step, *shape[:2])
        return replace(given, mix=mix, partners=partners(plan.samples, given.microbatches))

    def _shared(self, at: OrderState, given: StepInput) -> StepInput:
        return self.strategy.share(given, lambda: self.of_all_ranks(at), self._build.layout)
