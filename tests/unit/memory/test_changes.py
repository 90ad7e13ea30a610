"""What makes a run fit: what is offered, in which order, and what is never offered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.contract.errors import RecipeError
from paceline.contract.records import MemoryPlan
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.changes import TracedChange, cheapest_changes
from paceline.memory.search import usable_bytes
from paceline.recipe import Recipe
from paceline.recipe.choose import choose, num_processes
from tests.unit.memory.plans import GIB, HERE, bert_large, memory_plan, recipe

OFFLOADED = ("parallel.strategy=deepspeed", "parallel.offload=optimizer")

Memory = Callable[[Recipe], MemoryPlan]


class Offered:
    """The changes of a recipe for a GPU, and what was traced for them."""

    def __init__(
        self,
        gpu: str,
        *settings: str,
        limit: int | None = None,
        largest: int = 0,
        memory: Memory | None = None,
        gpus: int = 1,
        offloads: bool = False,
        shares: bool = False,
    ) -> None:
        """``offloads``: whether an update in main memory can be had, ``shares``: whether GPUs can have one model
        together; most tests are about what else there is."""
        self._offloads, self._shares = offloads, shares
        self.asked, self.gpu, self.gpus = recipe(*settings), gpu_for(gpu), gpus
        self.traced, self.on_gpus = list[Any](), list[Any]()
        self._memory = memory or (lambda chosen: bert_large(chosen, self.gpu))
        self.chosen = self._chosen((), gpus)
        assert self.gpu.memory_bytes is not None
        self.limit = usable_bytes(self.gpu.memory_bytes) if limit is None else limit
        self.plan = self.plan_with(())
        self.traced.clear()
        assert self.plan.total > self.limit, "nothing would have to be changed"
        self.changes = cheapest_changes(
            self.plan_with,
            recipe=self.chosen,
            gpu=self.gpu,
            plan=self.plan,
            limit_bytes=self.limit,
            largest=largest,
            gpus=gpus,
        )

    def plan_with(self, settings: tuple[str, ...], gpus: int | None = None) -> MemoryPlan:
        if OFFLOADED[0] in settings and not self._offloads:
            raise RecipeError("parallel.strategy=deepspeed", "not beside this recipe", "leave it out")
        if not self._shares and any(one.startswith(("parallel.tensor=", "parallel.pipeline=")) for one in settings):
            raise RecipeError("parallel.tensor", "this model has no blocks", "leave it out")
        (self.on_gpus if gpus else self.traced).append(gpus or settings)
        found = self._memory(self._chosen(settings, gpus or self.gpus))
        return replace(found, reserved=found.reserved // gpus) if gpus else found

    def _chosen(self, settings: tuple[str, ...], gpus: int) -> Recipe:
        asked = self.asked.with_settings(settings)
        return choose(asked, facts_with([self.gpu] * gpus, HERE), num_processes(asked, gpus))[0]

    def __getitem__(self, setting: str) -> TracedChange:
        return next(made for made in self.changes if made.change.settings == (setting,))

    @property
    def settings(self) -> list[str]:
        return [" ".join(made.change.settings) for made in self.changes]


def test_what_fits_comes_first_and_the_least_slow_of_it() -> None:
    """32.5 GiB on a V100 of 32 GB, of which 27 are activations: each of the four is enough. What changes the result
    comes last of them, as fast as it may be."""
    offered = Offered("v100-32gb", largest=30)
    assert offered.settings == [
        "techniques.precision=fp16",
        "loop.micro_batch_size=16",
        "techniques.recompute=true",
        "optimizer.type=adamw8bit",
    ]
    assert all(made.fits for made in offered.changes)
    slowdowns = [made.change.slowdown for made in offered.changes]
    assert slowdowns[:3] == sorted(slowdowns[:3])
    assert 0 < slowdowns[3] < slowdowns[1]
    assert "8 times" in offered.changes[0].change.speed, "a V100's 125 over 15.7 TFLOP/s"


def test_an_update_in_main_memory_is_slower_than_all_that_leaves_the_result_as_it_is() -> None:
    def memory(chosen: Recipe) -> MemoryPlan:
        return memory_plan((20 if chosen.techniques.recompute or chosen.parallel.offload == "optimizer" else 40) * GIB)

    offered = Offered("v100-32gb", memory=memory, offloads=True)
    assert offered.settings[:2] == ["techniques.recompute=true", " ".join(OFFLOADED)]
    assert "needs the package deepspeed" in offered.changes[1].change.speed
    assert not offered.on_gpus, "recompute is enough"
    assert offered.changes[1].change.preserves == "up to rounding"


def test_more_gpus_are_told_of_where_only_an_update_in_main_memory_fits() -> None:
    def memory(chosen: Recipe) -> MemoryPlan:
        return memory_plan((20 if chosen.parallel.offload == "optimizer" else 40) * GIB)

    offered = Offered("v100-32gb", memory=memory, offloads=True)
    assert [made.change.gpus for made in offered.changes] == [2, None]
    assert offered.settings == ["parallel.strategy=fsdp", " ".join(OFFLOADED)]


def test_what_does_not_fit_is_in_the_order_of_what_it_saves() -> None:
    offered = Offered("v100-16gb", limit=13 * GIB)
    fits = [made.fits for made in offered.changes]
    savings = [made.saving_bytes for made in offered.changes if not made.fits]
    assert fits == sorted(fits, reverse=True)
    assert len(savings) == 2
    assert savings == sorted(savings, reverse=True)


def test_savings_are_the_difference_of_two_traces() -> None:
    offered = Offered("v100-32gb", largest=30)
    for made in offered.changes:
        assert made.plan == offered.plan_with(made.change.settings)
        assert made.saving_bytes == offered.plan.total - made.plan.total
        assert made.fits == (made.plan.total <= offered.limit)


def test_the_effect_on_the_result_is_said() -> None:
    offered = Offered("v100-32gb", largest=30)
    assert offered["optimizer.type=adamw8bit"].change.preserves == "changes the result"
    assert offered["techniques.recompute=true"].change.preserves == "bit-exact"
    assert offered["loop.micro_batch_size=16"].change.preserves == "up to rounding"
    assert offered["techniques.precision=fp16"].change.preserves == "up to rounding"


@pytest.mark.parametrize(
    ("gpu", "settings", "value"),
    [
        ("v100-32gb", (), "fp16"),
        ("a100-40gb", ("techniques.precision=fp32",), "bf16"),
        ("a100-40gb", ("techniques.precision=tf32",), "bf16"),
        ("a100-40gb", (), None),
        ("24GiB", (), None),
    ],
)
def test_sixteen_bits_where_the_gpu_computes_in_them(gpu: str, settings: tuple[str, ...], value: str | None) -> None:
    """An amount of memory is no GPU of which that is known."""
    found = [setting for setting in Offered(gpu, *settings, limit=10 * GIB).settings if "precision" in setting]
    assert found[:1] == ([f"techniques.precision={value}"] if value else [])


def test_pieces_are_halves_of_the_micro_batch() -> None:
    offered = Offered("v100-16gb", largest=11)
    assert "loop.micro_batch_size=8" in offered.settings
    assert "4 micro-batches" in offered["loop.micro_batch_size=8"].change.speed
    pieces = [settings for settings in offered.traced if settings[0].startswith("loop.micro")]
    assert pieces == [("loop.micro_batch_size=8",)], "the search has shown that 16 does not fit"


def test_halves_of_an_odd_micro_batch_are_rounded_up_and_one_cannot_be_halved() -> None:
    offered = Offered("v100-16gb", "loop.batch_size=27", largest=7)
    assert "loop.micro_batch_size=7" in offered.settings
    assert "4 micro-batches" in offered["loop.micro_batch_size=7"].change.speed
    offered = Offered("v100-16gb", "loop.micro_batch_size=1", limit=1)
    assert not [setting for setting in offered.settings if "micro" in setting]


@pytest.mark.parametrize(("strategy", "share"), [("ddp", 16), ("fsdp", 16), ("dp", 64)])
def test_pieces_are_those_of_a_process(strategy: str, share: int) -> None:
    """Four GPUs have 16 of 64 samples each, or one process has all 64 and splits them itself."""

    def memory(chosen: Recipe) -> MemoryPlan:
        samples = min(chosen.loop.micro_batch_size or share, share)
        return memory_plan(samples * GIB, samples=samples)

    for largest, pieces in ((share // 2, 2), (1, share)):
        settings = ("loop.batch_size=64", f"parallel.strategy={strategy}")
        offered = Offered("v100-16gb", *settings, limit=largest * GIB, largest=largest, memory=memory, gpus=4)
        piece = offered[f"loop.micro_batch_size={largest}"].change
        assert f"{pieces} micro-batches a step" in piece.speed


def test_a_piece_that_is_found_too_large_after_all_is_halved_again() -> None:
    """Memory that does not grow evenly: the search said 16, a trace says otherwise."""
    gpu = gpu_for("v100-32gb")

    def memory(chosen: Recipe) -> MemoryPlan:
        plan = bert_large(chosen, gpu)
        return replace(plan, reserved=40 * GIB) if (chosen.loop.micro_batch_size or 0) > 8 else plan

    assert "loop.micro_batch_size=8" in Offered("v100-32gb", largest=16, memory=memory).settings


def test_where_no_change_is_enough_they_are_put_together_until_it_fits() -> None:
    """6 GiB, of which weights, gradients, states and context take 5.3 and an evaluation of 128 samples 6.4."""
    offered = Offered("v100-16gb", limit=6 * GIB)
    best = offered.changes[0]
    assert best.fits
    assert not any(made.fits for made in offered.changes[1:])
    assert best.change.settings == (
        "techniques.precision=fp16",
        "loop.micro_batch_size=1",
        "loop.evaluation_batch_size=1",
    )
    assert best.change.preserves == "up to rounding", "8-bit states were not needed"
    assert best.change.slowdown == pytest.approx(0.05)
    assert best.plan == offered.plan_with(best.change.settings)


def test_pieces_are_as_large_as_the_other_changes_allow() -> None:
    """In fp32 not even a piece of one fits; in fp16 one of four."""

    def memory(chosen: Recipe) -> MemoryPlan:
        rest = 4 if chosen.techniques.precision == "fp16" else 30
        return memory_plan(rest * GIB + (chosen.loop.micro_batch_size or 0) * GIB // 2)

    best = Offered("v100-16gb", limit=7 * GIB, memory=memory).changes[0]
    assert (best.change.settings, best.fits) == (("techniques.precision=fp16", "loop.micro_batch_size=4"), True)


def test_where_all_together_are_not_enough_they_are_told_all_the_same() -> None:
    offered = Offered("v100-16gb", limit=GIB)
    best = offered.changes[0]
    assert not best.fits
    assert best.change.settings == (
        "techniques.precision=fp16",
        "loop.micro_batch_size=1",
        "techniques.recompute=true",
        "loop.evaluation_batch_size=1",
        "optimizer.type=adamw8bit",
    )
    assert best.change.preserves == "changes the result", "the strongest effect counts"
    assert best.change.slowdown == pytest.approx(1.05 * 4 / 3 * 1.02 - 1)


def test_more_gpus_come_last_and_as_few_as_it_takes() -> None:
    """32 GiB of which nothing on one GPU saves any: two GPUs hold 16 each, four 8."""
    offered = Offered("v100-16gb", limit=10 * GIB, memory=lambda _: memory_plan(32 * GIB))
    (cut,) = offered.changes
    assert (cut.change.settings, cut.change.gpus, cut.fits) == (("parallel.strategy=fsdp",), 4, True)
    assert offered.on_gpus == [2, 4]
    assert Offered("v100-32gb", largest=30).on_gpus == [], "one GPU is enough"


def test_of_several_gpus_shards_are_tried_before_more() -> None:
    """Ranks that keep whole models each may hold shards instead."""
    offered = Offered("v100-16gb", limit=10 * GIB, memory=lambda _: memory_plan(32 * GIB), gpus=4)
    assert offered.on_gpus == [4]
    sharded = Offered(
        "v100-16gb", "parallel.strategy=fsdp", limit=3 * GIB, memory=lambda _: memory_plan(20 * GIB), gpus=4
    )
    assert sharded.on_gpus == [8], "they are shards already"


def test_gpus_that_have_one_model_together_are_offered_behind_shards() -> None:
    """40 GiB: a GPU's share of it is small enough on four, whichever way it is cut."""
    offered = Offered("v100-16gb", limit=12 * GIB, memory=lambda _: memory_plan(40 * GIB), shares=True)
    assert [(made.change.gpus, made.change.settings) for made in offered.changes] == [
        (4, ("parallel.strategy=fsdp",)),
        (4, ("parallel.pipeline=4", "loop.micro_batch_size=2")),
        (4, ("parallel.tensor=4",)),
    ]
    assert all(made.fits and made.change.preserves == "up to rounding" for made in offered.changes)
    slowdowns = [made.change.slowdown for made in offered.changes]
    assert slowdowns == sorted(slowdowns)
    assert slowdowns[1] == pytest.approx(1.05 * 19 / 16 - 1), "16 micro-batches in four stages: 3 of 19 passes wait"
    assert "16% of a step of 16 micro-batches" in offered.changes[1].change.speed


def test_gpus_that_are_there_share_one_model_in_groups_too() -> None:
    """FSDP is refused beside an update that it cannot split; pairs among four GPUs are enough."""

    def memory(chosen: Recipe) -> MemoryPlan:
        if chosen.parallel.strategy == "fsdp":
            raise RecipeError("parallel.strategy = fsdp", "not beside the rest", "leave it out")
        shared = chosen.parallel.tensor * chosen.parallel.pipeline
        return memory_plan(4 * 40 * GIB // shared)

    offered = Offered("v100-16gb", limit=24 * GIB, memory=memory, gpus=4, shares=True)
    found = {(made.change.gpus, made.change.settings[0]) for made in offered.changes if made.fits}
    assert found == {(4, "parallel.tensor=2"), (4, "parallel.pipeline=2")}


def test_models_that_ranks_cannot_share_that_way_are_not_offered_so() -> None:
    def normalised(chosen: Recipe) -> MemoryPlan:
        return memory_plan(40 * GIB, normalises_batches=True)

    for settings in (("parallel.tensor=2",), ("parallel.strategy=fsdp",)):
        offered = Offered(
            "v100-16gb", *settings, limit=GIB, memory=lambda _: memory_plan(40 * GIB), gpus=2, shares=True
        )
        assert not any("parallel.tensor" in one or "parallel.pipeline" in one for one in offered.settings), settings
    offered = Offered("v100-16gb", limit=GIB, memory=normalised, shares=True)
    assert offered.settings == ["parallel.strategy=fsdp"], "batch norms go through no pipeline"


def test_more_gpus_that_are_refused_are_not_offered() -> None:
    """8-bit states are rounded in blocks that would cross shards."""
    offered = Offered("v100-16gb", "optimizer.type=adamw8bit", limit=GIB, memory=lambda _: memory_plan(32 * GIB))
    assert offered.changes == ()


def test_what_the_recipe_has_already_is_not_offered() -> None:
    offered = Offered(
        "v100-16gb",
        *("techniques.recompute=true", "techniques.precision=fp16", "optimizer.type=adamw8bit"),
        limit=2 * GIB,
    )
    assert {made.change.settings[0] for made in offered.changes} == {"loop.micro_batch_size=1"}
    plain = Offered("v100-16gb", "optimizer.type=sgd", limit=GIB)
    assert plain.settings
    assert not any("adamw8bit" in settings for settings in plain.settings), "sgd has no 8-bit kind"


def test_adam_becomes_adamw_only_without_decay() -> None:
    plain = Offered("v100-16gb", "optimizer.type=adam", limit=10 * GIB)
    assert "optimizer.type=adamw8bit optimizer.weight_decay=0" in plain.settings
    decayed = Offered("v100-16gb", "optimizer.type=adam", "optimizer.weight_decay=0.1", limit=10 * GIB)
    assert not any("adamw8bit" in settings for settings in decayed.settings)


def test_what_train_would_refuse_is_not_offered() -> None:
    """A wish for captured steps excludes recompute, and a trained head alone has no block to recompute."""
    for wish in ("techniques.capture=true", "model.train=head"):
        offered = Offered("v100-16gb", wish, limit=10 * GIB)
        assert ("techniques.recompute=true",) in offered.traced, "it was tried"
        assert not any("recompute" in settings for settings in offered.settings), wish
        for made in offered.changes:
            offered.plan_with(made.change.settings, made.change.gpus)


def test_a_change_that_the_trace_refuses_is_not_offered() -> None:
    gpu = gpu_for("v100-32gb")

    def memory(chosen: Recipe) -> MemoryPlan:
        if chosen.techniques.recompute:
            raise RecipeError("techniques.recompute = true", "the blocks hold batch normalisation")
        return bert_large(chosen, gpu)

    offered = Offered("v100-32gb", largest=30, memory=memory)
    assert offered.settings[:2] == ["techniques.precision=fp16", "loop.micro_batch_size=16"]
    assert "techniques.recompute=true" not in offered.settings


def test_a_bug_is_not_taken_for_a_refusal() -> None:
    def memory(chosen: Recipe) -> MemoryPlan:
        if chosen.techniques.recompute:
            raise ZeroDivisionError
        return memory_plan(40 * GIB)

    with pytest.raises(ZeroDivisionError):
        Offered("v100-32gb", memory=memory)


def test_an_evaluation_at_the_peak_is_made_smaller() -> None:
    """Pieces of two leave the evaluation's 128 samples at the peak: nothing else is in the way."""
    offered = Offered("v100-16gb", "loop.micro_batch_size=2", limit=8 * GIB)
    assert offered.plan.moment == "evaluation"
    (only,) = offered.changes
    assert (only.change.settings, only.fits, only.change.slowdown) == (("loop.evaluation_batch_size=2",), True, 0)
    assert offered.traced == [("loop.evaluation_batch_size=2",)]


def test_an_evaluation_that_is_in_the_way_of_a_change_is_made_smaller_with_it() -> None:
    """8 GiB: pieces of two fit, but not beside evaluations of 128 samples."""
    offered = Offered("v100-16gb", limit=8 * GIB, largest=2)
    assert "loop.micro_batch_size=2 loop.evaluation_batch_size=2" in offered.settings
    assert offered.changes[0].fits


def test_features_have_no_step_to_change() -> None:
    """Every sample goes through the model once, as many at a time as in an evaluation."""

    def memory(chosen: Recipe) -> MemoryPlan:
        size = chosen.loop.evaluation_batch_size or chosen.loop.batch_size
        return memory_plan(size * GIB // 8, moment="evaluation", samples=size)

    offered = Offered("v100-16gb", "model.train=features", limit=5 * GIB, memory=memory)
    assert offered.settings == ["loop.evaluation_batch_size=32"]
    assert offered.traced == [("loop.evaluation_batch_size=64",), ("loop.evaluation_batch_size=32",)]
    assert not Offered("v100-16gb", "model.train=features", limit=GIB // 16, memory=memory).changes


def normalised(chosen: Recipe) -> MemoryPlan:
    """A GiB a sample of each micro-batch, which batch normalisation takes its statistics of."""
    return memory_plan((chosen.loop.micro_batch_size or 32) * GIB, normalises_batches=True)


def test_a_smaller_micro_batch_changes_what_batch_normalisation_computes() -> None:
    """So it comes behind what keeps the result, however fast it is."""

    def memory(chosen: Recipe) -> MemoryPlan:
        return replace(normalised(chosen), reserved=10 * GIB) if chosen.techniques.recompute else normalised(chosen)

    offered = Offered("v100-16gb", largest=15, memory=memory)
    assert offered.settings == ["techniques.recompute=true", "loop.micro_batch_size=8"]
    piece = offered["loop.micro_batch_size=8"].change
    assert piece.preserves == "changes the result"
    assert piece.speed.endswith("; batch normalisation then sees at most 8 samples at a time")


def test_without_batch_normalisation_nothing_is_said_of_it() -> None:
    """Whether of texts or of images: a ConvNeXt and a ViT have none."""
    offered = Offered(
        "v100-16gb", largest=15, memory=lambda chosen: replace(normalised(chosen), normalises_batches=False)
    )
    piece = offered["loop.micro_batch_size=8"].change
    assert piece.preserves == "up to rounding"
    assert "batch normalisation" not in piece.speed


@pytest.mark.parametrize(
    ("gpus", "strategy", "count", "preserves"),
    [
        (1, "auto", 4, "changes the result"),
        (4, "auto", 4, "up to rounding"),
        (4, "dp", 4, "changes the result"),
        (4, "fsdp", 8, "changes the result"),
    ],
)
def test_a_batch_that_is_split_anew_is_normalised_otherwise(
    gpus: int, strategy: str, count: int, preserves: str
) -> None:
    """Ranks that hold whole models have the same shares of a batch as those that hold shards."""
    offered = Offered(
        *("v100-16gb", f"parallel.strategy={strategy}"),
        limit=8 * GIB,
        memory=lambda _: memory_plan(28 * GIB, normalises_batches=True),
        gpus=gpus,
    )
    (cut,) = offered.changes
    assert (cut.change.gpus, cut.change.preserves) == (count, preserves)
    assert ("batch normalisation" in cut.change.speed) == (preserves == "changes the result")


def test_savings_too_small_to_tell_are_left_out() -> None:
    def memory(chosen: Recipe) -> MemoryPlan:
        return memory_plan(40 * GIB - (GIB // 10 if chosen.techniques.recompute else 0))

    assert Offered("v100-32gb", memory=memory).settings == ["parallel.strategy=fsdp"]


def test_nothing_is_traced_in_vain() -> None:
    offered = Offered("v100-32gb", largest=30)
    assert len(offered.traced) == len(set(offered.traced)) == 4, offered.traced


def test_no_change_is_offered_twice() -> None:
    """Where the second change saves nothing beside the first, both together are the first."""

    def memory(chosen: Recipe) -> MemoryPlan:
        small = chosen.techniques.recompute or (chosen.loop.micro_batch_size or 0) < 32
        return memory_plan((20 if small else 40) * GIB)

    offered = Offered("v100-16gb", memory=memory)
    assert len({made.change for made in offered.changes}) == len(offered.changes)
    assert sorted(made.change.settings for made in offered.changes if not made.fits) == [
        ("loop.micro_batch_size=1",),
        ("techniques.recompute=true",),
    ]
