"""Every number of a recipe, set to what no recipe means: an error that names it, or a run that works."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.contract.errors import UserError
from paceline.recipe import Recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

VALUES = ("1000000000000", "123456789012345678901234567890", "-1", "0", ".nan", ".inf", "1e308", "1e-320")

BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TEXTS: dict[str, Any] = {
    "model": {"config": {"model_type": "bert", "max_position_embeddings": 32, **BERT}},
    "data": {"source": "builtin:random", "random": {"samples": 32, "length": 8, "vocabulary": 200}},
}
IMAGES: dict[str, Any] = {
    "model": {"config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}},
    "data": {"source": "builtin:digits", "head": 40},
}
COMMON = {"loop": {"epochs": 1, "max_steps": 2, "batch_size": 8}, "device": "cpu"}


def numbers(schema: dict[str, Any], node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of the settings that may be numbers."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    if node.get("type") in ("integer", "number"):
        yield path
    for other in node.get("anyOf", []):
        yield from numbers(schema, other, path)
    for name, child in node.get("properties", {}).items():
        yield from numbers(schema, child, f"{path}.{name}" if path else name)


def settings(prefix: str = "") -> list[str]:
    schema = Recipe.model_json_schema()
    return sorted({path for path in numbers(schema, schema) if path.startswith(prefix)})


def attempt(base: dict[str, Any], path: str, value: str, out: Path) -> str:
    """Return the problem with the end of a run; empty after an error of the user's, or a run like any other."""
    try:
        record = paceline.train(Recipe.parse({**base, **COMMON}).with_settings([f"{path}={value}"]), out=out)
    except UserError:
        return ""
    except Exception as error:
        return f"{path}={value}: {type(error).__name__}: {str(error)[:200]}"
    losses = [scores["loss"] for scores in record.final.values()]
    if all(map(math.isfinite, losses)) or any("NaN" in notice for notice in record.notices):
        return ""
    return f"{path}={value}: losses {losses}, and not a word about it"


@pytest.mark.parametrize(
    "part", ["data", "loop", "model", "observe", "optimizer", "parallel", "schedule", "seed", "task"]
)
@pytest.mark.filterwarnings("ignore")
def test_numbers_beyond_reason(part: str, tmp_path: Path) -> None:
    tried = [(path, value) for path in settings(part) for value in VALUES]
    assert tried
    problems = [attempt(TEXTS, path, value, tmp_path / str(at)) for at, (path, value) in enumerate(tried)]
    assert not [problem for problem in problems if problem], "\n".join(filter(None, problems))


@pytest.mark.filterwarnings("ignore")
def test_numbers_beyond_reason_for_images(tmp_path: Path) -> None:
    paths = [path for path in settings("data") if "random" not in path]
    tried = [(path, value) for path in (*paths, "model.group_norm") for value in VALUES[:3]]
    problems = [attempt(IMAGES, path, value, tmp_path / str(at)) for at, (path, value) in enumerate(tried)]
    assert not [problem for problem in problems if problem], "\n".join(filter(None, problems))
