"""A fault of one line, and how it is planted in a copy of the source."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "paceline"


@dataclass(frozen=True)
class Fault:
    """A line of the source, what stands there instead, and the tests that fail then."""

    name: str
    """What is wrong, in a few words joined by hyphens."""
    file: str
    """Relative to ``src/paceline``."""
    line: str
    """The whole line without its indentation; exactly one line of the file is this one."""
    planted: str
    """The line in its place, at the same indentation."""
    tests: tuple[str, ...]
    """Node ids relative to ``tests``; of a test with parameters, one case that fails is enough."""

    @property
    def node_ids(self) -> tuple[str, ...]:
        """As pytest is given them, from the repository's root."""
        return tuple(f"tests/{test}" for test in self.tests)

    @property
    def needs_gpu(self) -> bool:
        """Whether its tests are skipped where there is no GPU: they would find nothing there."""
        return any(test.startswith("gpu/") for test in self.tests)

    def survives(self, failed: set[str]) -> list[str]:
        """Its tests that are not among those that ``failed``."""
        return [
            test for test in self.node_ids if not any(node == test or node.startswith(f"{test}[") for node in failed)
        ]


class NotPlanted(Exception):
    """The source has changed, and the table has to follow."""


def planted(text: str, fault: Fault) -> str:
    """The text of the fault's file with the fault in it.

    Raises:
        NotPlanted: the line is not there exactly once.
    """
    lines = text.splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if line.strip() == fault.line]
    if len(places) != 1:
        raise NotPlanted(f"{fault.name}: {fault.file} has this line {len(places)} times, not once: {fault.line}")
    lines[places[0]] = lines[places[0]].replace(fault.line, fault.planted)
    return "".join(lines)


def plant(source: Path, fault: Fault) -> None:
    """Plant a fault in a copy of the package.

    Args:
        source: the copy of ``src/paceline``.

    Raises:
        NotPlanted: its line is not there exactly once.
    """
    path = source / fault.file
    if source.resolve() == SOURCE or not path.is_file():
        raise NotPlanted(f"{fault.name}: {path} is no file of a copy")
    path.write_text(planted(path.read_text(encoding="utf-8"), fault), encoding="utf-8")
    # what Python compiled before it would tell by size and time, and both may be the same
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def copied(folder: Path) -> Path:
    """A copy of the package in ``folder``, which Python finds there when it is told to look."""
    return Path(shutil.copytree(SOURCE, folder / SOURCE.name))
