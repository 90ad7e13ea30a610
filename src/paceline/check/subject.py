"""What is checked: a person's recipe with its model, on a few samples of its data."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.check.claim import NotApplicable
from paceline.contract.errors import UserError
from paceline.contract.records import Decision
from paceline.contract.stopwatch import Stopwatch
from paceline.data.dataset import Dataset, Tokens
from paceline.engine.numerics import numerics
from paceline.machine.facts import Facts, this_machine
from paceline.models.config import read_config
from paceline.models.images import ImageSettings
from paceline.models.saved import load_saved
from paceline.prepare.assemble import Assembled, assemble
from paceline.prepare.course import Course
from paceline.prepare.preparation import Prepared, build_for, model_for, prepare_run, size_of_vocabulary
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.techniques import opened
from paceline.seams import Build, Ids, Mesh

LARGEST_BATCH = 8

EAGER = ("techniques.capture=false", "techniques.compile=false")

EXACTLY = ("techniques.precision=fp32", "optimizer.rounding=nearest", *EAGER)
"""Settings with which two computations of the same are equal up to fp32's rounding."""

PLAIN_SGD = "optimizer={type: sgd, lr: 0.1, momentum: 0.0, nesterov: false, clip_norm: null}"
"""An optimizer whose updates are the gradients: Adam divides a gradient's scale away."""

FROM_THE_RECIPE = "paceline check RUN/recipe.yaml, which begins with the recipe's own weights"

STEADY = "schedule={type: constant, warmup: 0}"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A run of a few steps, put together."""

    recipe: Recipe
    build: Build
    course: Course
    assembled: Assembled


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A recipe, its model as it is before the first step (or as a run left it), and a few of its samples."""

    recipe: Recipe
    """As it was decided, with batches small enough for these samples; techniques that are on are left open again, for
    some cannot be had in the fp32 of a comparison."""
    prepared: Prepared
    """As a run has it, of all the data."""
    dataset: Dataset
    """All samples, of which the splits name a few."""
    pristine: nn.Module
    """On the CPU; never trained, and never changed by a technique."""
    facts: Facts
    folder: Path
    """For what is written on the way."""
    rows: object | None = None
    trained: Path | None = None
    """The model that a run has saved, where the claims are about one."""
    decisions: tuple[Decision, ...] = ()
    closing: ExitStack = field(default_factory=ExitStack)
    """What a claim opens for all that come after it is closed with this."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What one claim has read and another needs too."""

    @property
    def device(self) -> torch.device:
        """Where the recipe's steps compute."""
        return torch.device(self.recipe.device)

    @property
    def as_run(self) -> tuple[str, ...]:
        """Settings with which the techniques of the run itself are on."""
        on = (setting.partition("=")[0] for setting in opened(self.prepared.recipe))
        return tuple(f"{setting}=true" for setting in on if setting.startswith("techniques."))

    def was_chosen(self, setting: str) -> bool:
        """Whether ``auto`` chose this setting, and the recipe itself does not ask for it."""
        return any(decision.setting == setting for decision in self.decisions)

    @property
    def train(self) -> Ids:
        """The training samples."""
        return self.dataset.splits["train"]

    @property
    def held_out(self) -> tuple[str, Ids]:
        """A split to evaluate on: the validation split, or whichever there is."""
        name = next(name for name in ("validation", "test", "train") if name in self.dataset.splits)
        return name, self.dataset.splits[name]

    @property
    def images(self) -> ImageSettings | None:
        """How pixels become floats; None of texts."""
        return self.prepared.saved.image

    @cached_property
    def calm(self) -> tuple[str, ...]:
        """Settings without what is random or averaged: no augmentation, no moving average, no technique on the GPU
        that rounds."""
        augment = ("data.augment={}",) if self.dataset.is_images else ()
        return (*EXACTLY, *augment, "optimizer.ema=null", "loop.save=auto", "loop.on_oom=fail")

    def with_settings(self, settings: Iterable[str], world_size: int = 1) -> Recipe:
        """The recipe with changes, decided anew for so many processes.

        Raises:
            RecipeError: they cannot be had.
        """
        return choose(self.recipe.with_settings(settings), self.facts, world_size)[0]

    def model(self, *, still: bool, double: bool = False) -> nn.Module:
        """A copy of the model.

        Args:
            still: without dropout, and with batch norms by their running statistics, also in training: what a sample
                comes to then depends neither on chance nor on the others.
            double: in fp64.
        """
        model = copy.deepcopy(self.pristine)
        if double:
            model = model.double()
        return stilled(model) if still else model

    def build(
        self,
        *settings: str,
        still: bool = True,
        double: bool = False,
        mesh: Mesh = Mesh(),  # noqa: B008 - no state
    ) -> tuple[Recipe, Build]:
        """The recipe with changes, and its build on these samples."""
        recipe = self.with_settings(settings, mesh.whole.size)
        model = self.model(still=still, double=double)
        device = torch.device(recipe.device)
        return recipe, build_for(recipe, model, self.dataset, device, self.images, mesh=mesh)

    def steps(
        self,
        *settings: str,
        still: bool = True,
        double: bool = False,
        resting: bool = False,
        mesh: Mesh = Mesh(),  # noqa: B008 - it has no state
    ) -> Steps:
        """As ``build``, with an engine and the order of its steps.

        Args:
            resting: all learning rates are 0, so that one step's gradients can be looked at in several ways.

        Raises:
            NotApplicable: the recipe makes no steps.
        """
        self.require_steps()
        recipe, build = self.build(*settings, still=still, double=double, mesh=mesh)
        course = Course(recipe, self.dataset, build, mesh)
        factors = np.zeros(course.total_steps) if resting else None
        assembled = assemble(recipe, build, course.total_steps, mesh=mesh, factors=factors)
        return Steps(recipe=recipe, build=build, course=course, assembled=assembled)

    def require_steps(self) -> None:
        """Raises:
        NotApplicable: the recipe makes no steps.
        """
        if self.recipe.model.train == "features":
            raise NotApplicable("model.train = features makes no steps: its last layer is fitted at once")

    def require_texts(self) -> Tokens:
        """The samples' tokens.

        Raises:
            NotApplicable: they are images.
        """
        if not isinstance(self.dataset.inputs, Tokens):
            raise NotApplicable("the samples are images")
        return self.dataset.inputs

    @contextmanager
    def numbers(self, precision: str = "fp32", *, deterministic: bool = False) -> Iterator[None]:
        """Inside, the process computes as a run of the recipe does, in this precision."""
        with numerics(precision, deterministic=deterministic, device=self.recipe.device):
            yield


def stilled(model: nn.Module) -> nn.Module:
    """The model, in evaluation mode for good."""
    model.eval()
    model.train = types.MethodType(_stays, model)  # type: ignore[method-assign]
    return model


def _stays(model: Any, mode: bool = True) -> Any:
    return model


def subject_of(
    recipe: Recipe, samples: int, folder: Path, *, rows: object | None = None, trained: Path | None = None
) -> Subject:
    """Read the data, load the model, and choose a few samples.

    Args:
        recipe: as a person wrote it, or as a run's folder has it.
        samples: training samples to take; half as many of each other split.
        rows: data in memory in place of the recipe's source.
        trained: a run's saved model, whose weights take the place of the recipe's.

    Raises:
        UserError: whatever ``train`` would say before its first step.
    """
    facts = this_machine()
    decided, decisions = choose(recipe, facts)
    with numerics(decided.techniques.precision, deterministic=decided.deterministic, device=decided.device):
        prepared = prepare_run(decided, decisions, facts=facts, watch=Stopwatch(), rows=rows)
        settled = prepared.recipe
        pristine = model_for(
            settled,
            read_config(settled.model),
            prepared.dataset,
            size_of_vocabulary(settled, prepared.dataset, prepared.tokenizer),
            tell=lambda _: None,
        )
    if trained is not None:
        _take_up(pristine, trained, settled)
    few = _few(prepared.dataset, samples, shorter=settled.device == "cpu")
    small = settled.with_settings([*opened(settled), *_small(settled, len(few.splits["train"]))])
    return Subject(
        recipe=small,
        prepared=prepared,
        dataset=few,
        pristine=pristine,
        facts=facts,
        folder=folder,
        rows=rows,
        trained=trained,
        decisions=prepared.decisions,
    )


def _take_up(model: nn.Module, trained: Path, recipe: Recipe) -> None:
    """Put a run's trained weights into the model; adapters are left as the recipe begins with them.

    Raises:
        UserError: the two have other weights, or other labels.
    """
    part = recipe.model
    saved = load_saved(trained, factory=part.factory, trust_remote_code=part.trust_remote_code)
    found = saved.model.state_dict()
    own = model.state_dict()
    first = next((name for name in sorted(found.keys() ^ own.keys())), None)
    first = first or next((name for name in own if found[name].shape != own[name].shape), None)
    if first is not None and part.train == "lora":
        return
    if first is not None:
        what = f"{trained}: its weights are not those of the recipe's model"
        raise UserError(what, f"{first} is not alike in both", FROM_THE_RECIPE)
    named, names = (getattr(getattr(one, "config", None), "id2label", None) for one in (saved.model, model))
    if named != names:
        raise UserError(f"{trained}: its labels are {named}", f"those of the data are {names}", FROM_THE_RECIPE)
    model.load_state_dict(found)


def _small(recipe: Recipe, count: int) -> Sequence[str]:
    """Settings with which so many samples are a few steps, the last of which is smaller."""
    batch = max(2, min(recipe.loop.batch_size, LARGEST_BATCH, 2 * count // 5))
    # a share of so few steps would be none, and a number may be more than there are
    warms_up = recipe.schedule.warmup >= 1 or (recipe.schedule.warmup > 0 and recipe.schedule.type != "one_cycle")
    return (
        f"loop.batch_size={batch}",
        f"loop.micro_batch_size={batch}",
        f"loop.evaluation_batch_size={batch}",
        "loop.epochs=2",
        "loop.max_steps=null",
        *(["schedule.warmup=2"] if warms_up else []),
    )


def _few(dataset: Dataset, samples: int, *, shorter: bool) -> Dataset:
    """The data with splits of a few samples: of every length; on a CPU, where long texts take long, of the shorter
    half."""
    rng = np.random.default_rng(0)
    splits = {}
    for name, ids in dataset.splits.items():
        count = min(len(ids), samples if name == "train" else max(2, samples // 2))
        chosen = ids
        if isinstance(dataset.inputs, Tokens):
            lengths = dataset.inputs.lengths[ids]
            by_length = ids[np.argsort(lengths, kind="stable")]
            among = by_length[: max(count, (len(ids) + 1) // 2)] if shorter else by_length
            chosen = among[np.unique(np.linspace(0, len(among) - 1, count).round().astype(np.int64))]
        elif len(ids) > count:
            chosen = rng.choice(ids, count, replace=False)
        splits[name] = np.sort(chosen)
    return replace(dataset, splits=splits)
