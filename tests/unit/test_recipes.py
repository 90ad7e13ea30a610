"""Every recipe of recipes/ loads, and trains two steps once its model and its data are made small."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from paceline.recipe import Recipe
from paceline.recipe.techniques import entry_of
from paceline.verbs.train import train
from tests.testing.tiny import TEXTS, write_tiny_model
from tests.unit.data.test_cifar import write_cifar

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
NAMES = [path.stem for path in RECIPES]

LENGTH = 16

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
}
"""Sizes put in place of those that a recipe's configuration gives."""


CIFAR = "cifar-10-batches-bin"
"""The folder of a data set that is not here; one of the same format takes its place."""


def small_settings(recipe: Recipe, pretrained: Path, cifar: Path) -> list[str]:
    """``--set`` changes with which a recipe trains two steps in a moment; what they leave is the recipe's own."""
    changes = ["device=cpu", "observe.console='off'", "observe.report=false", f"data.max_length={LENGTH}"]
    changes += ["loop.max_steps=2", "loop.batch_size=4", "loop.micro_batch_size=3", "loop.evaluation_batch_size=8"]
    if recipe.model.source:
        changes.append(f"model.source={pretrained}")
    given: dict[str, Any] = recipe.model.config or {}
    changes += [f"model.config.{key}={value}" for key, value in SMALL.items() if key in given]
    if recipe.model.config and "vocab_size" not in given:
        changes.append("model.vocabulary_size=200")
    if "hidden_sizes" in given:
        changes += ["model.config.hidden_sizes=[8, 8, 8, 8]", "model.config.embedding_size=8"]
    if recipe.data.source == CIFAR:
        changes += [f"data.source={cifar}", "data.splits.validation=4", "loop.micro_batch_size=2"]
    elif reads_rows(recipe):
        changes += ["data.source=memory", "data.validation=null", "data.test=null"]
    elif recipe.data.source == "builtin:random":
        changes += ["data.random.samples=16", f"data.random.length={LENGTH}", "data.random.vocabulary=200"]
    return changes


def reads_rows(recipe: Recipe) -> bool:
    """Whether its texts are too many, or not on this machine, so that a few rows stand in for them."""
    return recipe.data.source not in ("builtin:digits", "builtin:random", CIFAR)


def rows() -> list[dict[str, str]]:
    return [{"text": f"{TEXTS[at % 4]} number {at}", "label": ("fine", "dull")[at % 2]} for at in range(40)]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / CIFAR
    write_cifar(folder)
    return folder


def test_there_are_recipes() -> None:
    imdb = {"imdb_distilbert", "imdb_bert_large", "imdb_minilm"}
    assert imdb | {"cifar10_resnet18", "digits", "random_tokens", "memory_anatomy", "features", "head_only"} <= set(
        NAMES
    )


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_loads_and_is_named_like_its_file(path: Path) -> None:
    recipe = Recipe.load(path)
    assert recipe.name == path.stem, "the run folder would be named after something else"
    assert Recipe.parse(recipe.resolved()) == recipe


def with_its_package(path: Path) -> Any:
    """The recipe's path as a parameter: trained where the package is that its strategy needs."""
    strategy = Recipe.load(path).parallel.strategy
    needed = () if strategy == "auto" else entry_of(strategy).packages
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    marks = [getattr(pytest.mark, name) for name in needed]
    return pytest.param(path, marks=[*marks, pytest.mark.skipif(bool(missing), reason=f"needs {missing}")])


@pytest.mark.parametrize("path", [*map(with_its_package, RECIPES)], ids=NAMES)
def test_a_recipe_trains_two_steps(path: Path, pretrained: Path, cifar: Path, tmp_path: Path) -> None:
    recipe = Recipe.load(path)
    small = Recipe.load(path, small_settings(recipe, pretrained, cifar))
    record = train(small, data=rows() if reads_rows(recipe) else None, out=tmp_path / "run")
    assert record.status == "finished"
    assert record.steps == (0 if recipe.model.train == "features" else 2)
    held_out = recipe.data.splits.test or recipe.data.test
    assert ("test" in record.final) == bool(held_out), "it measures what it says it holds out"
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_the_tutorials_settings_are_those_of_the_tutorial() -> None:
    """Adam, 5e-5, batches of 12, three epochs, constant rate, no clipping, smaller batches dropped, last weights."""
    recipe = Recipe.load(RECIPES[NAMES.index("imdb_distilbert")])
    optimizer, loop = recipe.optimizer, recipe.loop
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay, optimizer.clip_norm) == ("adam", 5e-5, 0, None)
    assert (recipe.schedule.type, recipe.schedule.warmup) == ("constant", 0)
    assert (loop.epochs, loop.batch_size, loop.drop_last, loop.save_best) == (3, 12, True, False)
    assert (recipe.model.source, recipe.model.train) == ("distilbert-base-uncased", "all")


def test_cifar_10_keeps_an_average_of_the_weights(cifar: Path, tmp_path: Path) -> None:
    path = next(path for path in RECIPES if path.stem == "cifar10_resnet18")
    recipe = Recipe.load(path)
    assert recipe.optimizer.ema is not None
    record = train(Recipe.load(path, small_settings(recipe, tmp_path, cifar)), out=tmp_path / "run")
    assert record.saved == "ema"
    assert all(scores.keys() == {"weights", "ema"} for scores in record.final_scores.values())
