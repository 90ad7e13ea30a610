"""What docs/distributed.md runs: its examples, on any number of ranks and under torchrun, and the tutorials' recipe."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from paceline.recipe import Recipe
from paceline.seams import World
from tests.testing.distributed import run_distributed
from tests.testing.tiny import TEXTS, write_tiny_model

pytestmark = pytest.mark.usefixtures("forked_interpreters")

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "imdb_bert_ddp.yaml"
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
SAMPLES = 7


def example(name: str) -> ModuleType:
    """A file of docs/examples, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exchanged(world: World) -> dict[str, list[float]]:
    found: dict[str, list[float]] = example("collectives").exchanged(torch.tensor([world.rank + 1.0]))
    return found


def shares(world: World) -> dict[str, Any]:
    module = example("padding_sampler")
    padded, split = (share(world.rank, world.size) for share in (module.padded_share, module.split_share))
    return {
        "padded": padded,
        "split": split,
        "mean_of_means": module.mean_of_means(padded),
        "sum_over_count": module.sum_over_count(split),
    }


def evaluated(world: World) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = example("evaluation_by_sums").compared()
    return found


def flat(parts: Sequence[Sequence[int]]) -> list[int]:
    return sorted(sample for part in parts for sample in part)


@pytest.mark.parametrize("size", [2, 4])
def test_each_collective_leaves_what_the_page_says(size: int) -> None:
    everybody = [rank + 1.0 for rank in range(size)]
    for rank, found in enumerate(run_distributed(exchanged, size)):
        assert found["all_reduce"] == [sum(everybody)]
        assert found["broadcast"] == [1.0]
        assert found["all_gather"] == everybody
        assert found["reduce"] == ([sum(everybody)] if rank == 0 else []), "the first rank's alone"
        assert found["reduce_scatter"] == [sum(everybody) * (rank + 1)], "its own piece of the sum, no other's"


def asked_otherwise(world: World) -> tuple[dict[str, list[float]], list[float], list[float]]:
    module, own = example("groups"), torch.tensor([world.rank + 1.0])
    return module.reduced(own), module.summed_in_pairs(own), module.summed_beside_work(own)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_operators_groups_and_asynchronous_calls_do_what_the_page_says(size: int) -> None:
    everybody = [rank + 1.0 for rank in range(size)]
    of_first = {"SUM": sum(everybody), "PRODUCT": math.prod(everybody), "MIN": 1.0, "MAX": float(size)}
    for rank, (operators, pair, beside) in enumerate(run_distributed(asked_otherwise, size)):
        assert operators == {name: [value] if rank == 0 else [] for name, value in of_first.items()}
        assert pair == [sum(everybody[rank // 2 * 2 :][:2])]
        assert beside == [sum(everybody), (rank + 1.0) ** 2]


def served(world: World) -> tuple[bool, int]:
    # whole numbers: every order of adding gives the same bits
    tensor = torch.randint(99, (1001,), generator=torch.Generator().manual_seed(world.rank)).float()
    expected = world.all_reduce(tensor.clone())
    passed: int = example("parameter_server").server_all_reduce(tensor)
    return torch.equal(tensor, expected), passed


@pytest.mark.parametrize("size", [2, 4])
def test_a_parameter_server_gives_the_sum_through_one_link(size: int) -> None:
    assert run_distributed(served, size) == [(True, 2 * (size - 1))] + [(True, 2)] * (size - 1)


@pytest.mark.parametrize("size", [2, 4])
def test_the_usual_sampler_repeats_a_sample_and_ours_does_not(size: int) -> None:
    found = run_distributed(shares, size)
    assert flat([rank["split"] for rank in found]) == list(range(SAMPLES)), "each sample once"
    assert len(flat([rank["padded"] for rank in found])) == SAMPLES + 1, "one is there twice"
    assert {rank["sum_over_count"] for rank in found} == {3.0}, "the mean of all seven"
    assert all(rank["mean_of_means"] != 3.0 for rank in found), "the example would show nothing"


def test_ours_is_the_more_even_split() -> None:
    tokens = example("padding_sampler").TOKENS
    found = run_distributed(shares, 2)
    fullest = {name: max(int(tokens[rank[name]].sum()) for rank in found) for name in ("padded", "split")}
    assert fullest["split"] < 1.02 * tokens.sum() / 2 < fullest["padded"]


@pytest.mark.parametrize("size", [2, 4])
def test_sums_give_what_one_process_gives_and_means_do_not(size: int) -> None:
    for found in run_distributed(evaluated, size):
        assert found["sums"] == found["one process"]
        for metric, value in found["mean of ranks"].items():
            assert value != found["one process"][metric], f"{metric}: the example would show nothing"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_named_on_the_page(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, "too long to be read in one go"
    assert f"examples/{path.name}" in PAGE, "nobody would find it"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_under_torchrun_what_the_page_shows(path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it prints nothing"
    for line in done.stdout.splitlines():
        assert line in PAGE.splitlines(), f"docs/distributed.md shows another line than: {line}"


def test_the_recipes_settings_are_those_of_the_tutorials() -> None:
    """BERT, AdamW at 2e-5 and nothing else of a schedule, 8 reviews a GPU, three epochs, the last weights saved."""
    recipe = Recipe.load(RECIPE)
    optimizer, loop = recipe.optimizer, recipe.loop
    assert (recipe.model.source, recipe.data.max_length, recipe.parallel.strategy) == ("bert-base-uncased", 512, "ddp")
    assert (optimizer.type, optimizer.lr, optimizer.decay, optimizer.clip_norm) == ("adamw", 2e-5, 0.01, None)
    assert (recipe.schedule.type, recipe.schedule.warmup) == ("constant", 0)
    assert (loop.epochs, loop.batch_size, loop.save_best) == (3, 4 * 8, False)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_recipe_trains_on_two_ranks_and_saves_model_and_tokenizer_once(tmp_path: Path) -> None:
    model, data, run = write_tiny_model(tmp_path / "tiny"), tmp_path / "reviews.jsonl", tmp_path / "run"
    rows = [{"text": f"{TEXTS[at % 4]} number {at}", "label": ("fine", "dull")[at % 2]} for at in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = ["loop.max_steps=2", "loop.batch_size=5", "data.max_length=16", "observe.report=false"]
    command = [sys.executable, "-m", "paceline", "train", str(RECIPE), "--processes", "2"]
    command += ["--model", str(model), "--data", str(data), "--out", str(run)]
    command += [part for setting in settings for part in ("--set", setting)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("imdb_bert_ddp: finished") == 1, "rank 0 alone speaks"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in (run / "model").iterdir()}
    with safe_open(run / "model" / "model.safetensors", "pt") as weights:
        assert not [name for name in weights.keys() if name.startswith("module.")]  # noqa: SIM118 - no mapping
