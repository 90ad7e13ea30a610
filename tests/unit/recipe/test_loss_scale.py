"""``optimizer.loss_scale`` as it is typed, and what is refused."""

from __future__ import annotations

import pytest

from paceline.contract.errors import RecipeError
from paceline.machine.facts import Facts, Gpu
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.parts import LossScalePart

GPU = Gpu(name="NVIDIA H200", compute_capability=(9, 0))
HERE = Facts(
    python="",
    platform="",
    cpu_model=None,
    cpu_count=1,
    memory_bytes=None,
    gpus=(GPU,),
    versions={"torch": "2.13"},
    torch_cuda="13.0",
)


def recipe(*settings: str) -> Recipe:
    return Recipe.parse({"model": {"source": "some-model"}, "data": {"source": "a.csv"}}).with_settings(settings)


def test_fp16_takes_the_scale_that_is_set() -> None:
    asked = recipe("techniques.precision=fp16", "optimizer.loss_scale={init_scale: 1024, growth_interval: 500}")
    chosen, _ = choose(asked, HERE)
    assert chosen.optimizer.loss_scale == LossScalePart(init_scale=1024.0, growth_interval=500)
    assert Recipe.parse(chosen.resolved()) == chosen


def test_a_default_written_out_is_no_wish() -> None:
    chosen, _ = choose(Recipe.parse(recipe().resolved()), HERE)
    assert chosen.techniques.precision == "bf16"


@pytest.mark.parametrize("settings", [(), ("techniques.precision=fp32",), ("device=cpu",)])
def test_without_fp16_there_is_no_scale_to_set(settings: tuple[str, ...]) -> None:
    asked = recipe("optimizer.loss_scale.growth_interval=500", *settings)
    with pytest.raises(RecipeError, match=r"growth_interval = 500(.|\n)*only fp16 has a loss scale") as error:
        choose(asked, HERE)
    fixes = [fix.split("--set ")[1] for fix in error.value.fix.split(", or ")]
    assert fixes == ["techniques.precision=fp16", "optimizer.loss_scale.growth_interval=2000"]
    choose(asked.with_settings(fixes[1:]), HERE)
