"""What makes a run fit: settings that save memory, each traced, those that cost the least speed first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Protocol, get_args

from paceline.contract.errors import UserError
from paceline.contract.records import MemoryPlan
from paceline.machine.facts import Gpu
from paceline.machine.gpus import peak_rates
from paceline.recipe import Recipe
from paceline.recipe.catalogue.strategies import STRATEGIES
from paceline.recipe.choose import num_processes, num_shares
from paceline.recipe.entries import Preserves, Saving, TechniqueEntry
from paceline.recipe.techniques import CATALOGUE, entry_of, one_process


class PlanWith(Protocol):
    """The plan of the run with settings changed, such as ``techniques.recompute=true``, and on another number of GPUs
    where one is given; UserError where that is refused."""

    def __call__(self, settings: tuple[str, ...], gpus: int | None = None, /) -> MemoryPlan: ...


ACCUMULATION_SLOWDOWN: Final = 0.05
# Each further micro-batch launches its kernels anew, reads the weights and adds to the gradients. By data sheet that is
# 2 to 13 % of a micro-batch of 2,048 to 4,096 positions (16 bytes moved a weight; 6 operations a weight and position),
# on a V100 in fp32 and an H200 in bf16. Not measured: good for ranking, no promise.
EIGHT_BIT_SLOWDOWN: Final = 0.02
# The host waits for the GPU once a step (docs/decisions/0002-one-norm-gates-the-update.md), and the update runs eagerly
# where it was captured (docs/techniques/capture.md). Not measured.
TENSOR_SLOWDOWN: Final = 0.25
# Four all-reduces of the hidden states a block and micro-batch that no computation hides: for BERT-large by data sheet
# a tenth of a step over NVLink, and more than all of it over PCIe. Not measured.

MORE_GPUS: Final = (2, 4, 8)
"""Shared between, as machines have them."""

WORTH_TELLING: Final = 0.01
"""Share of the total that a change has to save; one that saves less is left out, unless it is enough."""

SLOW: Final = 1.0
"""By what share a step takes longer, above which more GPUs are told of too."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that save memory, and what they cost."""

    settings: tuple[str, ...]
    """As ``--set`` takes them."""
    gpus: int | None = None
    """As ``--gpus`` takes them; None: as many as now."""
    slowdown: float = 0.0
    """By what share a step takes longer, at most about; 0: no longer than now."""
    speed: str
    """The same for people."""
    preserves: Preserves = "up to rounding"
    """What becomes of the result."""

    def beside(self, other: Change) -> Change:
        """Both changes at once; where both have a value for one setting, this one's."""
        order = get_args(Preserves)
        mine = {setting.partition("=")[0] for setting in self.settings}
        kept = [setting for setting in other.settings if setting.partition("=")[0] not in mine]
        return Change(
            settings=(*kept, *self.settings),
            gpus=self.gpus or other.gpus,
            slowdown=(1 + other.slowdown) * (1 + self.slowdown) - 1,
            speed=f"{other.speed}; {self.speed}",
            preserves=max(other.preserves, self.preserves, key=order.index),
        )


@dataclass(frozen=True, kw_only=True)
class TracedChange:
    """What a change was found to save."""

    change: Change
    plan: MemoryPlan
    """The prediction for the run with the change."""
    saving_bytes: int
    """What the total loses."""
    fits: bool


def cheapest_changes(
    plan_with: PlanWith, *, recipe: Recipe, gpu: Gpu, plan: MemoryPlan, limit_bytes: int, largest: int, gpus: int = 1
) -> tuple[TracedChange, ...]:
    """What can be changed about a run that does not fit, the best first.

    First come changes after which it fits: those that leave the result as it is, by what they cost in speed, then those
    that do not. The others follow by what they save. Where no single one is enough they are put together in that order,
    until it fits; and where that is not enough either, the run is cut over more GPUs: shards of everything, or blocks
    that several GPUs share or have some of, where the model and the number of GPUs can take that.

    Args:
        plan_with: traces; what it refuses is not offered.
        recipe: as ``choose`` made it; ``plan`` is its own.
        limit_bytes: what the GPU can hold.
        largest: the largest micro-batch that fits; 0 where none does.
        gpus: GPUs of the run as it is.
    """

    is_features = recipe.model.train == "features"

    def made(change: Change) -> TracedChange:
        changed = plan_with(change.settings, change.gpus)
        saving, fits = plan.total - changed.total, changed.total <= limit_bytes
        return TracedChange(change=change, plan=changed, saving_bytes=saving, fits=fits)

    def traced(change: Change) -> TracedChange | None:
        try:
            found = made(change)
            if found.fits or found.plan.moment != "evaluation" or is_features:
                return found
            return made(_evaluating(found.plan.samples).beside(change))
        except UserError:
            return None  # not beside the rest of this recipe, or not on this GPU

    if plan.moment == "evaluation":
        # where steps are made, as many samples as in training: activations are kept there
        sizes = _halves(plan.samples) if is_features else [plan.samples]
        smaller = _first_that_fits(map(traced, map(_evaluating, sizes)))
        if smaller is not None and smaller.fits:
            return (smaller,)  # nothing else is in the way
    pieces = _smaller_micro_batches(recipe, plan, gpus)
    enough = [piece for size, piece in pieces.items() if size <= largest] or list(pieces.values())[-1:]
    found: list[TracedChange] = []

    def keep(best: TracedChange | None) -> None:
        if best is not None and (best.fits or best.saving_bytes > WORTH_TELLING * plan.total):
            found.append(best)

    for single in (*([change] for change in single_changes(recipe, gpu)), enough):
        keep(_first_that_fits(map(traced, single)))
    if len(found) > 1 and not any(best.fits for best in found):
        keep(_together(found, list(pieces.values()), traced))
    if not any(best.fits and best.change.slowdown < SLOW for best in found):
        for ways in (_more_gpus(recipe, plan, gpus), *_one_model_over_gpus(recipe, plan, gpus)):
            keep(_first_that_fits(map(traced, ways)))
    # all together may be no more than the best of them
    return tuple(sorted({best.change: best for best in found}.values(), key=_rank))


def _rank(made: TracedChange) -> tuple[bool, bool, float, int]:
    changes, slowdown = _cost(made) if made.fits else (False, 0.0)
    return not made.fits, changes, slowdown, -made.saving_bytes


def _cost(made: TracedChange) -> tuple[bool, float]:
    return made.change.preserves == "changes the result", made.change.slowdown


def _first_that_fits(traced: Iterator[TracedChange | None]) -> TracedChange | None:
    """Else the last that can be had."""
    last = None
    for made in traced:
        last = made or last
        if made is not None and made.fits:
            break
    return last


def _together(
    singles: Sequence[TracedChange], pieces: Sequence[Change], traced: Callable[[Change], TracedChange | None]
) -> TracedChange:
    """As many changes at once as it takes, or all of them; a smaller micro-batch is as large as it can be by then."""
    found, *others = sorted(singles, key=_cost)
    sizes = {piece.settings[0] for piece in pieces}
    for made in others:
        ways = pieces if made.change.settings[0] in sizes else [made.change]
        joined = _first_that_fits(traced(way.beside(found.change)) for way in ways)
        if joined is not None and joined.saving_bytes > found.saving_bytes:
            found = joined
        if found.fits:
            break
    return found


def samples_of_a_process(recipe: Recipe, plan: MemoryPlan, gpus: int) -> tuple[int, int]:
    """The most samples that a process has in its largest micro-batch, and in its share of the global batch."""
    share = -(-recipe.loop.batch_size // num_shares(recipe, num_processes(recipe, gpus)))
    size = min(recipe.loop.micro_batch_size or share, share)
    if size == share:
        size = share = min(share, plan.samples)  # there may be fewer than a batch
    return size, share


def single_changes(recipe: Recipe, gpu: Gpu) -> Iterator[Change]:
    """What may save memory in this recipe's steps, apart from smaller micro-batches: what is tried in any case."""
    if recipe.model.train == "features":
        return  # no step is made
    yield from _less_precise(recipe, gpu)
    yield from _eight_bit(recipe)
    for entry in (*CATALOGUE, *(one for one in STRATEGIES if one.saving and one.saving.beside)):
        if entry.saving is not None and not entry.is_on(recipe):
            yield _saving(entry, entry.saving)


def _saving(entry: TechniqueEntry, saving: Saving, gpus: int | None = None) -> Change:
    """What the catalogue says of it."""
    return Change(
        settings=(f"{entry.setting}={saving.value}", *saving.beside),
        gpus=gpus,
        slowdown=saving.slowdown,
        speed=saving.speed.format(slowdown=saving.slowdown, gpus=gpus),
        preserves=entry.preserves,
    )


def _more_gpus(recipe: Recipe, plan: MemoryPlan, gpus: int) -> Iterator[Change]:
    """Shards of the model, the optimizer's states and the batch: first on as many GPUs as there are."""
    if recipe.model.train == "features":
        return  # fitted in one process
    strategies = [(entry, entry.saving) for entry in STRATEGIES if entry.saving and not entry.saving.beside]
    for count, (entry, saving) in product(sorted({gpus, *MORE_GPUS}), strategies):
        if count > gpus or (count == gpus > 1 and not entry.is_on(recipe)):
            change = _saving(entry, saving, count)
            split_as_now = count == gpus and not one_process(recipe.parallel.strategy)
            yield change if split_as_now else _split_anew(change, plan, "each GPU's share by itself")


def _one_model_over_gpus(recipe: Recipe, plan: MemoryPlan, gpus: int) -> Sequence[Iterator[Change]]:
    """Ways of each axis, the fewest GPUs first: as many as there are, in smaller groups too, or more."""
    if recipe.model.train == "features" or plan.normalises_batches:  # no step is made, or batch norms are refused
        return ()
    groups = [
        (count, size) for count in sorted({gpus, *MORE_GPUS}) for size in MORE_GPUS if _is_group(count, size, gpus)
    ]
    return (
        (_tensor(count, size) for count, size in groups if recipe.parallel.tensor == 1),
        (_pipeline(recipe, count, size) for count, size in groups if recipe.parallel.pipeline == 1),
    )


def _is_group(count: int, size: int, gpus: int) -> bool:
    return count % size == 0 if count == gpus else count > gpus and count == size


def _tensor(count: int, size: int) -> Change:
    told = "GPUs share each block and wait for each other four times in it, which wants NVLink"
    return Change(
        settings=(f"parallel.tensor={size}",),
        gpus=count,
        slowdown=TENSOR_SLOWDOWN,
        speed=f"up to about {TENSOR_SLOWDOWN:.0%} slower, not measured: {told}",
    )


def _pipeline(recipe: Recipe, count: int, size: int) -> Change:
    """Stages, and micro-batches so small that each stage waits for a fifth of a step at most."""
    share = -(-recipe.loop.batch_size // (count // size))
    now = min(recipe.loop.micro_batch_size or share, share)
    samples = min(now, max(1, share // (4 * size)))
    pieces = -(-share // samples)
    waiting = (size - 1) / (pieces + size - 1)  # as strategies.pipeline.schedule counts it, which needs torch
    return Change(
        settings=(
            f"parallel.pipeline={size}",
            *([f"loop.micro_batch_size={samples}"] if samples < now else []),
        ),
        gpus=count,
        slowdown=(1 + ACCUMULATION_SLOWDOWN) / (1 - waiting) - 1,
        speed=f"each GPU has some blocks, and waits for {waiting:.0%} of a step of {pieces:,} micro-batches, counted;"
        " the memory is the first GPU's",
    )


def _split_anew(change: Change, plan: MemoryPlan, sees: str) -> Change:
    """The change, which puts other samples together: to batch normalisation that is another computation."""
    if not plan.normalises_batches:
        return change
    speed = f"{change.speed}; batch normalisation then sees {sees}"
    return replace(change, speed=speed, preserves="changes the result")


def _evaluating(size: int) -> Change:
    """Fewer samples at a time where no gradients are computed."""
    return Change(settings=(f"loop.evaluation_batch_size={size}",), speed=f"evaluations take {size:,} at a time")


def _halves(size: int) -> Iterator[int]:
    """Half of it, a quarter and so on, down to one."""
    while size > 1:
        size = -(-size // 2)
        yield size


def _less_precise(recipe: Recipe, gpu: Gpu) -> Iterator[Change]:
    now, capability = recipe.techniques.precision, gpu.compute_capability
    if now not in ("fp32", "tf32") or capability is None:
        return
    rates, speed = peak_rates(gpu.name), "no slower"
    if now == "fp32" and rates is not None and rates.fp32_flops:
        # bf16 has fp16's rate on every GPU that has both
        times = rates.fp16_flops / rates.fp32_flops
        speed = f"faster: matrix products at up to {times:.0f} times the rate, by the data sheet"
    precision = entry_of("precision")
    formats = [value.name for value in precision.values if capability >= value.capability]
    value = "bf16" if "bf16" in formats else "fp16"
    yield Change(settings=(f"{precision.setting}={value}",), speed=speed, preserves=precision.preserves)


def _eight_bit(recipe: Recipe) -> Iterator[Change]:
    part = recipe.optimizer
    settings = ["optimizer.type=adamw8bit"]
    if part.type == "adam" and part.decay == 0:
        settings.append("optimizer.weight_decay=0")  # adam without decay is adamw without it
    elif part.type != "adamw":
        return
    yield Change(
        settings=tuple(settings),
        slowdown=EIGHT_BIT_SLOWDOWN,
        speed=f"about {EIGHT_BIT_SLOWDOWN:.0%} slower: the host waits for the GPU at every update",
        preserves="changes the result",
    )


def _smaller_micro_batches(recipe: Recipe, plan: MemoryPlan, gpus: int) -> dict[int, Change]:
    """Size -> the same batch in more pieces: halves of the micro-batch, quarters and so on, down to one sample."""
    found: dict[int, Change] = {}
    largest, share = samples_of_a_process(recipe, plan, gpus)
    if recipe.model.train == "features":
        return found
    for size in _halves(largest):
        pieces = -(-share // size)
        speed = f"about {ACCUMULATION_SLOWDOWN:.0%} slower: {pieces:,} micro-batches a step, each reads the weights"
        change = Change(settings=(f"loop.micro_batch_size={size}",), slowdown=ACCUMULATION_SLOWDOWN, speed=speed)
        found[size] = _split_anew(change, plan, f"at most {size:,} samples at a time")
    return found
