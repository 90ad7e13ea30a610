"""``scripts/house`` sees what it counts, and nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "house"


@pytest.fixture(scope="module")
def house() -> Any:
    """The script as a module."""
    loader = SourceFileLoader("house", str(SCRIPT))
    spec = importlib.util.spec_from_loader("house", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(sys, "path", list(sys.path))
        patch.setitem(sys.modules, "house", module)
        loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("count", "planted", "harmless", "told"),
    [
        ("loose_modules", {"job.py": ""}, {"__init__.py": "", "data/table.py": ""}, ["job.py"]),
        (
            "against_direction",
            {"tasks/loss.py": "def f():\n    from paceline.run.loop import x\n", "run/loop.py": ""},
            {"run/late.py": "import paceline.tasks.loss\n"},
            ["tasks/loss.py:2: tasks imports run.loop"],
        ),
        (
            "against_direction",
            {"data/a.py": "import paceline.models.b\n", "models/b.py": ""},
            {"techniques/c.py": "import paceline.models.b\n"},
            ["data/a.py:1: data imports models.b"],
        ),
        (
            "against_direction",
            {"attic/a.py": "import paceline.contract.errors\n", "contract/errors.py": ""},
            {},
            ["attic/a.py:1: attic has no place in ORDER"],
        ),
        (
            "strategies_named_above",
            {
                "strategies/ddp/__init__.py": "",
                "strategies/strategy.py": "",
                "verbs/train.py": "x = 'ddp'\nfrom paceline.strategies.ddp import y\n",
            },
            {
                "recipe/parts.py": "x = 'ddp'\n",
                "verbs/plan.py": "x = 'of ddp alone'\ny = 'alone'\nfrom paceline.strategies.strategy import z\n",
            },
            ["verbs/train.py:1: 'ddp'", "verbs/train.py:2: imports paceline.strategies.ddp.y"],
        ),
        ("strategies_named_above", {}, {"verbs/train.py": "x = 'ddp'\n"}, []),
        (
            "tasks_named_outside",
            {
                "tasks/ranking/__init__.py": "",
                "data/labels.py": "x = kind == 'ranking'\nfrom paceline.tasks.ranking.rows import y\n",
            },
            {
                "tasks/ranking/rows.py": "kind = 'ranking'\n",
                "tasks/meter.py": "",
                "recipe/catalogue/tasks.py": "x = 'ranking'\n",
                "run/loop.py": "x = 'a ranking'\ny = 'meter'\nfrom paceline.tasks.meter import z\n",
            },
            ["data/labels.py:1: 'ranking'", "data/labels.py:2: imports paceline.tasks.ranking.rows.y"],
        ),
        ("tasks_named_outside", {}, {"data/labels.py": "x = 'ranking'\n"}, []),
        (
            "long_functions",
            {"run.py": "def f():\n" + "    pass\n" * 60},
            {"job.py": "def f():\n" + "    pass\n" * 59},
            ["run.py:1 f: 61 lines"],
        ),
        ("long_files", {"run.py": "\n" * 401}, {"job.py": "\n" * 400}, ["run.py: 401 lines"]),
        (
            "of_docstrings",
            {"a.py": 'X = 1\n"""Of a run.\n"""\n\n\ndef f():\n    """Of it."""\n'},
            {"b.py": '"""Often."""\nX = "Of a run"\n'},
            ["a.py:2: Of a run.", "a.py:7: Of it."],
        ),
        (
            "abstract_members",
            {"engine/engine.py": "class Engine(ABC):\n    @property\n    @abc.abstractmethod\n    def x(self): ...\n"},
            {"seams.py": "class Task(ABC):\n    @abstractmethod\n    def x(self): ...\n"},
            ["engine/engine.py:4: x"],
        ),
        (
            "orders_built",
            {"job.py": "order.ShuffledOrder(\n)\n"},
            {"data/order.py": "ShuffledOrder()\n", "loop.py": "isinstance(x, ShuffledOrder)\n"},
            ["job.py:1"],
        ),
    ],
)
def test_each_count_sees_what_it_counts(
    house: Any, tmp_path: Path, count: str, planted: dict[str, str], harmless: dict[str, str], told: list[str]
) -> None:
    for name, text in (planted | harmless).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert sorted(getattr(house, count)(tmp_path)) == told


def test_the_source_is_within_its_limits_and_python_alone_can_tell() -> None:
    command = [sys.executable, "-S", str(SCRIPT), "--verbose"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "", "-S leaves out installed packages"
    assert sum(" limit " in line for line in done.stdout.splitlines()) == 9
    assert done.returncode == 0, done.stdout
