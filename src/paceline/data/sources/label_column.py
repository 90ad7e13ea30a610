"""A column of labels as a whole, before it is known which task it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

from paceline.contract.errors import excerpt
from paceline.data.sources.cells import Cell, WrittenList, label_name
from paceline.data.sources.notation import MISSING, Numbers, read_numbers

Labels = list[str] | list[float] | list[tuple[str, ...]]

_MOSTLY = 0.9
"""When this share of a text column's labels are numbers, the others are taken for mistakes."""

_LIST = "a list"


@dataclass(frozen=True)
class LabelProblem:
    """A row whose label does not fit the column."""

    index: int
    problem: str
    found: str
    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Interpreted:
    """A label column as a whole; ``labels`` has an entry for every row, to be ignored where there is a problem."""

    kind: str
    """Name of the task."""
    labels: Labels
    problems: tuple[LabelProblem, ...] = ()
    notices: tuple[str, ...] = field(default=())
    num_places: int = 0
    """Length of the lists, where they are read by place and the places have no names."""


@final
class LabelColumn:
    """The cells of all rows.

    Args:
        cells: one for each row; not empty.
        name: of the column, for messages.
        file: where it is, for messages.
        places: names of the classes by place, of lists of 0 and 1.
        point: what stands before the decimals of numbers: ``.``, ``,`` or ``auto``.
    """

    def __init__(
        self, cells: Sequence[Cell], name: str, file: str = "", *, places: Sequence[str] = (), point: str = "auto"
    ) -> None:
        self.cells, self.name, self.file, self.places, self.point = cells, name, file, places, point

    @cached_property
    def family(self) -> str:
        """What most cells hold, in words; lists that are written as text count as text where most are no lists."""
        families = Counter(map(_family, self.cells))
        if families.most_common(1)[0][0] == _LIST:
            return _LIST
        written = sum(isinstance(cell, WrittenList) for cell in self.cells)
        families["text"] += written
        families[_LIST] -= written
        return families.most_common(1)[0][0]

    @property
    def holds_lists(self) -> bool:
        """Whether most cells are lists."""
        return self.family == _LIST

    @cached_property
    def plain(self) -> list[Cell]:
        """The cells of a column that holds no lists."""
        return [cell.text if isinstance(cell, WrittenList) else cell for cell in self.cells]

    @cached_property
    def names(self) -> list[str]:
        """Each cell of such a column as the name of a class."""
        return [_spelled(cell) for cell in self.plain]

    @cached_property
    def distinct(self) -> Counter[str]:
        """Rows by name."""
        return Counter(self.names)

    @cached_property
    def numbers(self) -> Numbers:
        """The names that are numbers."""
        return read_numbers(self.distinct, self.point)

    def are_mostly(self, names: Collection[str]) -> bool:
        """Whether nearly all rows that have a value have one of these names."""
        rows = self.distinct.items()
        missing = sum(count for name, count in rows if name.casefold() in MISSING and name not in names)
        return sum(self.distinct[name] for name in names) >= _MOSTLY * (self.distinct.total() - missing)

    def guessed(self, kind: str, why: str) -> str:
        """The notice that ``auto`` chose a task."""
        return f"task: {kind} (guessed from label column {self.name!r}: {why}; --set task.type=... to change)"

    def mixed(self) -> list[LabelProblem]:
        """Rows whose cell is of another family than most."""
        cells = self.cells if self.holds_lists else self.plain
        usual = excerpt(_spelled(next(cell for cell in cells if _family(cell) == self.family)))
        return [
            LabelProblem(index, "the label is empty", "nan", "every row needs a label", "fill it in, or remove the row")
            if cell != cell  # pandas' NaN, for a cell without a value
            else LabelProblem(
                index,
                "mixed label types",
                _spelled(cell),
                f"most labels here are {self.family}, this one is {family}",
                f"write it as the others ({usual}, for example), or put all of them in quotes",
            )
            for index, cell in enumerate(cells)
            if (family := _family(cell)) != self.family
        ]


def not_finite(index: int, name: str) -> LabelProblem:
    """The problem of a row whose label is NaN or infinite."""
    return LabelProblem(
        index,
        "the label is not a finite number",
        name,
        "a loss with it would be NaN, and so would every weight after the first update",
        "fill in the number or remove the row (--set data.on_bad_row=skip drops and counts such rows)",
    )


def _family(cell: Cell) -> str:
    if isinstance(cell, str):
        return "text"
    if isinstance(cell, tuple | WrittenList):
        return _LIST
    return "true or false" if isinstance(cell, bool) else "numbers"


def _spelled(cell: Cell) -> str:
    return str(cell) if isinstance(cell, tuple | WrittenList) else label_name(cell)
