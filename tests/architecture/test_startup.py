"""Start-up: the contract floor needs no torch, and the command line answers at once."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.architecture.test_floors import SOURCE, modules

HEAVY = ("torch", "transformers", "sklearn", "pandas", "pyarrow", "datasets", "tensorboard")
"""Libraries that take a good part of a second to import."""

TORCH_FREE = (
    "run.checkpoint.compare",
    "distributed.failures",
    "distributed.sockets",
    "verbs.cli",
    "verbs.launch",
    "verbs.bench",
    "verbs.bench_screen",
    "bench.ladder",
    "bench.table",
    "verbs.doctor",
    "verbs.techniques",
    "verbs.plan",
    "verbs.plan_shown",
    "verbs.memory",
    "memory.expandable",
    "memory.measure",
    "memory.predict",
    "tracing",
    "verbs.schema",
)
"""Modules above the contract floor that a login node runs too."""

IMPORT_SECONDS = 0.15
HELP_SECONDS = 0.4
SLACK = 2.0 if "CI" in os.environ or "PYTEST_XDIST_WORKER" in os.environ else 1.0
"""The budgets hold on a machine that does nothing else; beside other tests a process gets half a core at worst."""


def heavy_imports(names: Sequence[str], folder: Path | None = None) -> list[str]:
    """The heavy libraries that importing the modules ``names`` loads, in a fresh interpreter."""
    code = "import importlib, sys\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    code += f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    return _python("-c", code, folder=folder).stdout.split()


def import_seconds(name: str, folder: Path | None = None) -> float:
    """Median seconds of importing a module in a fresh interpreter, as -X importtime counts them; 3 runs."""

    def once() -> float:
        report = _python("-X", "importtime", "-c", f"import {name}", folder=folder).stderr
        found = re.search(rf"^import time:\s*\d+ \|\s*(\d+) \| {re.escape(name)}$", report, re.MULTILINE)
        assert found, f"{name} is not in the report of -X importtime"
        return int(found[1]) / 1e6

    return statistics.median(once() for _ in range(3))


def command_seconds(*arguments: str, num_runs: int = 3) -> float:
    """Median wall seconds of a Python process from start to end."""

    def once() -> float:
        start = time.perf_counter()
        _python(*arguments)
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(num_runs))


def _python(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)} if folder else dict(os.environ)
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_contract_floor_loads_no_torch() -> None:
    known = modules(SOURCE)
    free = ("contract", "machine", "recipe", "run_folder")
    contract = [name for name in known if name.partition(".")[0] in free and name != "machine.device"]
    missing = [name for name in TORCH_FREE if name not in known]
    assert not missing, f"the guard looks at modules that are not there: {missing}"
    loaded = heavy_imports(["paceline", *(f"paceline.{name}" for name in [*contract, *TORCH_FREE])])
    assert not loaded, f"the contract floor loads {loaded}"


def test_importing_paceline_is_cheap() -> None:
    seconds = import_seconds("paceline")
    assert seconds < IMPORT_SECONDS * SLACK, f"import paceline takes {seconds:.3f} s"


def test_help_answers_at_once() -> None:
    seconds = command_seconds("-m", "paceline", "--help")
    assert seconds < HELP_SECONDS * SLACK, f"paceline --help takes {seconds:.3f} s"


def test_the_guards_see_a_slow_and_a_heavy_module(tmp_path: Path) -> None:
    (tmp_path / "slow_room.py").write_text(f"import time; time.sleep({IMPORT_SECONDS * 2 + 0.02})")
    assert import_seconds("slow_room", tmp_path) > IMPORT_SECONDS * 2
    assert command_seconds("-c", f"import time; time.sleep({HELP_SECONDS * 2})", num_runs=1) > HELP_SECONDS * 2
    (tmp_path / "datasets.py").touch()
    (tmp_path / "heavy_room.py").write_text("import datasets")
    assert heavy_imports(["heavy_room"], tmp_path) == ["datasets"]
    with pytest.raises(AssertionError, match="No module named 'absent_room'"):
        heavy_imports(["absent_room"], tmp_path)


def test_a_task_and_its_metrics_load_no_models_and_no_plots() -> None:
    """A first step should not wait for them."""
    kinds = ("classification", "multi_label", "regression")
    code = "import sys\nfrom paceline.recipe.parts import TaskPart\nfrom paceline.tasks import task_for\n"
    code += "".join(f"task_for({kind!r}, ('a', 'b'), TaskPart())\n" for kind in kinds)
    loaded = _python("-c", code + "print(*sorted(sys.modules))").stdout.split()
    assert "paceline.tasks.metrics" in loaded
    assert [name for name in loaded if name.startswith(("transformers", "matplotlib"))] == []


def test_readers_of_other_formats_are_imported_where_a_file_needs_them(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\né,x\nb,y\n", encoding="utf-8")
    code = "import sys\nfrom paceline.data.sources import read\nfrom paceline.recipe.parts import DataPart\n"
    code += f"assert len(read(DataPart(source={str(tmp_path / 'a.csv')!r}))) == 2\n"
    readers = ("chardet", "python_calamine", "narwhals", "pyarrow", "datasets")
    code += f"print(*[name for name in {readers!r} if name in sys.modules])"
    assert _python("-c", code).stdout.split() == []
