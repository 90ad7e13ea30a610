"""What a notebook uses: the functions at the top of the package, rows in memory, and errors by their class."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.contract import errors
from tests.e2e.commands import read_csv, reviews, write_csv
from tests.testing.tiny import tiny_bert_config

SETTINGS = {
    "model": {"config": tiny_bert_config(initializer_range=0.3), "vocabulary_size": 300},
    "loop": {"epochs": 2, "batch_size": 8},
    "optimizer": {"lr": 1e-3},
    "observe": {"console": "off", "report": False},
}


def recipe(**changes: Any) -> paceline.Recipe:
    return paceline.Recipe.parse({**SETTINGS, **changes})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_package_names_what_it_offers() -> None:
    assert set(paceline.__all__) <= set(dir(paceline))
    assert {"train", "evaluate", "predict", "doctor", "adopt", "Recipe", "RunRecord"} <= set(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name).__doc__, f"paceline.{name} says nothing about itself"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        paceline.trian  # noqa: B018
    from paceline import adopt, doctor, evaluate, predict, train

    assert all(map(callable, (adopt, doctor, evaluate, predict, train)))


def test_train_returns_the_record_that_summary_json_holds(tmp_path: Path) -> None:
    write_csv(tmp_path / "data.csv", reviews())
    record = paceline.train(recipe(data={"source": "data.csv"}), out="run")
    assert isinstance(record, paceline.RunRecord)
    assert (record.status, record.steps, record.epochs) == ("finished", 8, 2)
    assert record.folder == str(tmp_path / "run")
    assert record.final.keys() == {"validation", "test"}
    assert record.final["test"].keys() == {"loss", "accuracy", "f1"}
    stored = json.loads((tmp_path / "run/summary.json").read_text())
    assert stored["final"] == record.final
    assert stored["steps"] == record.steps
    assert sum(s for name, s in record.seconds.items() if name != "total") == pytest.approx(record.seconds["total"])


def test_train_without_a_folder_makes_one_below_runs(tmp_path: Path) -> None:
    record = paceline.train(recipe(name="mine"), reviews())
    assert Path(record.folder).parent == tmp_path / "runs"
    assert Path(record.folder).name.startswith("mine-")


def frame() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(reviews())


def generator() -> Iterator[dict[str, str]]:
    yield from reviews()


class Dataset:
    """What datasets.Dataset offers, where the library itself is not installed."""

    def __init__(self, rows: list[dict[str, Any]], names: list[str]) -> None:
        self._rows = rows
        self.column_names = list(rows[0])
        self.features = {"text": SimpleNamespace(), "label": SimpleNamespace(names=names, int2str=names.__getitem__)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(row) for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self._rows]


def dataset(rows: list[dict[str, str]] | None = None) -> Any:
    names = ["negative", "positive"]
    numbered = [{"text": row["text"], "label": names.index(row["label"])} for row in rows or reviews()]
    try:
        import datasets
    except ImportError:
        return Dataset(numbered, names)
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=names))
    return datasets.Dataset.from_list(numbered, features=features)


@pytest.mark.parametrize("make", [reviews, frame, generator, dataset])
def test_rows_in_memory_train_as_those_of_a_file(tmp_path: Path, make: Callable[[], Any]) -> None:
    write_csv(tmp_path / "data.csv", reviews())
    of_file = paceline.train(recipe(data={"source": "data.csv"}), out="of-file")
    in_memory = paceline.train(recipe(), make(), out="in-memory")
    assert in_memory.final == of_file.final
    names = json.loads((tmp_path / "in-memory/model/config.json").read_text())["label2id"]
    assert names == {"negative": 0, "positive": 1}


def test_a_dataset_of_splits_keeps_them(tmp_path: Path) -> None:
    rows = reviews(60)
    splits = {"train": dataset(rows[:40]), "validation": dataset(rows[40:48]), "test": dataset(rows[48:])}
    record = paceline.train(recipe(), splits, out="run")
    assert record.steps == 10
    assert record.final.keys() == {"validation", "test"}


def test_values_that_pandas_lacks_are_named(tmp_path: Path) -> None:
    rows = frame()
    rows.loc[7, "text"] = None
    with pytest.raises(errors.DataError, match="DataFrame:8, column 'text': the text is missing") as caught:
        paceline.train(recipe(), rows)
    assert (caught.value.file, caught.value.line, caught.value.column) == ("DataFrame", 8, "text")
    assert "keep_default_na" in caught.value.fix
    assert os.listdir(tmp_path) == []


def test_errors_are_of_the_documented_classes(tmp_path: Path) -> None:
    write_csv(tmp_path / "data.csv", reviews())
    good = recipe(data={"source": "data.csv"})
    with pytest.raises(errors.RecipeError, match="did you mean 'lr'"):
        paceline.Recipe.parse({**SETTINGS, "optimizer": {"lrr": 1}})
    with pytest.raises(errors.RecipeError, match="no rows were given"):
        paceline.train(recipe())
    with pytest.raises(errors.DataError, match="no such file"):
        paceline.train(recipe(data={"source": "nowhere.csv"}))
    with pytest.raises(errors.ModelError, match="no such folder"):
        paceline.train(recipe(data={"source": "data.csv"}, model={"source": "./nowhere"}))
    with pytest.raises(errors.RunFolderError, match="not a run folder"):
        paceline.evaluate("nowhere")
    with pytest.raises(errors.RunFolderError, match="neither a run folder nor a model"):
        paceline.predict("nowhere", "data.csv", "out.csv")
    paceline.train(good, out="run")
    with pytest.raises(errors.RunFolderError, match="already holds a run"):
        paceline.train(good, out="run")
    with pytest.raises(errors.DataError, match="data of type int"):
        paceline.train(recipe(), 7)
    for kind in (errors.RecipeError, errors.DataError, errors.ModelError, errors.RunFolderError):
        assert issubclass(kind, errors.UserError)
        assert issubclass(kind, errors.PacelineError)


def test_a_loss_that_is_no_number_is_named_by_its_rows(tmp_path: Path) -> None:
    rows = [{"text": row["text"], "target": at / 7} for at, row in enumerate(reviews())]
    rows[11]["target"] = 3e38  # finite, but its square is not
    with pytest.raises(errors.NonFiniteError, match="rows:12") as caught:
        paceline.train(recipe(data={"split": None, "splits": {"validation": 0, "test": 0}}), rows, out="run")
    assert caught.value.sample_ids == (11,)
    assert caught.value.step >= 1


def test_evaluate_and_predict_take_rows(tmp_path: Path) -> None:
    record = paceline.train(recipe(), reviews(60), out="run")
    found = paceline.evaluate(record.folder, rows=reviews(20))
    assert found.samples == 20
    assert math.isfinite(found.loss)
    assert paceline.predict(record.folder, None, "out.csv", rows=frame()) == 40
    assert {row["prediction"] for row in read_csv(tmp_path / "out.csv")} <= {"negative", "positive"}


def test_a_frame_keeps_its_index_where_rows_are_dropped(tmp_path: Path) -> None:
    """A column of the result goes back to the rows that it is of."""
    paceline.train(recipe(data={"on_bad_row": "skip", "bad_rows_allowed": 0.5}), reviews(60), out="run")
    rows = frame().assign(number=range(40)).astype({"number": "int8"})
    rows.index = range(100, 140)
    rows.loc[103, "text"] = ""
    labelled = paceline.predict("run", rows)
    assert list(labelled.index) == [label for label in rows.index if label != 103]
    assert list(labelled["number"]) == [number for number in range(40) if number != 3]
    assert labelled["number"].dtype == "int8"
    whole = paceline.predict("run", rows.drop(103))
    assert (whole["prediction"] == labelled["prediction"]).all()
    rows["prediction"] = labelled["prediction"]
    assert rows["prediction"].isna().to_list() == [label == 103 for label in rows.index]

    texts = paceline.predict("run", rows["text"])
    assert list(texts.columns[:2]) == ["text", "prediction"]
    assert (texts["prediction"] == labelled["prediction"]).all()


def test_evaluate_takes_rows_as_data(tmp_path: Path) -> None:
    paceline.train(recipe(), reviews(60), out="run")
    rows = frame()
    expected = paceline.evaluate("run", rows=rows)
    for data in (rows, (list(rows["text"]), list(rows["label"]))):
        record = paceline.evaluate("run", data=data)
        assert (record.samples, record.loss, record.metrics) == (40, expected.loss, expected.metrics)
    write_csv(tmp_path / "new.csv", reviews(40))
    assert paceline.evaluate("run", data=tmp_path / "new.csv").loss == expected.loss
    with pytest.raises(errors.UserError, match="data or rows"):
        paceline.evaluate("run", data=rows, rows=rows)


@pytest.mark.parametrize("text", ["a kind shop", "kind", "很好吃，推荐。", "this/that " * 60])
def test_a_text_in_a_files_place_is_told_how_to_be_labelled(text: str) -> None:
    with pytest.raises(errors.UserError, match="no such file or folder") as caught:
        paceline.predict("run", text)
    assert 'predict(run, ["TEXT"])' in caught.value.fix


def test_nothing_of_the_caller_is_changed(tmp_path: Path) -> None:
    """Random state, rows and recipe are the caller's; the leak police of the tests looks after the rest."""
    import numpy as np
    import torch

    rows = reviews()
    before = [dict(row) for row in rows]
    own = recipe()
    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.rand(4), np.random.rand(4)
    torch.manual_seed(3)
    np.random.seed(3)
    paceline.train(own, rows, out="run")
    paceline.evaluate("run", rows=rows)
    assert torch.rand(4).equal(expected[0])
    assert (np.random.rand(4) == expected[1]).all()
    assert rows == before
    assert own == recipe()


def test_doctor_returns_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    facts = paceline.doctor()
    shown = capsys.readouterr().out
    assert facts.python in shown
    assert "torch" in shown


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    import torch
    from torch import nn

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_sum(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    engine = paceline.adopt(model, optimizer, loss_sum)
    before = model.weight.detach().clone()
    batch = torch.randn(6, 4), torch.randint(2, (6,))
    engine.accumulate([batch], 6)
    engine.update()
    assert not model.weight.equal(before)


@pytest.mark.slow
def test_importing_costs_nothing() -> None:
    code = "import sys, paceline; dir(paceline); print([n for n in ('torch', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_fix_of_an_error_is_an_argument_that_works(tmp_path: Path) -> None:
    rows = [{"text": row["text"], "klass": row["label"]} for row in reviews()]
    with pytest.raises(errors.DataError, match="no label column found") as caught:
        paceline.train(recipe(), rows, out="run")
    assert caught.value.fix == 'settings=["data.label=klass"]'
    settings = ["data.label=klass"]
    record = paceline.train(recipe(), rows, settings=settings, out="run")
    assert record.status == "finished"
    assert paceline.train(SETTINGS, rows, settings=[*settings, "loop.max_steps=1"], out="one").steps == 1
    with pytest.raises(errors.DataError) as caught:
        paceline.evaluate("run", data=[{"text": "good"}])
    assert "--" not in caught.value.fix
    with pytest.raises(errors.UserError, match=r"optimizer\.lrr") as unknown:
        paceline.train(recipe(), rows, settings=["optimizer.lrr=3"], out="two")
    assert unknown.value.fix == 'settings=["optimizer.lr=3"]'
