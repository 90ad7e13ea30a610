"""``predict`` and ``evaluate`` read each file as it is written, whatever the run's own files were like."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline as library
from tests.e2e.commands import Paceline, read_csv
from tests.testing.tiny import tiny_bert_config

CHINESE = [("这家店的东西很好吃，服务也好", "好评"), ("质量太差，不会再买了", "差评")]
POLISH = [("żółty zeszyt, świetny i ładny", "dobry"), ("źle się pisze, słaby i drogi", "zły")]


def write(path: Path, rows: list[tuple[str, str]], encoding: str, delimiter: str, count: int = 1) -> Path:
    """Rows of a text with a number and a label; ``count`` times all of them."""
    lines = [f"text{delimiter}label"]
    lines += [f'"{text} {number}"{delimiter}{label}' for number in range(count) for text, label in rows]
    path.write_bytes("\r\n".join(lines).encode(encoding))
    return path


def train(folder: Path, rows: list[tuple[str, str]], encoding: str, delimiter: str) -> Path:
    folder.mkdir()
    data = {
        "source": str(write(folder / "own.csv", rows, encoding, delimiter, count=20)),
        "encoding": encoding,
        "delimiter": delimiter,
    }
    recipe = {
        "model": {"config": tiny_bert_config(), "vocabulary_size": 200},
        "data": data,
        "loop": {"epochs": 1, "batch_size": 16},
        "observe": {"console": "off", "report": False},
    }
    library.train(recipe, out=folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs whose recipes name an encoding and a delimiter, that no test changes."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        "gbk": train(folder / "gbk", CHINESE, "gbk", ";"),
        "cp1250": train(folder / "cp1250", POLISH, "cp1250", "#"),
    }


@pytest.mark.parametrize(
    ("run", "rows", "encoding", "delimiter"),
    [
        ("gbk", CHINESE, "utf-8", ","),
        ("gbk", CHINESE, "utf-8-sig", ";"),
        ("gbk", CHINESE, "gbk", "\t"),
        ("gbk", CHINESE, "utf-16", ","),
        ("cp1250", POLISH, "utf-8", ";"),
        # the bytes could be of Windows-1252 as well: here the run knows better
        ("cp1250", POLISH, "cp1250", "#"),
        ("cp1250", POLISH, "cp1250", ","),
    ],
)
def test_a_file_is_read_as_it_is_written(
    runs: dict[str, Path],
    paceline: Paceline,
    tmp_path: Path,
    run: str,
    rows: list[tuple[str, str]],
    encoding: str,
    delimiter: str,
) -> None:
    file = write(tmp_path / "new.csv", rows, encoding, delimiter)
    done = paceline("predict", runs[run], file, "-o", "out.csv")
    assert done.code == 0, done.err
    assert [row["text"] for row in read_csv(tmp_path / "out.csv")] == [f"{text} 0" for text, _ in rows]
    assert ("read as" in done.err) == (not encoding.startswith("utf-8"))
    done = paceline("evaluate", runs[run], "--data", file)
    assert done.code == 0, done.err


def test_what_is_set_for_this_file_holds(runs: dict[str, Path], paceline: Paceline, tmp_path: Path) -> None:
    file = write(tmp_path / "new.csv", [("é", "dobry"), ("plain", "dobry")], "cp1252", "|")
    settings = ("--set", "data.encoding=cp1251", "--set", 'data.delimiter="|"')
    done = paceline("predict", runs["cp1250"], file, "-o", "out.csv", *settings)
    assert done.code == 0, done.err
    assert [row["text"] for row in read_csv(tmp_path / "out.csv")] == ["й 0", "plain 0"]


def test_a_bar_needs_no_quotes(runs: dict[str, Path], paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("text|more\nplain words|1\n")
    done = paceline("predict", runs["cp1250"], "new.csv", "-o", "out.csv", "--set", "data.delimiter=|")
    assert done.code == 0, done.err
    assert [row["text"] for row in read_csv(tmp_path / "out.csv")] == ["plain words"]


def test_the_runs_own_splits_are_read_as_they_were(runs: dict[str, Path], paceline: Paceline) -> None:
    for run in runs.values():
        done = paceline("evaluate", run)
        assert done.code == 0, done.err
    done = paceline("evaluate", runs["gbk"], "--set", "data.encoding=utf-8")
    assert done.code == 2
    assert "they are read as the run read them" in done.err
