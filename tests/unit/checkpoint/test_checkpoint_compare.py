"""A resumed run may change how it runs, not what it learns, unless the change is named on purpose."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import yaml

from paceline.contract.errors import CheckpointError
from paceline.recipe import Recipe
from paceline.run.checkpoint.compare import Change, differences, refuse_changes


def resolved(*settings: str) -> dict[str, Any]:
    base = {"model": {"source": "m"}, "data": {"source": "d.csv"}}
    return Recipe.parse(base).with_settings(settings).resolved()


def paths(changes: list[Change]) -> list[str]:
    return [change.path for change in changes]


def test_equal_recipes_have_no_differences() -> None:
    assert differences(resolved(), resolved()) == ([], [])
    refuse_changes([], old_data="a", new_data="a")


def test_a_recipe_read_back_from_its_yaml_is_equal() -> None:
    recipe = Recipe.parse(
        {"model": {"source": "m"}, "data": {"source": "d"}, "optimizer": {"groups": [{"match": "*"}]}}
    )
    assert differences(recipe.resolved(), yaml.safe_load(recipe.to_yaml())) == ([], [])
    assert differences(recipe.resolved(), recipe.model_dump()) == ([], []), "a tuple is no other value than a list"


def test_result_and_execution_are_told_apart() -> None:
    new = resolved("optimizer.lr=3e-5", "loop.micro_batch_size=4", "seed=1", "device=cpu", "loop.keep_last=3")
    result_defining, execution = differences(resolved(), new)
    assert paths(result_defining) == ["optimizer.lr", "seed"]
    assert paths(execution) == ["loop.micro_batch_size", "loop.keep_last", "device"]
    assert str(result_defining[0]) == "optimizer.lr: 5e-05 -> 3e-05"
    assert str(execution[0]) == "loop.micro_batch_size: null -> 4"


def test_refusal_lists_every_change_and_the_fix() -> None:
    new = resolved("optimizer.lr=3e-5", "seed=1", "loop.batch_size=8")
    result_defining, _ = differences(resolved(), new)
    with pytest.raises(CheckpointError) as raised:
        refuse_changes(result_defining, {"seed"})
    lines = raised.value.what.splitlines()
    assert lines[1:] == ["  optimizer.lr: 5e-05 -> 3e-05", "  loop.batch_size: 32 -> 8"]
    assert "--set optimizer.lr=VALUE" in raised.value.fix
    assert raised.value.exit_code == 2
    refuse_changes(result_defining, {"seed", "optimizer.lr", "loop.batch_size"})


def test_a_path_allows_what_is_below_it_but_not_its_neighbours() -> None:
    result_defining, _ = differences(resolved(), resolved("data.splits.seed=1", "data.max_length=64"))
    refuse_changes(result_defining, {"data"})
    with pytest.raises(CheckpointError, match="max_length"):
        refuse_changes(result_defining, {"data.splits"})
    with pytest.raises(CheckpointError, match="max_length"):
        refuse_changes(result_defining, {"data.splits.seed", "data.max"})


def test_a_part_that_appears_is_one_change_allowed_by_any_of_its_fields() -> None:
    result_defining, _ = differences(resolved(), resolved("loop.early_stopping.patience=5"))
    assert paths(result_defining) == ["loop.early_stopping"]
    refuse_changes(result_defining, {"loop.early_stopping.patience"})
    with pytest.raises(CheckpointError, match="early_stopping"):
        refuse_changes(result_defining, {"loop.epochs"})


def test_a_part_that_an_older_recipe_lacks_is_compared_field_by_field() -> None:
    old = resolved()
    del old["observe"]
    result_defining, execution = differences(old, resolved())
    assert result_defining == []
    assert "observe.console" in paths(execution)
    assert execution[0].old == "(not set)"


def test_a_models_own_configuration_is_one_value() -> None:
    old, new = resolved("model.config={a: {b: 1}}"), resolved("model.config={a: {b: 2}}")
    result_defining, _ = differences(old, new)
    assert [str(change) for change in result_defining] == ['model.config: {"a": {"b": 1}} -> {"a": {"b": 2}}']


def test_long_and_odd_values_stay_on_one_inert_line() -> None:
    many = [f"column{i}" for i in range(500)]
    result_defining, _ = differences({"data": {"label": [*many, "x"]}}, {"data": {"label": [*many, "y"]}})
    assert paths(result_defining) == ["data.label"], "values that differ only in their cut part still differ"
    assert len(str(result_defining[0])) < 600
    result_defining, _ = differences({"name": "a"}, {"name": "\x1b[31m\n\u202e"})
    assert str(result_defining[0]).isascii()
    assert "\x1b" not in str(result_defining[0])


def test_other_data_is_refused_unless_a_setting_that_shapes_data_is_named() -> None:
    with pytest.raises(CheckpointError) as raised:
        refuse_changes([], old_data="a" * 64, new_data="b" * 64)
    assert "data (its content): aaaaaaaaaaaaaaaa -> bbbbbbbbbbbbbbbb" in raised.value.what
    assert "data.source" in raised.value.fix
    with pytest.raises(CheckpointError):
        refuse_changes([], {"optimizer.lr"}, old_data="a", new_data="b")
    for path in ("data.source", "data.max_length", "model.tokenizer"):
        refuse_changes([], {path}, old_data="a", new_data="b")
    refuse_changes([], old_data="", new_data="b")


def test_comparing_needs_no_torch() -> None:
    code = "from paceline.run.checkpoint import compare, manifest; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
