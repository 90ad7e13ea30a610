"""A kind of task is one room with all its parts, one page and one entry of the catalogue; its rows need no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from paceline.recipe.parts import TaskPart
from paceline.recipe.tasks import load_part, task_entry, task_names

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("rows", "head", "objective", "predictions", "plain")


def test_rooms_entries_pages_and_values_agree() -> None:
    rooms = {path.parent.name for path in (ROOT / "src" / "paceline" / "tasks").glob("*/__init__.py")}
    pages = {path.stem for path in (ROOT / "docs" / "tasks").glob("*.md")}
    values = set(get_args(TaskPart.model_fields["type"].annotation)) - {"auto"}
    assert set(task_names()) == rooms == pages == values
    assert all((ROOT / task_entry(name).page).is_file() for name in task_names())


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", task_names())
def test_every_room_has_every_part(kind: str, part: str) -> None:
    assert load_part(kind, part) is not None
    assert getattr(load_part(kind, part), "kind", kind) == kind


def test_labels_are_read_without_torch() -> None:
    code = "import sys\nfrom paceline.data.task_rows import rows_of\n"
    code += "".join(f"rows_of({kind!r}).classes_of('a')\n" for kind in task_names())
    done = subprocess.run(
        [sys.executable, "-c", f"{code}assert 'torch' not in sys.modules"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
