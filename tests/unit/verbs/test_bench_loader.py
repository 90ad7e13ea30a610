"""``paceline bench loader``: what is brought to the device, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.arrivals import Arrival, _collate, _counts, _Samples, arrivals
from paceline.contract.errors import UserError
from paceline.machine.facts import this_machine
from paceline.prepare.preparation import encoded
from paceline.recipe import Recipe
from paceline.testing.tiny import tiny_distilbert_config, tiny_resnet_config
from paceline.verbs.bench.loader import parse_counts, shown
from tests.e2e.commands import in_process, reviews, write_csv


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    data = write_csv(tmp_path / "reviews.csv", reviews(60))
    model = {"config": tiny_distilbert_config(), "vocabulary_size": 200}
    loop = {"batch_size": 8}
    return Recipe.parse(
        {"model": model, "data": {"source": str(data), "max_length": 32}, "loop": loop, "device": "cpu"}
    )


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of fork beside threads, which loaders do
def test_every_way_of_texts_is_measured(recipe: Recipe) -> None:
    found = arrivals(recipe, this_machine(), seconds=0.15, workers=(0, 1))
    assert [(each.way, each.workers) for each in found] == [
        ("paceline, packed, from the host", 0),
        ("DataLoader, padded", 0),
        ("DataLoader, padded", 1),
    ]
    for each in found:
        assert each.batches >= 3
        assert 0 < each.lowest <= each.samples_per_second <= each.highest


def test_images_are_measured_too() -> None:
    recipe = Recipe.parse(
        {"model": {"config": tiny_resnet_config()}, "data": {"source": "builtin:digits"}, "device": "cpu"}
    )
    found = arrivals(recipe, this_machine(), seconds=0.1, workers=(0,))
    assert [each.way for each in found] == ["paceline, images, from the host", "DataLoader, images"]


def test_a_loaders_batch_holds_the_samples_padded(recipe: Recipe) -> None:
    dataset, _ = encoded(recipe)
    samples = _Samples(dataset)
    batch = _collate([samples[0], samples[5]])
    lengths = dataset.inputs.lengths[[0, 5]].tolist()
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["input_ids"].shape == (2, max(lengths))
    assert batch["labels"].tolist() == [int(dataset.labels[0]), int(dataset.labels[5])]


def test_workers_double_up_to_the_processors() -> None:
    assert _counts(1) == [0, 1]
    assert _counts(5) == [0, 1, 2, 4]
    assert _counts(64) == [0, 1, 2, 4, 8]


def test_numbers_of_workers_are_read() -> None:
    assert parse_counts(None) is None
    assert parse_counts("0, 2") == (0, 2)
    for wrong in ("two", "-1", "1,,2", "1000"):
        with pytest.raises(UserError, match="--workers 0,2,4"):
            parse_counts(wrong)


def test_the_fastest_stands_first(recipe: Recipe) -> None:
    def arrival(way: str, rate: float) -> Arrival:
        figures = {"samples_per_second": rate, "lowest": rate, "highest": rate}
        return Arrival(way=way, workers=2, pinned=True, batches=3, **figures)

    lines = shown(recipe, [arrival("DataLoader, padded", 10), arrival("paceline, packed", 2000)]).splitlines()
    assert [line.split("  ")[0] for line in lines[3:5]] == ["paceline, packed", "DataLoader, padded"]
    assert lines[4].split()[2:] == ["2", "yes", "10", "10..10"]


def test_the_command_prints_json(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(recipe.to_yaml())
    run = in_process(monkeypatch, capsys)
    done = run("bench", "loader", file, "--workers", "0", "--seconds", "0.1", "--json")
    assert done.code == 0, done.err
    assert [each["workers"] for each in json.loads(done.out)["ways"]] == [0, 0]
    done = run("bench", "loader", file, "--workers", "many")
    assert (done.code, done.first) == (2, "paceline: --workers 'many'")
