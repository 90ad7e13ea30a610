"""A plugin for pytest: sees which source is tested, and writes down which tests failed.

Two variables tell it where: ``PACELINE_MUTANT`` is the copy that has to be imported, ``PACELINE_FAILED`` the file for
the node ids, one a line.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_failed: list[str] = []


def pytest_sessionstart() -> None:
    import paceline

    copy, imported = Path(os.environ["PACELINE_MUTANT"]), Path(paceline.__file__).parent
    if imported.resolve() != copy.resolve():
        raise pytest.UsageError(f"the tests would see {imported}, not the copy {copy}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.append(report.nodeid)


def pytest_sessionfinish() -> None:
    Path(os.environ["PACELINE_FAILED"]).write_text("".join(f"{node}\n" for node in _failed), encoding="utf-8")
