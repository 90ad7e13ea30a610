"""Kernels of our own count as what they are."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline.kernels
from paceline.tracing.kinds import ATTENTION, OPTIMIZER, OTHER, POINTWISE, kind_of

KERNELS = Path(paceline.kernels.__file__).parent


def test_kernels_of_short_attention_count_as_attention() -> None:
    tree = ast.parse((KERNELS / "short_attention_kernels.py").read_text(encoding="utf-8"))
    launched = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    assert len(launched) == 3, "one forward, two backward"
    assert {name: kind_of(name) for name in launched} == dict.fromkeys(launched, ATTENTION)


def launched() -> list[str]:
    """Triton kernels that are launched by name: those that no other kernel of theirs calls."""
    found = []
    for path in sorted(KERNELS.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kernels = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _is_jit(node)]
        called = {
            call.func.id
            for kernel in kernels
            for call in ast.walk(kernel)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        }
        found += [kernel.name for kernel in kernels if kernel.name not in called]
    return found


def _is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) in ("triton.jit", "_jit") for decorator in function.decorator_list)


def test_every_kernel_of_the_package_has_a_kind() -> None:
    names = set(launched()) - {"nothing"}  # which does nothing, and is never launched in a step
    assert {"adam", "descend", "_images_kernel", "_attend_kernel"} <= names, "kernels were overlooked"
    assert not {name for name in names if kind_of(name) == OTHER}


def test_kernels_count_as_what_they_do() -> None:
    assert kind_of("descend") == kind_of("adam") == OPTIMIZER
    assert {kind_of(name) for name in ("_sum_kernel", "_join_kernel", "_images_kernel")} == {POINTWISE}
