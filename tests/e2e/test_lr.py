"""``paceline lr`` from the command line: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.commands import Paceline, in_process
from tests.e2e.whole_runs import recipe


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paceline:
    return in_process(monkeypatch, capsys)


@pytest.fixture
def file(tmp_path: Path, pretrained: Path, reviews: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    # JSON is YAML
    path.write_text(json.dumps(recipe(pretrained, reviews, name="tiny").plain()), encoding="utf-8")
    return path


def test_it_draws_a_curve_and_leaves_no_run(paceline: Paceline, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    done = paceline("lr", file, "--steps", 40)
    assert done.code == 0, done.err
    assert done.out.startswith("tiny: loss over the learning rate, adamw\n")
    assert "*" in done.out
    assert "1e-4" in done.out
    assert "uggested" in done.out
    assert [path.name for path in file.parent.iterdir()] == ["tiny.yaml"]


def test_json_and_the_page_have_the_same_curve(paceline: Paceline, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "rates"
    options = ("--steps", 30, "--from", 1e-5, "--to", 0.1, "--json", "--out", out)
    done = paceline("lr", file, *options, "--set", "optimizer.layer_decay=0.8")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told == json.loads((out / "lr.json").read_text(encoding="utf-8"))
    assert told["rates"][0] == pytest.approx(1e-5)
    assert len(told["rates"]) == len(told["losses"]) == len(told["smoothed"])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Loss over learning rates" in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", 5), "--steps 5"),
        (("--from", 1e-2, "--to", 1e-3), "--from 0.01 --to 0.001"),
        (("--from", 0), "--from 0 --to 1"),
        (("--set", "model.train=features"), "model.train = features"),
        (("--set", "data.source=nowhere.csv"), "nowhere.csv"),
        (("--set", "optimizer.typ=sgd"), "optimizer.typ"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value)),
)
def test_what_cannot_be_tested_is_exit_code_2(paceline: Paceline, file: Path, options: tuple, message: str) -> None:
    done = paceline("lr", file, *options)
    assert done.code == 2
    assert message in done.err
    assert "fix:" in done.err
    assert "Traceback" not in done.err


def test_a_rate_is_multiplied_by_lr_scaling_as_in_a_run(paceline: Paceline, file: Path) -> None:
    """What is suggested is typed as ``--lr``, and a run multiplies that."""
    scale = ("--set", "optimizer.lr_scaling=4")
    scaled = paceline("lr", file, "--steps", 20, "--from", 1e-4, "--to", 1e-2, *scale, "--json")
    plain = paceline("lr", file, "--steps", 20, "--from", 4e-4, "--to", 4e-2, "--json")
    found, expected = json.loads(scaled.out), json.loads(plain.out)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    assert found["rates"][0] == pytest.approx(1e-4)
