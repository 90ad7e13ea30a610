"""``optimizer.ema`` and ``loop.save`` as they are typed, and what is refused."""

from __future__ import annotations

import pytest

from paceline.contract.errors import RecipeError
from paceline.machine.facts import Facts
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.entries import written
from paceline.recipe.parts import EmaPart
from paceline.recipe.techniques import settings_for_inference

HERE = Facts(python="", platform="", cpu_model=None, cpu_count=1, memory_bytes=None, versions={})


def recipe(*settings: str) -> Recipe:
    return Recipe.parse({"model": {"source": "some-model"}, "data": {"source": "a.csv"}}).with_settings(settings)


def test_a_number_is_the_decay_and_a_part_has_all() -> None:
    assert recipe().optimizer.ema is None
    assert recipe("optimizer.ema=0.999").optimizer.ema == EmaPart(decay=0.999)
    assert recipe("optimizer.ema={decay: 0.99, warmup: true}").optimizer.ema == EmaPart(decay=0.99, warmup=True)
    again = recipe("optimizer.ema=0.99").with_settings(["optimizer.ema.every=4"])
    assert again.optimizer.ema == EmaPart(decay=0.99, every=4)
    assert Recipe.parse(again.resolved()) == again
    assert written(EmaPart(decay=0.999)) == "0.999"
    assert recipe(f"optimizer.ema={again.optimizer.ema}") == again


def test_what_is_saved_follows_from_both() -> None:
    assert recipe().saves == "weights"
    assert recipe("optimizer.ema=0.9").saves == "ema"
    for save in ("weights", "ema", "best"):
        assert recipe("optimizer.ema=0.9", f"loop.save={save}").saves == save


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("optimizer.ema=1.0",), r"optimizer.ema.decay: 1.0 does not lie between 0 and 1; 0.999, for example"),
        (("optimizer.ema=0",), r"optimizer.ema.decay: 0 does not lie between 0 and 1"),
        (("optimizer.ema=-0.5",), r"does not lie between 0 and 1"),
        (("optimizer.ema=.nan",), r"does not lie between 0 and 1"),
        (("optimizer.ema=true",), r"optimizer.ema: true is no decay; 0.999, for example, or null"),
        (("optimizer.ema=auto",), r"optimizer.ema: auto is no decay"),
        (("optimizer.ema.every=2",), r"optimizer.ema.decay: missing"),
        (("optimizer.ema={decay: 0.9, every: 0}",), r"optimizer.ema.every = '0'(.|\n)*greater than or equal to 1"),
        (("optimizer.ema={decay: 0.9, warm_up: true}",), r"optimizer.ema.warm_up(.|\n)*unknown key(.|\n)*warmup"),
        (("loop.save=ema",), r"loop.save = ema(.|\n)*trained weights alone(.|\n)*--set optimizer.ema=0.999"),
        (("loop.save=best",), r"loop.save = best(.|\n)*trained weights alone"),
        (("optimizer.ema=0.9", "model.train=features"), r"optimizer.ema = 0.9(.|\n)*no step is made(.|\n)*ema=null"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_loads(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        choose(recipe(*settings), HERE)


def test_a_trained_model_is_used_with_the_recipe_it_was_trained_with() -> None:
    trained = recipe("optimizer.ema=0.9", "loop.save=ema")
    choose(trained.with_settings(settings_for_inference()), HERE)
