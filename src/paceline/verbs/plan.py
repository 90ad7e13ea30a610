"""``paceline plan``: a run's memory, what fits and what ``train`` would choose, before the run and without a card."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cards import card_for, facts_with
from paceline.errors import RecipeError, UserError
from paceline.facts import Card, Facts, this_machine
from paceline.memory.changes import PlanWith, TracedChange, cheapest_changes, samples_of_a_process, single_changes
from paceline.memory.formula import Textbook, textbook
from paceline.memory.predict import Predictor
from paceline.memory.search import LargestMicroBatch, largest_micro_batch, usable_bytes
from paceline.observe.formats import amount, printable, share
from paceline.recipe import Recipe
from paceline.recipe.choose import choose, num_processes
from paceline.recipe.techniques import one_process, shards
from paceline.records import Decision, MemoryPlan

GIB: Final = 2**30
MIB: Final = 2**20

SHOWN_CHANGES: Final = 3

SMALL_SHARE: Final = 0.001
"""Of the peak: parts below it are shown together."""

MOMENTS: Final = {
    "model": "when the model is loaded",
    "preparation": "in the checks before the first step",
    "optimizer": "when the optimizer is made",
    "batch": "when a batch is put together",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "update": "in the update",
    "evaluation": "in an evaluation",
}
"""Phase of the run -> when that is, for people."""

Trace = Callable[[Recipe, int], MemoryPlan]
"""What one rank of a chosen recipe takes on so many cards, see ``Predictor.plan``."""

Rows = list[tuple[str, str]]
"""Label and value; either may be empty."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a run before the run."""

    recipe: Recipe
    """As ``train`` would choose it on a machine with these cards."""
    gpus: int
    memory: MemoryPlan
    """Of one rank."""
    decisions: tuple[Decision, ...]
    """All that is chosen, with reasons."""
    usable_bytes: int | None
    """What the plan may come to on the card, see ``usable_bytes``; None where its memory is not known."""
    largest: LargestMicroBatch | None
    """None where the card's memory is not known, or no step is made (``model.train: features``)."""
    largest_settings: tuple[str, ...]
    """What to set for it; empty where the recipe has it already, or there is none."""
    changes: tuple[TracedChange, ...]
    """What would make it fit; empty where it does."""
    formula: Textbook
    """Beside the plan, never instead of it."""

    @property
    def spare_bytes(self) -> int | None:
        """What is left of the card's memory; below 0 where the run does not fit; None where that is not known."""
        return None if self.usable_bytes is None else self.usable_bytes - self.memory.total

    @property
    def fits(self) -> bool | None:
        """Whether the card can hold the run; None where its memory is not known."""
        return None if self.spare_bytes is None else self.spare_bytes >= 0

    def plain(self) -> dict[str, Any]:
        """Nested plain data, sizes in bytes: what ``--json`` prints."""
        memory, largest = dataclasses.asdict(self.memory), self.largest
        del memory["decisions"]  # they are among the others
        return {
            "name": self.recipe.name,
            "model": _model_name(self.recipe),
            "gpus": self.gpus,
            "strategy": self.recipe.parallel.strategy if self.gpus > 1 else None,
            "precision": self.recipe.techniques.precision,
            "optimizer": self.recipe.optimizer.type,
            "batch_size": self.recipe.loop.batch_size,
            "micro_batch_size": samples_of_a_process(self.recipe, self.memory, self.gpus)[0],
            "memory": {**memory, "total": self.memory.total},
            "usable_bytes": self.usable_bytes,
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "largest_micro_batch": largest
            and {
                "samples": largest.samples,
                "slots": largest.plan and largest.plan.slots,
                "total": largest.plan and largest.plan.total,
                "too_large": largest.too_large,
                "settings": list(self.largest_settings),
            },
            "changes": [
                {
                    **dataclasses.asdict(made.change),
                    "saving_bytes": made.saving_bytes,
                    "total": made.plan.total,
                    "fits": made.fits,
                }
                for made in self.changes
            ],
            "formula": {**dataclasses.asdict(self.formula), "total_bytes": self.formula.total_bytes},
            "decisions": [dataclasses.asdict(decision) for decision in self.decisions],
        }


def plan(
    recipe: Recipe,
    *,
    gpu: str | None = None,
    gpus: int = 1,
    read_data: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Work out the memory of a run, what fits and what ``train`` would choose, without the card.

    The step that ``train`` would make is traced in a process of its own, on a stand-in for the card; neither a card nor
    weights are needed.

    Args:
        recipe: the whole run.
        gpu: a card's name or an amount of memory, ``h200``, ``a100-80gb``, ``24GiB``; None: this machine's first card.
        gpus: cards, a process each; with ``parallel.strategy: dp``, those that the process sees.
        read_data: read and encode the data first, as a run would, to know their lengths. Else they are taken for as
            long as they may be, unless they were encoded before.
        progress: told what is traced, each time that it takes seconds.

    Raises:
        UserError: an unknown card, or none; what ``train`` would say of the recipe there; a step that cannot be traced.

    Example:
        >>> paceline.plan(paceline.Recipe.load("recipes/imdb_bert_large.yaml"), gpu="v100-32gb").fits
    """
    here = this_machine()
    card = card_for(gpu) if gpu is not None else _first_card(here)
    with Predictor() as one, Predictor() as other:

        def trace_with(predictor: Predictor) -> Trace:
            return lambda chosen, cards: predictor.plan(chosen, card, read_data=read_data, world_size=cards)

        # tracing is one thread's work, and most machines have more than one to give
        beside = None
        if here.cpu_count > 1:
            other.start()  # it imports while the first plan is made
            beside = trace_with(other)
        return planned(recipe, card, here, trace_with(one), beside=beside, gpus=gpus, progress=progress)


def planned(
    recipe: Recipe,
    card: Card,
    here: Facts,
    trace: Trace,
    *,
    beside: Trace | None = None,
    gpus: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan of ``recipe`` on a machine like ``here`` but for its cards, as ``trace`` finds the memory of a run.

    Args:
        beside: the same as ``trace``, for another thread.

    Raises:
        RecipeError: the recipe is not for cards, or cannot run on this one.
    """
    if recipe.device == "cpu":
        raise RecipeError("device = cpu", "a plan is of a card's memory, and this run uses none", "--set device=auto")

    def traced(make: Trace, settings: tuple[str, ...], cards: int) -> MemoryPlan:
        changed = _chosen_for(recipe.with_settings(settings), card, cards, here)[0]
        if progress:
            progress(f"tracing the step {_typed(settings, cards if cards != gpus else None)}".rstrip())
        return make(changed, cards)

    expected: dict[tuple[tuple[str, ...], int], Future[MemoryPlan]] = {}

    @functools.cache
    def found(settings: tuple[str, ...], cards: int) -> MemoryPlan:
        coming = expected.get((settings, cards))
        # what has not begun there is as well done here
        return traced(trace, settings, cards) if coming is None or coming.cancel() else coming.result()

    def plan_with(settings: tuple[str, ...], other: int | None = None) -> MemoryPlan:
        return found(settings, other or gpus)

    chosen, decisions = _chosen_for(recipe, card, gpus, here)
    memory = plan_with(())
    final = chosen.with_settings(f"{decision.setting}={decision.value}" for decision in memory.decisions)
    usable = None if card.memory_bytes is None else usable_bytes(card.memory_bytes)
    largest: LargestMicroBatch | None = None
    settings, changes = tuple[str, ...](), tuple[TracedChange, ...]()
    with ThreadPoolExecutor(1, "paceline-trace") as ahead:
        if beside is not None and usable is not None and memory.total > usable:
            for change in single_changes(chosen, card):
                key = change.settings, change.gpus or gpus
                expected[key] = ahead.submit(traced, beside, *key)
        if usable is not None and recipe.model.train != "features":
            largest, settings = _largest(chosen, gpus, plan_with, usable)
        if usable is not None and memory.total > usable:
            changes = cheapest_changes(
                plan_with,
                recipe=chosen,
                card=card,
                plan=memory,
                limit_bytes=usable,
                largest=largest.samples if largest else 0,
                gpus=gpus,
            )
        for coming in expected.values():
            coming.cancel()
    return Plan(
        recipe=final,
        gpus=gpus,
        memory=memory,
        decisions=(*decisions, *memory.decisions),
        usable_bytes=usable,
        largest=largest,
        largest_settings=settings,
        changes=changes,
        formula=_formula(final, memory, gpus),
    )


def _chosen_for(recipe: Recipe, card: Card, gpus: int, here: Facts) -> tuple[Recipe, tuple[Decision, ...]]:
    """What ``train`` would choose on a machine like ``here`` with so many of this card."""
    strategy = recipe.parallel.strategy
    if one_process(strategy) and gpus == 1:
        why = "it deals a batch to several cards, and a plan is of one unless it is told"
        raise RecipeError(f"parallel.strategy = {strategy}", why, "--gpus 2, or as many as the process will see")
    return choose(recipe, facts_with([card] * gpus, here), num_processes(recipe, gpus))


def _formula(recipe: Recipe, memory: MemoryPlan, gpus: int) -> Textbook:
    return textbook(
        memory.num_parameters,
        memory.num_trained,
        precision=recipe.techniques.precision,
        optimizer=recipe.optimizer.type,
        momentum=recipe.optimizer.momentum,
        num_shards=(recipe.parallel.shard_size or gpus) if shards(recipe.parallel.strategy) else 1,
    )


def _first_card(here: Facts) -> Card:
    if here.cards:
        return here.cards[0]
    why = f"{here.cuda_problem}, and a plan is of a card"
    raise UserError("--gpu: missing", why, "--gpu h200, the name of a card; or its memory: --gpu 24GiB")


def _largest(chosen: Recipe, gpus: int, plan_with: PlanWith, usable: int) -> tuple[LargestMicroBatch, tuple[str, ...]]:
    """The search's end, and the settings that lead there."""
    now, share = samples_of_a_process(chosen, plan_with(()), gpus)

    def settings(samples: int) -> tuple[str, ...]:
        plain = () if samples == now else (f"loop.micro_batch_size={samples}",)
        found = plan_with(plain)
        # evaluations do not shrink with the micro-batch
        if found.total > usable and found.moment == "evaluation":
            return (*plain, f"loop.evaluation_batch_size={samples}")
        return plain

    def plan_of(samples: int) -> MemoryPlan | None:
        try:
            return plan_with(settings(samples))
        except UserError:
            return None

    found = largest_micro_batch(plan_of, start=now, most=share, limit_bytes=usable)
    if found.plan is not None and found.too_large is None:
        found = dataclasses.replace(found, samples=found.plan.samples)  # there may be fewer than a batch
    return found, settings(found.samples) if found.samples else ()


def shown(plan: Plan) -> str:
    """The plan as plain lines, for pipes and files."""
    lines = []
    for title, rows in sections(plan):
        width = max((len(label) for label, _ in rows), default=0)
        lines += [title, *(f"  {label:<{width}}  {value}".rstrip() for label, value in rows), ""]
    return "\n".join(lines)


def draw(plan: Plan, console: Console) -> None:
    """The plan on a terminal: long lines are folded beside their labels."""
    colour = {True: "bold green", False: "bold red", None: "bold"}[plan.fits]
    for title, rows in sections(plan):
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for label, value in rows:
            grid.add_row(Text(f"  {label}", "dim"), Text(value))
        console.print(Text(title, colour if title == verdict(plan) else "bold"), grid, Text())


def sections(plan: Plan) -> Iterator[tuple[str, Rows]]:
    """Titles, and what stands below them."""
    memory = plan.memory
    yield f"{printable(plan.recipe.name)} on {_cards(plan)}", list(_headline(plan))
    yield f"alive at the peak, {MOMENTS.get(memory.moment, memory.moment)}", list(_anatomy(memory))
    yield verdict(plan), list(_on_the_card(plan))
    if plan.largest is not None:
        yield "largest micro-batch that fits", _largest_told(plan, plan.largest)
    if plan.fits is False:
        yield "what would make it fit, the cheapest first", list(_changes_told(plan))
    yield "what train would choose there", list(_chosen(plan))
    yield "the textbook, and what is taken for granted", list(_beside(plan))


def verdict(plan: Plan) -> str:
    """Whether it fits, in a line."""
    if plan.spare_bytes is None:
        return "whether it fits is not known: the memory of this card is not"
    return f"fits, with {gib(plan.spare_bytes)} to spare" if plan.fits else f"does not fit, by {gib(-plan.spare_bytes)}"


def gib(num_bytes: int, beside: int = 0, width: int = 0) -> str:
    """Bytes as people compare them: ``12.34 GiB``; in MiB where they and what they stand ``beside`` are less than 1."""
    unit, name = (GIB, "GiB") if max(num_bytes, beside) >= GIB else (MIB, "MiB")
    return f"{num_bytes / unit:{width},.2f} {name}"


def _headline(plan: Plan) -> Iterator[tuple[str, str]]:
    memory, loop = plan.memory, plan.recipe.loop
    parameters, trained = amount(memory.num_parameters), amount(memory.num_trained)
    of = f"{parameters} parameters, all trained" if trained == parameters else f"{trained} of {parameters} trained"
    yield "model", f"{printable(_model_name(plan.recipe))}: {of}"
    positions = "" if memory.slots == memory.samples else f", {memory.slots:,} token positions"
    if plan.recipe.model.train == "features":
        yield "batch", f"{memory.samples:,} samples that go through the model at once{positions}"
        yield "step", f"none: {plan.recipe.techniques.precision}, without gradients"
        return
    yield "micro-batch", f"{memory.samples:,} of the global batch of {loop.batch_size:,} samples{positions}"
    yield "step", f"{plan.recipe.techniques.precision}, {plan.recipe.optimizer.type}"


def _anatomy(memory: MemoryPlan) -> Iterator[tuple[str, str]]:
    told, least = 0, SMALL_SHARE * memory.allocated

    def row(num_bytes: int) -> str:
        return f"{gib(num_bytes, memory.allocated, 8)}  {share(num_bytes / max(memory.allocated, 1)):>6}"

    for name, num_bytes in memory.parts.items():
        if num_bytes < least:
            continue
        told += num_bytes
        yield name, row(num_bytes)
        if name == "activations":
            for kind, part in memory.activations.items():
                if part >= least:
                    yield f"  {kind}", row(part)
    if memory.allocated - told >= least:
        yield "all else", row(memory.allocated - told)
    yield "allocated", row(memory.allocated)
    highest = [f"{phase} {gib(num_bytes, memory.allocated)}" for phase, num_bytes in memory.phases.items()]
    yield "by phase", f"at most: {', '.join(highest)}"


def _on_the_card(plan: Plan) -> Iterator[tuple[str, str]]:
    memory = plan.memory
    for name, num_bytes, remark in (
        ("allocated", memory.allocated, "by tensors, at the peak"),
        ("reserved", memory.reserved, "by torch, which keeps what was freed"),
        ("context", memory.context, "by the driver, code of kernels included"),
        ("NCCL", memory.communicator, "by what carries gradients and weights between ranks"),
        ("total", memory.total, "as nvidia-smi will show it"),
    ):
        if name == "NCCL" and not num_bytes:
            continue
        yield name, f"{gib(num_bytes, memory.total, 9)}  {remark}"
    if memory.capacity is not None and plan.usable_bytes is not None:
        remark = f"{gib(plan.usable_bytes)} counted on: CUDA gives programs up to 2 % less, a plan may be 2 % too low"
        yield "card", f"{gib(memory.capacity, width=9)}  {remark}"


def _largest_told(plan: Plan, largest: LargestMicroBatch) -> Rows:
    batch = plan.recipe.loop.batch_size
    if largest.plan is None:
        return [("samples", f"none: not even {largest.too_large:,} of {batch:,} at a time")]
    positions = f", {largest.plan.slots:,} positions" if largest.plan.slots != largest.plan.samples else ""
    told = f"{largest.samples:,} of {batch:,}{positions}, take {gib(largest.plan.total)}"
    if largest.too_large is not None:
        told += f"; {largest.too_large:,} do not fit"
    elif num_processes(plan.recipe, plan.gpus) > 1:
        told += ": a card's share of the batch"
    else:
        told += ": the whole batch" if largest.samples == batch else ": all training samples"
    return [("samples", told), *([("set", _typed(plan.largest_settings))] if plan.largest_settings else [])]


def _changes_told(plan: Plan) -> Iterator[tuple[str, str]]:
    for number, made in enumerate(plan.changes[:SHOWN_CHANGES], 1):
        change = made.change
        spare = (plan.usable_bytes or 0) - made.plan.total
        then = f"fits, {gib(spare)} to spare" if made.fits else f"still {gib(-spare)} too much"
        yield f"{number}.", _typed(change.settings, change.gpus)
        yield "", f"saves {gib(made.saving_bytes)}: {gib(made.plan.total)} in all, {then}"
        yield "", f"{change.speed}; result: {change.preserves}"
    if not any(made.fits for made in plan.changes):
        yield "", "none is enough: a card with more memory, shorter texts or smaller images, or a smaller model"


def _chosen(plan: Plan) -> Iterator[tuple[str, str]]:
    for index, decision in enumerate(plan.decisions):
        told = f"{decision.setting} = {decision.value}: {decision.reason}"
        yield "chosen" if index == 0 else "", printable(told)


def _beside(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "formula", f"{gib(plan.formula.total_bytes)} by the {plan.formula.label}"
    for index, text in enumerate(plan.memory.assumed):
        yield "assumed" if index == 0 else "", printable(text)


def _typed(settings: Iterable[str], gpus: int | None = None) -> str:
    """What to type for these settings."""
    return " ".join([*([f"--gpus {gpus}"] if gpus else []), *(f"--set {setting}" for setting in settings)])


def _cards(plan: Plan) -> str:
    name = printable(plan.memory.card)
    which = "the first" if one_process(plan.recipe.parallel.strategy) else "one"
    return name if plan.gpus == 1 else f"{which} of {plan.gpus} x {name}"


def _model_name(recipe: Recipe) -> str:
    part = recipe.model
    if part.source or part.factory:
        return str(part.source or part.factory)
    return f"{(part.config or {}).get('model_type')} with random weights"
