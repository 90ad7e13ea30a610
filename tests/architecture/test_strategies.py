"""No module above ``strategies`` knows one by name: a way of splitting is its room, its entry, its page, its test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.recipe.catalogue.strategies import STRATEGIES

SOURCE = Path(__file__).resolve().parents[2] / "src" / "paceline"
BELOW = ("strategies", "recipe")
"""Rooms that may name strategies: themselves, and the catalogue with the recipe's fields."""

RUNGS = {"bench/rungs.py", "bench/claims.py", "bench/contenders"}
"""Name what peers call their ways of splitting, and rungs that are called so; none is a strategy of ours."""

NAMES = "|".join(entry.name for entry in STRATEGIES)
IN_TEXT = re.compile(rf"(?<![\w-])(?:{NAMES})(?![\w-])")
IN_CODE = re.compile(r"is_sharded|DTensor|FSDP|DistributedDataParallel|fully_shard")
KNOWN = {"engine/adopt.py", "models/factory.py", "models/saved.py", "machine/facts.py", "contract/redaction.py"}
"""Know what torch's own wrappers of models are called: two refuse them, the third unwraps them. One has names of
distributions, of which one is called as the strategy that needs it; one knows how secrets begin."""


def named(source: Path) -> Iterator[str]:
    """Where a strategy is named: in a string that is no docstring, or by a class of torch's."""
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        if place.parts[0] in BELOW or {str(place), str(place.parent)} & (KNOWN | RUNGS):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in told else None
            word = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
            if (isinstance(text, str) and IN_TEXT.search(text)) or (isinstance(word, str) and IN_CODE.search(word)):
                yield f"{place}:{getattr(node, 'lineno', 0)}: {text or word}"


def test_no_module_above_the_strategies_names_one() -> None:
    found = list(named(SOURCE))
    assert not found, "\n".join(found)


def test_the_guard_sees_every_way_of_naming_one(tmp_path: Path) -> None:
    planted = {
        "run/loop.py": 'if strategy == "fsdp": pass\n',
        "verbs/plan.py": 'fix = "--set parallel.strategy=ddp"\n',
        "memory/trace.py": "from torch.distributed.tensor import DTensor\n",
        "run/run.py": "if is_sharded(model): pass\n",
    }
    allowed = {
        "strategies/ddp/strategy.py": 'NAME = "ddp"\n',
        "recipe/techniques.py": 'ENTRY = "fsdp"\n',
        "run/job.py": '"""Of ddp and fsdp."""\nstep = "a ddp-like step"\n',
    }
    for place, text in (planted | allowed).items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    assert sorted(one.partition(":")[0] for one in named(tmp_path)) == sorted(planted)
