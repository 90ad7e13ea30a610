"""Bounds of plain data: a small text, or a few lines of Python, can stand for what fills the memory or the stack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from paceline.contract.errors import RecipeError

DEEPEST = 100
"""Levels of nesting; a recipe has four, and a model's configuration a few more."""

_MOST_REPEATED = 100_000
"""Values that aliases may stand for in all: a few hundred bytes can stand for billions."""

_LONGEST_NUMBER = 400
"""Characters; Python reads and writes no whole number of over 4,300 digits."""


def require_bounded(value: object, path: str = "", depth: int = 0) -> None:
    """Require of nested plain data that it ends, and that its numbers can be written.

    Raises:
        RecipeError: deeper than ``DEEPEST``, or a whole number of more than 1,024 bits.
    """
    if depth > DEEPEST:
        raise RecipeError(f"{path[:60]}...: nested too deeply", f"{DEEPEST} levels are read", "give flatter data")
    if isinstance(value, int) and value.bit_length() > 1024:
        raise RecipeError(f"{path}: a number of {value.bit_length():,} bits", fix="give a smaller number")
    children: Iterable[tuple[object, object]] = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list | tuple):
        children = enumerate(value)
    for key, child in children:
        require_bounded(child, f"{path}.{key}" if path else str(key), depth + 1)


class BoundedLoader(yaml.SafeLoader):
    """SafeLoader that refuses what would fill the memory, or the stack.

    Raises:
        yaml.YAMLError: deeper than ``DEEPEST``, aliases for too much or for what they are in, no number or no date.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth, self._num_written = 0, 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        self._num_written += 1
        if self._depth > DEEPEST:
            raise _too_deep(self.peek_event())  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            count, depth = _expanded_size(node, {})
            if depth > DEEPEST:
                raise _too_deep(node)
            if count > self._num_written + _MOST_REPEATED:
                raise _refused(f"its aliases stand for {count:,} values", node, "write out what is meant")
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
            raise _refused(f"a number of {len(node.value):,} characters", node, "give a smaller number")
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # such as 2026-02-30, which looks like a date
            raise _refused(f"{node.value!r}: {error}", node, f"as text, put it in quotes: '{node.value}'") from None


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _expanded_size(node: Any, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Number of values, and levels, of a node with its aliases written out; each node is looked at once."""
    if id(node) not in known:
        known[id(node)] = None  # under way
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = children if isinstance(node, yaml.MappingNode) else ((child,) for child in children)
        sizes = [_expanded_size(child, known) for pair in pairs for child in pair]
        known[id(node)] = 1 + sum(count for count, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
    size = known[id(node)]
    if size is None:
        raise _refused("an alias stands for what it is in", node, "write it out")
    return size


def _too_deep(at: Any) -> yaml.MarkedYAMLError:
    return _refused("nested too deeply", at, f"{DEEPEST} levels are read")


def _refused(problem: str, at: Any, note: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark, note)
