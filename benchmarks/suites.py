"""The suites of suites.yaml, checked, and the cells that they come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from paceline.bench.cells import in_turns

SUITES = Path(__file__).with_name("suites.yaml")


class Entry(BaseModel):
    """Frozen, and refuses fields that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Workload(Entry):
    """Data and model, the same for everybody."""

    recipe: str = Field(description="A file of benchmarks/recipes.")
    settings: dict[str, Any] = Field({}, alias="set", description="Changes of the recipe, by dotted path.")
    needs: tuple[Literal["data", "tokenizer"], ...] = Field((), description="Given on the command line.")


class Contender(Entry):
    """Whoever is measured."""

    script: str | None = Field(None, description="A file of benchmarks/contenders; null: paceline's command line.")
    settings: dict[str, Any] = Field({}, description="Of the script.")
    set: dict[str, Any] = Field({}, description="Changes of the recipe, for paceline.")


class Group(Entry):
    """Contenders who take turns on one piece of work, once for each batch size, on each number of processes."""

    workload: str | None = Field(None, description="Null: none is needed.")
    contenders: tuple[str, ...]
    batch_sizes: tuple[int, ...] = (0,)
    processes: tuple[PositiveInt, ...] = Field((1,), min_length=1, description="Of a cell; a GPU each, if there are.")
    batch_per_process: bool = Field(False, description="batch_sizes are those of one process, not of the whole step.")
    settings: dict[str, Any] = Field(
        {},
        description="For every contender; warm_up and measured are numbers of steps. A contender's own go before.",
    )
    cold: int = Field(1, ge=0, description="Cells with empty caches.")
    limit_seconds: float = Field(300, gt=0, description="Wall time of a cell.")

    @model_validator(mode="after")
    def _whole_shares(self) -> Self:
        uneven = [(size, n) for size in self.batch_sizes for n in self.processes if size % n]
        if uneven and not self.batch_per_process:
            size, n = uneven[0]
            raise ValueError(f"batch_sizes: {size} samples are no whole share for each of {n} processes")
        return self


class Book(Entry):
    """The whole file."""

    workloads: dict[str, Workload]
    contenders: dict[str, Contender]
    suites: dict[str, tuple[Group, ...]]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contender on one piece of work: a row of the table."""

    suite: str
    workload: str | None
    contender: str
    batch_size: int
    """Samples of a step: the global batch."""
    processes: int
    work: str
    """What is compared with what: the piece of work."""
    work_of_one: str
    """The same on one process, which linear growth is counted from."""
    script: str | None
    settings: Mapping[str, Any]
    """For a contender's script."""
    recipe_settings: Mapping[str, Any]
    """For paceline."""
    limit_seconds: float

    @property
    def name(self) -> str:
        """Names the cell in files, in --only and in records."""
        return f"{self.work}/{self.contender}"


@dataclass(frozen=True)
class Turn:
    """A cell, to be run now."""

    cell: Cell
    cold: bool
    round: int


def read_book(path: Path = SUITES) -> Book:
    """The file, checked.

    Raises:
        ValidationError: a field is unknown or of the wrong type.
    """
    return Book.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def turns(book: Book, suite: str, rounds: int, only: str | None = None) -> Iterator[Turn]:
    """Everything to run, in order: piece of work by piece of work; cold cells first, then ``rounds`` warm ones.

    Numbers of processes take turns too: they are compared with one another.
    """
    for group in book.suites[suite]:
        for size in group.batch_sizes:
            every = (cell for number in group.processes for cell in _cells(book, suite, group, size, number))
            cells = [cell for cell in every if only is None or fnmatch(cell.name, f"*{only}*")]
            yield from (Turn(cell, True, number) for number in range(group.cold) for cell in cells)
            yield from (Turn(cell, False, number) for cell, number in in_turns(cells, rounds))


def _cells(book: Book, suite: str, group: Group, size: int, processes: int) -> Iterator[Cell]:
    batch_size = size * processes if group.batch_per_process else size
    work_of_one = f"{group.workload or 'device'}{f'/batch{size}' if size else ''}"
    sharing = "" if processes == 1 else f"{'x' if group.batch_per_process else 'on'}{processes}"
    for name in group.contenders:
        contender = book.contenders[name]
        settings = {"batch_size": batch_size, **group.settings, **contender.settings}
        yield Cell(
            suite=suite,
            workload=group.workload,
            contender=name,
            batch_size=batch_size,
            processes=processes,
            work=work_of_one + sharing,
            work_of_one=work_of_one,
            script=contender.script,
            settings=settings,
            recipe_settings=contender.set,
            limit_seconds=group.limit_seconds,
        )
