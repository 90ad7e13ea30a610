"""Importing transformers brings no package that one function is taken from; that function works all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORTED = """
import sys
from paceline.models.imports import import_transformers
import_transformers()
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, utils
loaded = {"scipy", "sklearn", "pandas"} & set(sys.modules)
assert not loaded, loaded
"""
ASKED = """
from transformers.generation import candidate_generator
from transformers.loss import loss_for_object_detection as detection
assert detection.is_scipy_available is utils.is_scipy_available and utils.is_scipy_available()
assert candidate_generator.is_sklearn_available is utils.is_sklearn_available
rows, columns = detection.linear_sum_assignment([[4, 1], [2, 8]])
assert (rows.tolist(), columns.tolist()) == ([0, 1], [1, 0])
assert "scipy" in sys.modules
"""
FIRST_THEIRS = """
from scipy.optimize import linear_sum_assignment
from paceline.models.imports import import_transformers
import_transformers()
from transformers.loss import loss_for_object_detection as detection
assert detection.linear_sum_assignment is linear_sum_assignment
"""


def run(code: str) -> None:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def test_functions_come_when_they_are_called() -> None:
    run(IMPORTED + ASKED)


@pytest.mark.slow
def test_packages_that_are_there_already_are_left_alone() -> None:
    run(FIRST_THEIRS)


WITHOUT_DOCSTRINGS = """
from paceline.contract.errors import UserError
from paceline.models.imports import import_transformers
try:
    import_transformers()
except UserError as error:
    print(error)
"""


def test_without_docstrings_transformers_is_refused() -> None:
    """Its traceback, of a page, named neither the variable nor the reason."""
    command = [sys.executable, "-OO", "-c", WITHOUT_DOCSTRINGS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.startswith("PYTHONOPTIMIZE=2, or python -OO: transformers cannot be loaded\n")
    assert found.stdout.endswith("fix: unset PYTHONOPTIMIZE\n")
