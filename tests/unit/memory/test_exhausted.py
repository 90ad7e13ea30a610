"""What is told when the memory is full, where nothing need be full for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline.contract.errors import MemoryFullError, RecipeError, UserError
from paceline.contract.records import MemoryPlan
from paceline.contract.spans import activity, span
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory import exhausted as module
from paceline.memory.changes import Change, TracedChange
from paceline.memory.exhausted import (
    SPLITTABLE,
    STAGES,
    Shortage,
    Situation,
    exhausted,
    explained,
    place_of,
    traced_offers,
)
from paceline.memory.predict import PlanFailed
from paceline.memory.search import usable_bytes
from paceline.memory.split import check_split, halved, largest_share, retried
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.seams import Alone
from tests.unit.memory.plans import GIB, HERE, MIB, bert_large, memory_plan, recipe

pytestmark = pytest.mark.timeout(30)

GPU = gpu_for("v100-32gb")
FACTS = facts_with([GPU], HERE)
MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 31.73 GiB of which 512 bytes is"
    " free. Including non-PyTorch memory, this process has 30.48 GiB memory in use. Of the allocated memory 28.50 GiB"
    " is allocated by PyTorch, with 3.00 GiB allocated in private pools (e.g., CUDA Graphs), and 1.00 GiB is reserved"
    " by PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
)


def full(message: str = MESSAGE) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(message)


def situation(*settings: str, **changes: Any) -> Situation:
    chosen = recipe("device=cuda", *settings)
    return Situation(**{"recipe": chosen, "resume": "go on", "largest": 32, "evaluated": 128, **changes})


def test_the_numbers_of_torchs_message() -> None:
    found = Shortage.parse(MESSAGE)
    assert found.asked == 20 * MIB
    assert found.total == round(31.73 * GIB)
    assert found.free == 512
    assert found.allocated == round(28.5 * GIB)
    assert found.cached == GIB


def test_a_message_that_says_little_is_passed_on() -> None:
    assert Shortage.parse("no room") == Shortage()
    told = exhausted(full("no room\nmore"), situation(held={"parameters": 2 * GIB, "gradients": 0}))
    assert told.why == "no room; alive were parameters 2 GiB, activations and all else"


def through(*names: str) -> BaseException:
    """An error that came out of spans and activities of these names, given from the outermost to the innermost."""

    def fail() -> None:
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(activity(name) if name in {*STAGES, SPLITTABLE} else span(name))
            raise full()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fail()
    return caught.value


IN_A_STEP = (SPLITTABLE, "accumulating", "forward")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("step", "accumulating", "forward"), "in the forward pass of step 3 of 9"),
        (("step", "accumulating", "backward"), "in the backward pass of step 3 of 9"),
        (("step", "accumulating", "data wait"), "making a batch for step 3 of 9"),
        (("step", "updating", "clip"), "in the update of step 3 of 9"),
        (("step", "updating", "update"), "in the update of step 3 of 9"),
        (("step", "updating"), "in step 3 of 9"),
        (("warming up", "backward"), "in the backward pass of the warm-up"),
        (("evaluate", "evaluating"), "in an evaluation"),
        (("evaluating", "update"), "in an evaluation"),
        (("embedding",), "in embedding the samples"),
        (("placing and checking", "comparing"), "in comparing the model's fast path with its plain one"),
        (("placing and checking",), "in placing and checking the model"),
        (("checkpoint",), "after step 2 of 9"),
    ],
)
def test_the_place_is_what_the_error_came_out_of(names: Sequence[str], told: str) -> None:
    assert place_of(through(*names), 3, 9) == told


def test_before_there_are_steps() -> None:
    assert place_of(full()) == "before the first step"


def test_plain_advice_where_nothing_is_traced() -> None:
    error = through(SPLITTABLE, "accumulating", "backward")
    told = exhausted(error, situation(step=3, total_steps=9, plan_command="paceline plan r.yaml --gpu v100"))
    assert told.what == "out of memory in the backward pass of step 3 of 9: loop.micro_batch_size = 32"
    assert told.fix == (
        "--set loop.micro_batch_size=16, or --set techniques.recompute=true; paceline plan r.yaml --gpu v100 says what"
        " fits; --set loop.on_oom=split halves micro-batches by itself; then go on"
    )
    assert told.settings == ("loop.micro_batch_size=16", "techniques.recompute=true")
    assert (told.exit_code, told.phase) == (2, "in the backward pass of step 3 of 9")


def test_splitting_is_not_advised_where_it_is_on_or_refused() -> None:
    for given in (situation("loop.on_oom=split"), situation(can_split=False)):
        assert "split" not in exhausted(through(*IN_A_STEP), given).fix


def test_splitting_is_advised_of_a_runs_evaluations_and_of_no_others() -> None:
    assert "on_oom=split halves batches" in exhausted(through(SPLITTABLE, "evaluating"), situation()).fix
    assert "split" not in exhausted(through("evaluating"), situation()).fix


def test_what_is_of_no_use_is_not_advised() -> None:
    last = exhausted(through(*IN_A_STEP), situation("techniques.recompute=true", largest=1))
    assert last.settings == ()
    assert last.fix.startswith("a GPU with more memory")
    update = exhausted(through("updating", "update"), situation())
    assert update.settings == ("optimizer.type=adamw8bit",)
    comparison = exhausted(through("placing and checking", "comparing"), situation())
    assert comparison.settings == ("techniques.packing=false", "techniques.early_pooling=false")
    assert exhausted(through("evaluating"), situation()).settings == ("loop.evaluation_batch_size=64",)


def test_nothing_is_advised_that_the_next_start_refuses() -> None:
    """States of another optimizer are not in the checkpoint; and batch normalisation keeps two samples together."""
    update = exhausted(through("updating", "update"), situation(has_states=True))
    assert update.settings == ()
    assert "adamw8bit" not in update.fix
    offers = [
        TracedChange(change=Change(settings=settings, speed=""), plan=memory_plan(GIB), saving_bytes=1, fits=True)
        for settings in (("optimizer.type=adamw8bit", "optimizer.weight_decay=0"), ("techniques.recompute=true",))
    ]
    goes_on = exhausted(through(*IN_A_STEP), situation(has_states=True, offers=lambda _: offers))
    assert goes_on.settings == ("techniques.recompute=true", "loop.micro_batch_size=16")
    anew = exhausted(through(*IN_A_STEP), situation(offers=lambda _: offers))
    assert "optimizer.type=adamw8bit" in anew.settings
    two = exhausted(through(*IN_A_STEP), situation("techniques.recompute=true", largest=2, fewest=2))
    assert two.settings == ()
    assert exhausted(through("evaluating"), situation(evaluated=2, fewest=2)).settings == (
        "loop.evaluation_batch_size=1",
    )


def test_the_three_cheapest_changes_are_told_with_what_they_do() -> None:
    changes = [
        TracedChange(
            change=Change(settings=(f"loop.micro_batch_size={n}",), gpus=2 if n == 4 else None, speed="a bit slower"),
            plan=memory_plan(GIB),
            saving_bytes=n * GIB,
            fits=True,
        )
        for n in (16, 8, 4, 2)
    ]
    told = exhausted(through(*IN_A_STEP), situation("loop.on_oom=split", offers=lambda _: changes))
    assert told.fix == (
        "--set loop.micro_batch_size=16 (saves 16 GiB; a bit slower), or --set loop.micro_batch_size=8 (saves 8 GiB; a"
        " bit slower), or --gpus 2 --set loop.micro_batch_size=4 (saves 4 GiB; a bit slower); then go on"
    )


def test_what_was_not_traced_in_time_is_advised_beside_what_was() -> None:
    gpu = Change(settings=("techniques.recompute=true",), speed="slower")
    offers = [
        TracedChange(change=gpu, plan=memory_plan(GIB), saving_bytes=GIB, fits=True),
        TracedChange(change=Change(settings=("a=b",), speed=""), plan=memory_plan(GIB), saving_bytes=1, fits=False),
    ]
    told = exhausted(through(*IN_A_STEP), situation("loop.on_oom=split", offers=lambda _: offers))
    assert told.settings == ("techniques.recompute=true", "loop.micro_batch_size=16")


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be ...",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ...",
    ],
)
def test_others_words_for_the_same(message: str) -> None:
    with pytest.raises(MemoryFullError, match="out of memory before the first step"), explained(situation):
        raise RuntimeError(message)


@pytest.mark.parametrize("error", [RuntimeError("size mismatch"), UserError("what"), KeyError("out of memory")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explained(situation):
        raise error
    assert caught.value is error


class StandIn:
    """In the predictor's place: ``answers`` makes the plans."""

    answers: Callable[[Recipe], MemoryPlan]

    def __init__(self) -> None:
        self._killed = threading.Event()

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def plan(self, recipe: Recipe, gpu: Any, *, world_size: int) -> MemoryPlan:
        return type(self).answers(recipe) if StandIn.endless is None else self._until_killed()

    def kill(self) -> None:
        self._killed.set()

    endless: bool | None = None

    def _until_killed(self) -> MemoryPlan:
        assert self._killed.wait(20)
        raise PlanFailed("killed")


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    made = type("Made", (StandIn,), {"answers": staticmethod(lambda chosen: bert_large(chosen, GPU))})
    monkeypatch.setattr(module, "Predictor", made)
    return made


CHOSEN = choose(recipe(), FACTS)[0]


def test_what_is_offered_is_what_a_plan_offers(predictor: type[StandIn]) -> None:
    offers = traced_offers(CHOSEN, FACTS, Shortage.parse(MESSAGE), num_gpus=1)
    assert [offer.fits for offer in offers[:3]] == [True] * 3, [offer.change.settings for offer in offers]
    assert {offer.change.settings[0].partition("=")[0] for offer in offers[:3]} == {
        "techniques.precision",
        "techniques.recompute",
        "loop.micro_batch_size",
    }


def test_a_gpu_that_is_full_counts_for_more_than_a_plan_that_fits(predictor: type[StandIn]) -> None:
    small = choose(recipe("loop.batch_size=8"), FACTS)[0]
    plan = bert_large(small, GPU)
    assert plan.total <= usable_bytes(plan.capacity or 0)
    offers = traced_offers(small, FACTS, Shortage(asked=2 * GIB), num_gpus=1, known=plan)
    assert offers
    assert all(offer.saving_bytes >= 2 * GIB for offer in offers if offer.fits)


def test_nobody_waits_for_long(predictor: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "endless", True)
    began = time.monotonic()
    assert traced_offers(CHOSEN, FACTS, Shortage(), num_gpus=1, seconds=0.2) == ()
    assert time.monotonic() - began < 5
    # what is known by then is of no use alone: nothing else was traced
    assert traced_offers(CHOSEN, FACTS, Shortage(), num_gpus=1, known=memory_plan(GIB), seconds=0.2) == ()


def test_a_run_that_cannot_be_traced_is_offered_nothing(predictor: type[StandIn]) -> None:
    def refuses(chosen: Recipe) -> MemoryPlan:
        raise RecipeError("parallel.strategy = dp", "it cannot be traced")

    predictor.answers = staticmethod(refuses)  # type: ignore[assignment]
    assert traced_offers(CHOSEN, FACTS, Shortage(), num_gpus=1) == ()


def test_dp_is_offered_changes_on_all_of_its_gpus(predictor: type[StandIn]) -> None:
    facts = facts_with([GPU] * 2, HERE)
    chosen = choose(recipe("parallel.strategy=dp"), facts)[0]
    assert traced_offers(chosen, facts, Shortage.parse(MESSAGE), num_gpus=2)


# smaller micro-batches


@pytest.mark.parametrize(
    ("micro", "samples", "ranks", "sizes"),
    [
        ("null", 1000, 1, [32, 16, 8, 4, 2, 1]),
        ("32", 1000, 2, [16, 8, 4, 2, 1]),  # a rank's share is less than the recipe's micro-batch
        ("9", 1000, 1, [9, 5, 3, 2, 1]),
        ("32", 5, 1, [5, 3, 2, 1]),  # so is the only batch
        ("32", 3, 4, [1]),
    ],
)
def test_each_half_is_smaller_than_the_largest_before(micro: str, samples: int, ranks: int, sizes: list[int]) -> None:
    current: Recipe | None = recipe(f"loop.micro_batch_size={micro}")
    found = []
    while current is not None:
        found.append(largest_share(current, samples, ranks))
        current = halved(current, samples, ranks)
    assert found == sizes


@pytest.mark.parametrize(("settings", "why"), [(("model.train=features",), ""), ((), "ranks share weights")])
def test_splitting_is_refused_where_it_has_no_effect(settings: Sequence[str], why: str) -> None:
    with pytest.raises(RecipeError, match="has no effect"):
        check_split(recipe("loop.on_oom=split", *settings), why)
    check_split(recipe(*settings), why)


class Marks:
    """An engine as ``retried`` sees it: what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mark(self) -> Callable[[], None]:
        self.calls.append("mark")
        return lambda: self.calls.append("back")

    def catch_up(self, error: BaseException) -> None:
        self.calls.append("catch up")


def test_work_begins_anew_until_it_fits_or_cannot_be_smaller() -> None:
    engine: Any = Marks()
    tries, told = iter([full(), full(), None]), []

    def work() -> str:
        if (error := next(tries)) is not None:
            raise error
        return "done"

    def split(why: str) -> bool:
        told.append(why)
        return True

    assert retried(work, engine, Alone(), split, step=3, total_steps=9) == "done"
    assert engine.calls == [*["mark", "catch up", "back"] * 2, "mark"]
    assert told == ["out of memory after step 2 of 9"] * 2
    last = full()
    tries = iter([last])
    with pytest.raises(torch.OutOfMemoryError) as caught:
        retried(work, engine, Alone(), lambda why: False, step=3, total_steps=9)
    assert caught.value is last


def test_what_the_failed_pass_held_is_free_before_the_next() -> None:
    engine: Any = Marks()
    held: list[Any] = []

    class Activation:
        def __init__(self) -> None:
            held.append(self)

        def __del__(self) -> None:
            engine.calls.append("freed")

    def work() -> str:
        if engine.calls.count("mark") == 2:
            return "done"
        activation = Activation()
        held.clear()
        try:
            raise ValueError("a compiler's")
        except ValueError:
            raise full() from None
        finally:
            del held[:]
            assert activation

    assert retried(work, engine, Alone(), lambda why: True, step=1, total_steps=9) == "done"
    assert engine.calls == ["mark", "freed", "catch up", "back", "mark"]
