"""Paths that a run keeps are found again from every folder; what is no path is left as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.recipe import Recipe
from paceline.recipe.places import absolute


def test_files_and_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    (tmp_path / "model").mkdir()
    asked = Recipe.parse(
        {"model": {"source": "model"}, "data": {"source": "rows.csv", "validation": "../v.csv", "test": "~/t.csv"}}
    )
    found = absolute(asked)
    data = found.data
    assert found.model.source == str(tmp_path / "model")
    assert data.source == str(tmp_path / "rows.csv")
    assert (data.validation, data.test) == (os.path.abspath("../v.csv"), "/home/somebody/t.csv")
    assert absolute(found) == found


@pytest.mark.parametrize("source", ["hub:stanfordnlp/imdb", "builtin:digits", "memory"])
def test_what_is_no_path_stays(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = Recipe.parse({"model": {"source": "distilbert-base-uncased"}, "data": {"source": source}})
    assert absolute(asked) is asked
