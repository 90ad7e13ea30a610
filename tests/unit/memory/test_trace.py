"""Whole runs, traced on a GPU that is not there, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.memory.apart import assert_holds

SECONDS = 400
"""The slow ones trace two dozen runs each: a minute on two idle cores, and minutes beside other work."""


@pytest.mark.timeout(240)
def test_a_run_takes_what_it_is_made_of(tmp_path: Path) -> None:
    assert_holds("tests.unit.memory.tracing", tmp_path, 230)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 10)
def test_settings_change_what_they_should_and_nothing_else(tmp_path: Path) -> None:
    assert_holds("tests.unit.memory.settings", tmp_path, SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 10)
def test_models_of_many_families(tmp_path: Path) -> None:
    assert_holds("tests.unit.memory.families", tmp_path, SECONDS)
