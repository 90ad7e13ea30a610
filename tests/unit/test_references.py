"""The user's own functions: found, of the right form, and their errors told as theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.contract.errors import DataError, RecipeError
from paceline.contract.references import resolve, users_code


def test_a_function_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_reference.py").write_text("def rate(step, total_steps, floor=0): return floor\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    function = resolve("own_reference:rate", "schedule.type", ("step", "total_steps"))
    monkeypatch.delitem(sys.modules, "own_reference")
    assert function(1, 2) == 0
    assert sys.path == path


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere:f", "there is no module nowhere"),
        ("json:laods", "did you mean 'loads'"),
        ("json:decoder", "it is not a function"),
        ("json:loads", r"it is called as loads\(logits, labels\)(.|\n)*def loads\(logits, labels\): ..."),
    ],
)
def test_a_function_that_cannot_be_meant(reference: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(reference, "task.loss", ("logits", "labels"))


def test_a_function_that_does_not_tell_its_form_is_taken() -> None:
    assert resolve("builtins:max", "task.loss", ("logits", "labels")) is max


def test_errors_of_the_users_code_are_the_users() -> None:
    told = r"task.loss = a:b: failed\n.*ZeroDivisionError.*test_references.py:\d+"
    with pytest.raises(RecipeError, match=told), users_code("task.loss = a:b"):
        1 / 0  # noqa: B018
    for error in (DataError("ours"), MemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(error)), users_code("task.loss = a:b"):
            raise error
