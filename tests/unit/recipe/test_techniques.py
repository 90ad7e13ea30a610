"""What follows from the catalogue besides decisions and refusals: words, fields, and what a trained model keeps."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.contract.errors import RecipeError
from paceline.machine.facts import Facts
from paceline.recipe import Recipe, techniques
from paceline.recipe.catalogue.strategies import STRATEGIES
from paceline.recipe.entries import Rule, TechniqueEntry
from paceline.recipe.parts import ParallelPart
from paceline.recipe.rules import check_rules, is_refused
from paceline.recipe.techniques import (
    CATALOGUE,
    entry_of,
    exclusions,
    one_process,
    opened,
    settings_for_inference,
    shards,
    told,
)
from paceline.verbs.techniques import field_at


def recipe(*settings: str) -> Recipe:
    return Recipe.parse({"model": {"source": "some-model"}}).with_settings(settings)


def test_fields_have_the_catalogues_words_and_defaults() -> None:
    for entry in CATALOGUE:
        if entry.choice:
            continue  # one value of a field that has others
        field = field_at(entry.setting)
        assert field.default == entry.default, entry.name
        assert field.description
        assert field.description.startswith(entry.summary)
        assert ("auto: " in field.description) == (field.default == "auto"), entry.name
    strategy = ParallelPart.model_fields["strategy"].description or ""
    assert all(f"{entry.name}: " in strategy for entry in STRATEGIES)
    assert "ddp where weights, gradients and states fit a GPU" in strategy


def test_a_rule_may_name_the_values_that_do_not_fulfil_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = TechniqueEntry("limited", "Any.", "up to rounding", place="loop.max_steps", off=None)
    rule = Rule("loop.max_steps!=null", "it never ends")
    other = TechniqueEntry("other", "Any.", "bit-exact", place="loop.drop_last", excludes=(rule,))
    assert (rule.path, rule.values) == ("loop.max_steps", ("null",))
    assert rule.holds(3)
    assert not rule.holds(None)
    assert rule.is_about(limited)
    assert Rule(limited.use).is_about(limited)
    assert not rule.is_about(other)
    monkeypatch.setattr(techniques, "ENTRIES", (limited, other))
    assert [one.condition for one in exclusions(limited)] == ["loop.drop_last!=false"]
    exclusions.cache_clear()
    facts = Facts(python="", platform="", cpu_model=None, cpu_count=1, memory_bytes=None, versions={})
    check_rules(recipe("loop.drop_last=true"), facts, (limited, other))
    with pytest.raises(RecipeError, match=r"cannot work with loop.max_steps other than null \(now .* = 3\): it never"):
        check_rules(recipe("loop.drop_last=true", "loop.max_steps=3"), facts, (limited, other))


def test_what_cannot_be_together_is_told_on_either_side() -> None:
    assert "techniques.capture=true" in {rule.condition for rule in exclusions(entry_of("recompute"))}
    assert "parallel.strategy=fsdp" in {rule.condition for rule in exclusions(entry_of("channels_last"))}
    assert "techniques.embedding_gradient=true" in {rule.condition for rule in exclusions(entry_of("dp"))}
    fsdp = {rule.condition for rule in exclusions(entry_of("fsdp"))}
    assert "techniques.embedding_gradient=true" not in fsdp, "auto leaves it off there, but it may be asked for"


def test_an_entry_is_told_line_by_line_with_reasons() -> None:
    lines = list(told(entry_of("embedding_gradient")))
    assert ("auto", "off with parallel.strategy=fsdp: not measured beside shards") in lines
    assert ("needs", "device=cuda: its kernels are for GPUs") in lines
    assert ("needs", "triton, on a GPU") in lines
    assert ("inference", "off") in lines
    assert ("needs", "bf16: a GPU of compute capability 8.0 or above, or a CPU") in list(told(entry_of("precision")))
    dp = [text for label, text in told(entry_of("dp")) if label == "excludes"]
    assert sum("DataParallel copies the model" in text for text in dp) == 1, "one line for all rules of one reason"


@pytest.mark.parametrize(
    ("settings", "setting", "value", "refused"),
    [
        ({}, "techniques.capture", True, False),
        ({"techniques.recompute": True}, "techniques.capture", True, True),
        ({"techniques.recompute": False}, "techniques.capture", True, False),
        ({"techniques.precision": "fp32"}, "techniques.fusion", True, True),
        ({"techniques.precision": "fp32"}, "techniques.fusion", False, False),
        ({"parallel.strategy": "dp"}, "techniques.packing", True, True),
        ({"parallel.strategy": "dp"}, "techniques.embedding_gradient", True, True),
        ({"parallel.strategy": "fsdp"}, "techniques.embedding_gradient", True, False),
        ({"parallel.strategy": "dp"}, "loop.micro_batch_size", 8, False),
    ],
)
def test_what_is_known_of_a_run_tells_whether_a_technique_is_refused(
    settings: dict[str, Any], setting: str, value: object, refused: bool
) -> None:
    assert is_refused(settings, setting, value) == refused


def test_a_trained_model_keeps_what_is_not_of_steps_alone() -> None:
    trained = recipe(
        *("techniques.recompute=true", "techniques.channels_last=true", "techniques.precision=bf16"),
        *("techniques.early_pooling=true", "techniques.capture=true", "parallel.strategy=ddp"),
    )
    used = trained.with_settings(settings_for_inference())
    assert (used.techniques.recompute, used.techniques.capture, used.parallel.strategy) == (False, False, "auto")
    assert (used.techniques.channels_last, used.techniques.precision) == (True, "bf16")
    assert used.techniques.early_pooling == "auto"


def test_what_auto_may_have_switched_on_is_opened_again() -> None:
    given = recipe("techniques.fusion=true", "techniques.recompute=true", "techniques.compile=false")
    assert opened(given) == ("techniques.fusion=auto",)


def test_what_a_strategy_is_follows_from_its_entry() -> None:
    names = ("auto", "ddp", "fsdp", "dp")
    assert [name for name in names if one_process(name)] == ["dp"]
    assert [name for name in names if shards(name)] == ["fsdp"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("parallel.strategy=dp", "parallel.bucket_mib=60"),
            "bucket_mib: has no .*: dp; it is of ddp\n.*strategy=ddp",
        ),
        (
            ("parallel.strategy=ddp", "parallel.offload=true"),
            "offload: has no effect .*\n.*strategy=fsdp",
        ),
        (("parallel.strategy=dp", "parallel.reduce_dtype=bf16"), "dp; it is of ddp and fsdp\n.*strategy=ddp"),
    ],
)
def test_a_setting_of_other_strategies_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(*settings)


def test_a_rule_holds_for_each_of_its_values() -> None:
    rule = Rule("loop.max_steps=null|3", "a reason", only="auto")
    assert (rule.path, rule.values) == ("loop.max_steps", ("null", "3"))
    assert [rule.holds(value) for value in (None, 3, 4)] == [True, True, False]
    assert rule.is_for("auto")
    assert not rule.is_for("asked")
