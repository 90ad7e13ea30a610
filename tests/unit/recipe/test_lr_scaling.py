"""``optimizer.lr_scaling``: what can be written, what is refused, and that a resumed run cannot change it."""

from __future__ import annotations

import pytest
import yaml

from paceline.contract.errors import RecipeError
from paceline.recipe import Recipe
from paceline.run.checkpoint.compare import differences

BASE = Recipe.parse({"model": {"source": "some-model"}, "data": {"source": "rows.csv"}})


@pytest.mark.parametrize(
    ("settings", "scaling", "base"),
    [
        ([], "none", None),
        (["optimizer.lr_scaling=none"], "none", None),
        (["optimizer.lr_scaling=linear", "optimizer.lr_scaling_base=32"], "linear", 32),
        (["optimizer.lr_scaling=sqrt", "optimizer.lr_scaling_base=256"], "sqrt", 256),
        (["optimizer.lr_scaling=2"], 2.0, None),
        (["optimizer.lr_scaling=2.5e-1"], 0.25, None),
    ],
)
def test_what_is_written_is_read_and_runs_again_as_it_is(settings: list[str], scaling: object, base: object) -> None:
    recipe = BASE.with_settings(settings)
    assert (recipe.optimizer.lr_scaling, recipe.optimizer.lr_scaling_base) == (scaling, base)
    again = Recipe.parse(yaml.safe_load(recipe.to_yaml()))
    assert again.resolved() == recipe.resolved()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.lr_scaling=linear"], r"linear needs lr_scaling_base, .*lr_scaling_base=32, for example"),
        (["optimizer.lr_scaling=sqrt"], r"sqrt needs lr_scaling_base"),
        (["optimizer.lr_scaling_base=32"], r"lr_scaling_base: has no effect with lr_scaling: none"),
        (["optimizer.lr_scaling=2", "optimizer.lr_scaling_base=32"], r"lr_scaling_base: has no effect .* 2\.0"),
        (["optimizer.lr_scaling=1"], r"lr_scaling = 1: has no effect; leave it out"),
        (["optimizer.lr_scaling=linear", "optimizer.lr_scaling_base=0"], r"lr_scaling_base = '0'\n"),
        *[
            ([f"optimizer.lr_scaling={text}"], rf"lr_scaling = '{shown}'\n.*'none', 'linear' or 'sqrt', or ")
            for text, shown in (
                *(("quadratic", "quadratic"), ("0", "0"), ("-2", "-2"), ("true", "True"), ("null", "None")),
                *((".inf", "inf"), (".nan", "nan"), ("[2]", r"\[2\]"), ("'4'", "4")),
            )
        ],
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        BASE.with_settings(settings)


def test_it_defines_the_result_so_a_resumed_run_keeps_it() -> None:
    scaled = BASE.with_settings(["optimizer.lr_scaling=linear", "optimizer.lr_scaling_base=32"])
    defining, execution = differences(BASE.resolved(), scaled.resolved())
    assert [change.path for change in defining] == ["optimizer.lr_scaling", "optimizer.lr_scaling_base"]
    assert not execution
    of_an_earlier_version = BASE.resolved()
    for name in ("lr_scaling", "lr_scaling_base"):
        del of_an_earlier_version["optimizer"][name]
    assert differences(Recipe.parse(of_an_earlier_version).resolved(), BASE.resolved()) == ([], [])
