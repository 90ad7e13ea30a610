"""A run's curves as files: the table has every step and evaluation, the figures stand alone."""

from __future__ import annotations

import csv
import importlib.util
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.collect import Collected, collect
from paceline.observe.metrics_file import MetricsFile
from paceline.report.figures import write_figures, write_table
from paceline.verbs import cli


@pytest.fixture
def folder(records: Any, tmp_path: Path) -> Path:
    """The folder of a run of twenty steps, evaluated twice."""
    path = tmp_path / "run"
    file = MetricsFile(path / "metrics.jsonl")
    for record in records.run():
        file.observe(record)
    file.close()
    return path


@pytest.fixture
def run(folder: Path) -> Collected:
    return collect(folder)


def test_the_table_has_a_row_for_each_step_and_what_was_measured_there(run: Collected, tmp_path: Path) -> None:
    text = write_table(run, tmp_path / "metrics.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    assert [int(row["step"]) for row in rows] == [step.step for step in run.steps]
    for row, step in zip(rows, run.steps, strict=True):
        assert float(row["train_loss"]) == step.loss
        assert float(row["train_accuracy"]) == step.correct / step.counted
        assert [float(row["lr_encoder"]), float(row["lr_head"])] == list(step.learning_rates)
    by_step = {int(row["step"]): row for row in rows}
    assert run.evaluations
    for record in run.evaluations:
        assert float(by_step[record.step][f"{record.split}_accuracy"]) == record.metrics["accuracy"]
        assert float(by_step[record.step][f"{record.split}_loss"]) == record.loss
    measured = {record.step for record in run.evaluations}
    assert by_step[1]["validation_loss"] == "" or 1 in measured


def test_the_figures_are_pictures_that_stand_alone(
    run: Collected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    said: list[str] = []
    paths = write_figures(run, tmp_path / "figures", said.append)
    assert {"loss.svg", "acc.svg"} <= {path.name for path in paths}
    for path in paths:
        assert ElementTree.fromstring(path.read_text(encoding="utf-8")).tag.endswith("svg")
    assert said == [f"{tmp_path / 'figures'}: SVG alone; pip install matplotlib adds PDF and PNG"]


def test_with_matplotlib_there_are_pdfs_too(run: Collected, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is optional")
    paths = write_figures(run, tmp_path, print)
    assert (tmp_path / "loss.pdf").read_bytes().startswith(b"%PDF")
    assert {"loss.pdf", "loss.png", "acc.pdf"} <= {path.name for path in paths}


def test_the_command_names_what_it_wrote(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["report", str(folder), "--figures", str(tmp_path / "figures"), "--csv", str(tmp_path / "metrics.csv")]
    monkeypatch.setattr("sys.argv", ["paceline", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr().out
    assert ended.value.code == 0
    for path in (folder / "report.html", tmp_path / "figures" / "loss.svg", tmp_path / "metrics.csv"):
        assert f"wrote {path}\n" in out
        assert path.exists()


def test_a_table_that_cannot_be_written_is_a_users_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", "report", str(folder), "--csv", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2, capsys.readouterr().err
