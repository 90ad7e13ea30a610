"""The import floors: a module imports from lower floors, or acyclically within its own; parts know no other part."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline"

FLOORS = {
    "contract": ("contract", "_version"),
    "machine": ("machine",),
    "recipe": ("recipe", "run_folder"),
    "seams": ("seams",),
    "compare": ("compare",),
    "kernels": ("kernels",),
    "parts": ("data", "distributed", "models", "techniques", "observe"),
    "tasks": ("tasks",),
    "optim": ("optim",),
    "engine": ("engine",),
    "strategies": ("strategies",),
    "prepare": ("prepare",),
    "views": ("memory", "tracing", "report"),
    "run": ("run",),
    "bench": ("bench",),
    "check": ("check",),
    "verbs": ("verbs", "__main__"),
}
"""From low to high."""

ORDER = list(FLOORS)
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}


def modules(source: Path) -> dict[str, Path]:
    """Dotted name, without the package's own, -> file; a package is named by its folder."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    """Every import of our own in a file, also in functions and under TYPE_CHECKING: (module, line)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            # 'from a.b import c' is a.b.c where that is a module, else something in a.b
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if target.partition(".")[0] != "paceline" or target == "paceline.__version__":
                continue
            inner = target.partition(".")[2]
            while inner and inner not in known:
                inner = inner.rpartition(".")[0]
            yield inner, node.lineno


def floor_violations(source: Path) -> list[str]:
    """Every import that goes up, sideways between parts, or round in a circle."""
    known = modules(source)
    problems, graph = [], {}
    for module, path in known.items():
        room = module.partition(".")[0]
        if not module:
            continue  # the package's front door names its rooms lazily
        if room not in FLOOR_OF:
            problems.append(f"{module}: {room!r} is on no floor; enter it in FLOORS")
            continue
        graph[module] = set()
        for target, line in imports(path, known):
            other = target.partition(".")[0]
            here = f"{path.relative_to(source)}:{line}"
            if not target:
                problems.append(f"{here}: imports from the front door; import from the module itself")
                continue
            if other not in FLOOR_OF:
                continue  # reported where that room is visited
            mine, theirs = FLOOR_OF[room], FLOOR_OF[other]
            if ORDER.index(theirs) > ORDER.index(mine):
                problems.append(f"{here}: {mine} imports {theirs} ({target}), which is above it")
            elif mine == theirs == "parts" and room != other:
                problems.append(f"{here}: part {room!r} imports part {other!r}; parts do not know one another")
            elif mine == theirs and target != module:
                graph[module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        problems.append("modules import in a circle: " + " -> ".join(error.args[1]))
    return problems


def test_every_import_goes_down_a_floor_or_round_no_circle() -> None:
    assert not floor_violations(SOURCE), "\n".join(floor_violations(SOURCE))


def test_the_guard_sees_every_kind_of_violation(tmp_path: Path) -> None:
    planted = {
        "contract/errors.py": "def late():\n    from paceline.data import table\n",
        "data/table.py": "import paceline.models.head\nimport paceline.tasks.loss\n",
        "models/head.py": "",
        "tasks/loss.py": "import paceline.data.table\n",
        "engine/step.py": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from paceline.run.loop import run\n",
        "run/loop.py": "from paceline.run.pace import x\n",
        "run/pace.py": "from paceline.run import loop\n",
        "report/page.py": "from paceline import __version__, train\n",
        "helpers.py": "",
    }
    for name, text in planted.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        (file.parent / "__init__.py").touch()
    found = "\n".join(floor_violations(tmp_path))
    expected = (
        "contract/errors.py:2: contract imports parts (data.table)",
        "data/table.py:1: part 'data' imports part 'models'",
        "data/table.py:2: parts imports tasks (tasks.loss), which is above it",
        "engine/step.py:3: engine imports run (run.loop)",
        "modules import in a circle: ",
        "report/page.py:1: imports from the front door",
        "helpers: 'helpers' is on no floor",
    )
    missed = [message for message in expected if message not in found]
    assert not missed, f"not seen: {missed}\nfound: {found}"
    assert len(found.splitlines()) == len(expected), f"honest imports are refused:\n{found}"
