"""Claims that need a GPU or a compiler, with stand-ins for both: each of them fails where its fault is there."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from paceline.check import capture, compiled, memory, recompiles, repeat, waits
from paceline.check.claim import Broken, NotApplicable
from paceline.check.subject import Subject, subject_of
from paceline.contract.errors import RecipeError
from paceline.contract.records import Decision
from paceline.engine.torch_engine import TorchEngine
from paceline.recipe import Recipe
from paceline.techniques import compile as compiling
from tests.testing.tiny import TEXTS, tiny_bert_config
from tests.unit.check.recorded_graphs import with_recorded_graphs


def made(folder: Path, **more: Any) -> Subject:
    """Twenty samples of a BERT of two layers with dropout, on the CPU."""
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([f"{index} {TEXTS[index % 4]}", ("good", "bad")[index % 2]] for index in range(40))
    config = tiny_bert_config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    recipe = Recipe.parse(
        {
            "model": {"config": config, "vocabulary_size": 300},
            "data": {"source": str(folder / "rows.csv")},
            "device": "cpu",
            **more,
        }
    )
    return subject_of(recipe, 20, folder)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return made(tmp_path_factory.mktemp("subject"))


def with_prepared(subject: Subject, *settings: str) -> Subject:
    """As if a run were made with these settings."""
    prepared = replace(subject.prepared, recipe=subject.prepared.recipe.with_settings(settings))
    return replace(subject, prepared=prepared)


# ---- compiled


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for torch.compile: counts its calls, and multiplies what they give by ``factor``."""
    does: dict[str, Any] = {"calls": 0, "factor": 1.0, "error": None}

    def call(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        does["calls"] += 1
        if does["error"] is not None:
            raise does["error"]
        found = plain(*args, **kwargs)
        return _pytree.tree_map_only(Tensor, lambda t: t * does["factor"] if t.is_floating_point() else t, found)

    monkeypatch.setattr(compiling, "_compiled_call", lambda *_, **__: call)
    return does


def test_what_the_compiler_makes_is_what_is_compared(subject: Subject, compiler: dict[str, Any]) -> None:
    compiles = with_prepared(subject, "techniques.compile=true")
    assert "each of 2 blocks" in compiled.check(compiles)
    assert compiler["calls"] > 0, "the compiled passes were never taken"
    compiler["factor"] = 1.01
    with pytest.raises(Broken, match="compiled and as written differ in the gradient of"):
        compiled.check(compiles)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch traces what is compiled as ever, and runs the graph as it was traced: that needs no compiler."""
    compiles = torch.compile

    def traces(function: Any, *, backend: Any, options: Any, **given: Any) -> Any:
        return compiles(function, backend="eager", **given)

    monkeypatch.setattr(torch, "compile", traces)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# torch hides both while it traces, in a way that turning warnings into errors defeats
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_blocks_of_padded_texts_are_those_as_written(subject: Subject, traced: None) -> None:
    """Each with its own weights, the mask, and in the numbers' own format."""
    padded = replace(subject, recipe=subject.recipe.with_settings(["techniques.packing=false"]))
    told = compiled.check(with_prepared(padded, "techniques.compile=true"))
    assert "each of 2 blocks and the embeddings" in told
    assert float(told.split("differ by ")[1].split(" ")[0]) < 1e-6


class CompilerError(torch._dynamo.exc.TorchDynamoException):
    """Of a kind that ``reason_of`` takes for the compiler's."""


@pytest.mark.parametrize("claim", [compiled, recompiles])
def test_a_compiler_that_fails_is_no_fault_where_auto_goes_on_without_it(
    claim: Any, subject: Subject, compiler: dict[str, Any]
) -> None:
    compiler["error"] = CompilerError("no C++ compiler")
    compiles = with_prepared(subject, "techniques.compile=true")
    others = tuple(made for made in subject.decisions if made.setting != "techniques.compile")
    asked = replace(compiles, recipe=compiles.recipe.with_settings(["techniques.compile=true"]), decisions=others)
    with pytest.raises(RecipeError, match=r"techniques\.compile = true"):
        claim.check(asked)
    chosen = Decision(setting="techniques.compile", value="true", reason="the run is long")
    with pytest.raises(NotApplicable, match="goes on without"):
        claim.check(replace(asked, decisions=(*others, chosen)))


# ---- captured


@pytest.fixture
def on_a_gpu(subject: Subject) -> Subject:
    """The subject of a recipe for a GPU, whose engine computes on the CPU all the same."""
    gpu = with_prepared(subject, "device=cuda", "techniques.capture=true")

    class Pretends(Subject):
        def with_settings(self, settings: Any, world_size: int = 1) -> Recipe:
            off = ("device=cpu", "techniques.capture=false")
            return super().with_settings([*settings, *off], world_size)

    values = {name: getattr(gpu, name) for name in gpu.__dataclass_fields__}
    return Pretends(**{**values, "recipe": gpu.recipe.with_settings(["device=cuda"])})


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, on_a_gpu: Subject) -> list[str]:
    """What each engine is asked to be, in order; every one says that it replays."""
    asked: list[str] = []
    given = type(on_a_gpu).with_settings

    def noted(self: Subject, settings: Any, world_size: int = 1) -> Recipe:
        found = [*settings]
        asked.append("captured" if found[-1] == "techniques.capture=true" else "eager")
        return given(self, found, world_size)

    monkeypatch.setattr(type(on_a_gpu), "with_settings", noted)
    monkeypatch.setattr(TorchEngine, "replays", property(lambda self: True))
    monkeypatch.setattr(Subject, "numbers", lambda self, *_, **__: torch.random.fork_rng(devices=[]))
    return asked


def test_captured_steps_that_are_eager_ones_hold(on_a_gpu: Subject, engines: list[str]) -> None:
    assert "differ by 0.0e+00" in capture.check(on_a_gpu)
    assert engines == ["eager", "captured"]


def test_a_captured_row_that_is_filled_further_drops_the_same(
    on_a_gpu: Subject, engines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = type(on_a_gpu).with_settings

    def fills(self: Subject, settings: Any, world_size: int = 1) -> Recipe:
        found = [*settings]
        own = any(setting.startswith("data.pad_to_multiple_of") for setting in found)
        further = found[-1] == "techniques.capture=true" and not own
        return given(self, [*(["data.pad_to_multiple_of=128"] if further else []), *found], world_size)

    monkeypatch.setattr(type(on_a_gpu), "with_settings", fills)
    assert "differ by 0.0e+00" in capture.check(on_a_gpu)
    assert engines == ["eager", "captured"]


def test_a_captured_update_that_is_not_made_is_found(
    on_a_gpu: Subject, engines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = TorchEngine.update
    seen: list[Any] = []

    def forgets_the_last(self: TorchEngine) -> Any:
        seen.append(self)
        if engines[-1] == "captured" and sum(one is self for one in seen) == capture.STEPS:
            return SimpleNamespace()
        return update(self)

    monkeypatch.setattr(TorchEngine, "update", forgets_the_last)
    with pytest.raises(Broken, match="captured and eager differ in the change of"):
        capture.check(on_a_gpu)


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Its classes have weights, so that each batch is divided by another number.

    Without early pooling, whose dropout on a CPU goes by the number of texts in a row: a captured run has more rooms.
    """
    more = {"task": {"class_weights": {"good": 1.0, "bad": 3.0}}, "techniques": {"early_pooling": False}}
    return made(tmp_path_factory.mktemp("weighted"), **more)


@pytest.fixture
def recorded(weighted: Subject, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The subject of a recipe for a GPU, whose graphs are recorded on the CPU, of steps and updates alike."""
    with_recorded_graphs(monkeypatch)

    class Records(Subject):
        def with_settings(self, settings: Any, world_size: int = 1) -> Recipe:
            found = [*settings]
            eager = super().with_settings([*found, "device=cpu", "techniques.capture=false"], world_size)
            captures = found[-1] == "techniques.capture=true"
            return eager.with_settings(["techniques.capture=true"]) if captures else eager

    monkeypatch.setattr(Subject, "numbers", lambda self, *_, **__: torch.random.fork_rng(devices=[]))
    gpu = with_prepared(weighted, "device=cuda", "techniques.capture=true")
    values = {name: getattr(gpu, name) for name in gpu.__dataclass_fields__}
    return Records(**{**values, "recipe": gpu.recipe.with_settings(["device=cuda"])})


def test_replayed_steps_take_what_is_given_now(recorded: Subject) -> None:
    """This step's samples, denominator, learning rate and dropout, and not those of the capture."""
    assert "differ by 0.0e+00" in capture.check(recorded)


# ---- states on a GPU


def test_a_moment_that_was_lost_is_found_behind_weights_that_are_near(
    on_a_gpu: Subject, engines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU adds in any order, so the first weight differs a little: that excuses no other tensor."""
    state = TorchEngine.state
    calls: list[int] = []

    def second_run_has_lost(self: TorchEngine) -> Any:
        tensors, plain = state(self)
        calls.append(1)
        if len(calls) == 2:
            tensors["model"] = {name: tensor * (1 + 1e-7) for name, tensor in tensors["model"].items()}
            tensors["optimizer"] = {
                name: torch.zeros_like(tensor) if name.endswith("exp_avg") else tensor
                for name, tensor in tensors["optimizer"].items()
            }
        return tensors, plain

    monkeypatch.setattr(TorchEngine, "state", second_run_has_lost)
    with pytest.raises(Broken, match="exp_avg"):
        repeat.check(on_a_gpu)


# ---- waits


def test_the_step_that_must_not_wait_has_been_made_before(
    on_a_gpu: Subject, engines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape that comes for the first time is compiled and captured, and that may wait."""
    known: set[tuple[int, ...]] = set()
    mode = ["default"]
    accumulate = TorchEngine.accumulate

    def waits_for_what_is_new(self: TorchEngine, given: Any) -> Any:
        samples = tuple(int(sample) for piece in given.microbatches for sample in piece)
        if samples not in known and mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        known.add(samples)
        return accumulate(self, given)

    monkeypatch.setattr(TorchEngine, "accumulate", waits_for_what_is_new)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda to: mode.__setitem__(0, to))
    assert "without a wait" in waits.check(on_a_gpu)


def test_a_step_that_waits_is_named_by_its_line(
    on_a_gpu: Subject, engines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = ["default"]
    update = TorchEngine.update

    def reads_back(self: TorchEngine) -> Any:
        if mode[0] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return update(self)

    monkeypatch.setattr(TorchEngine, "update", reads_back)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda to: mode.__setitem__(0, to))
    with pytest.raises(Broken, match=r"test_gpu_claims\.py:\d+: raise RuntimeError"):
        waits.check(on_a_gpu)
    assert mode == ["default"]


# ---- memory


@pytest.mark.parametrize(
    ("predicted", "taken", "holds"),
    [(69, 75, True), (69, 90, False), (10_000, 10_400, True), (10_000, 10_600, False), (10_600, 10_000, False)],
)
def test_a_prediction_may_be_away_by_a_share_or_by_little(
    predicted: int, taken: int, holds: bool, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Predicts:
        def __enter__(self) -> Predicts:
            return self

        def __exit__(self, *_: object) -> None: ...

        def plan(self, *_: object, **__: object) -> Any:
            return SimpleNamespace(allocated=predicted * memory.MIB, moment="backward")

    monkeypatch.setattr(memory, "Predictor", Predicts)
    monkeypatch.setattr(memory, "taken_by_others", lambda gpu: 0)
    monkeypatch.setattr(memory, "measure", lambda *_, **__: SimpleNamespace(problem="", peak=taken * memory.MIB))
    gpu = replace(with_prepared(subject, "device=cuda"), facts=replace(subject.facts, gpus=(SimpleNamespace(),)))
    gpu = replace(gpu, recipe=gpu.recipe.with_settings(["device=cuda"]))
    if holds:
        assert f"{predicted:,} MiB were predicted" in memory.check(gpu)
    else:
        with pytest.raises(Broken, match="were predicted"):
            memory.check(gpu)
