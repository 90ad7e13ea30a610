"""Errors that leave the package's functions say what a Python program writes; those of commands keep their options."""

from __future__ import annotations

import pytest

from paceline.contract.errors import DataError, UserError
from paceline.contract.python_fixes import command_line, in_python, python_fixes


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("--set data.label=stars", 'settings=["data.label=stars"]'),
        ("--set data.text=a --set data.label=b, of a, b", 'settings=["data.text=a", "data.label=b"], of a, b'),
        ("--set data.decimal=. where it is 1", 'settings=["data.decimal=."] where it is 1'),
        ("--set data.decimal=, where it is 1", 'settings=["data.decimal=,"] where it is 1'),
        ("--set data.label_separator=';' cuts them", 'settings=["data.label_separator=;"] cuts them'),
        ("--set 'data.label_separator= '", 'settings=["data.label_separator= "]'),
        ("--set 'optimizer.betas=[0.9, 0.999]'; or", 'settings=["optimizer.betas=[0.9, 0.999]"]; or'),
        ('drop it (--set data.on_bad_row=skip drops "it")', 'drop it (settings=["data.on_bad_row=skip"] drops "it")'),
        ("--data kg/train.csv --set data.test=b.csv", 'data="kg/train.csv", settings=["data.test=b.csv"]'),
        ("--data 'my data.csv'", 'data="my data.csv"'),
        ("--gpus 2, or --gpus all", 'gpus=2, or gpus="all"'),
        ("--processes=2; --trust-references", "processes=2; trust_references=True"),
        ("--model 名字", 'settings=["model.source=名字"]'),
        # commands can be typed wherever the program runs
        ("paceline train RECIPE --set loop.epochs=3", "paceline train RECIPE --set loop.epochs=3"),
        ("paceline train R --set a.b=1; or --set c.d=2", 'paceline train R --set a.b=1; or settings=["c.d=2"]'),
        ("write 0,1,1", "write 0,1,1"),
        ("", ""),
    ],
)
def test_options_become_arguments(typed: str, written: str) -> None:
    assert in_python(typed) == written


def test_an_error_that_leaves_a_function_has_the_fix_of_python() -> None:
    with pytest.raises(DataError) as caught, python_fixes():
        raise DataError("no label column found", file="a.csv", why="--set is none", fix="--set data.label=b")
    assert str(caught.value) == ('a.csv: no label column found\n  why: --set is none\n  fix: settings=["data.label=b"]')
    assert caught.value.fix == 'settings=["data.label=b"]'


def test_an_error_of_a_command_keeps_its_options() -> None:
    with pytest.raises(UserError) as caught, command_line(), python_fixes():
        raise UserError("what", "", "--set data.label=b")
    assert caught.value.fix == "--set data.label=b"
