"""Train, plan and memory ask one object which samples the steps take: nobody else builds an order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline"


def calls(path: Path) -> set[str]:
    """Names that are called in a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


@pytest.mark.parametrize("asks", ["run/job.py", "memory/trace.py", "memory/stages.py"])
def test_train_plan_and_memory_ask_the_course(asks: str) -> None:
    assert "Course" in calls(SOURCE / asks), f"{asks} works out the steps by itself"


def test_nobody_else_builds_an_order() -> None:
    found = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if "ShuffledOrder" in calls(path)]
    assert set(found) <= {"prepare/course.py", "data/order.py"}, found
    assert "prepare/course.py" in found, "the guard sees nothing"
