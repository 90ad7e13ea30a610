"""How figures and other people's text are written, alike on the console and in the report."""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence


def printable(text: str) -> str:
    """``text`` on one line with everything a terminal or a page could act on made visible.

    Escape sequences, line breaks, direction overrides, lone surrogates and unassigned characters become ``\\x1b``,
    ``\\n``, ``\\u202e`` and so on; letters of any script, punctuation and spaces stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or unicodedata.category(one) == "Zs" else one.encode("unicode_escape").decode("ascii")
        for one in text
    )


def duration(seconds: float) -> str:
    """Seconds for people: ``0.42 s``, ``38.2 s``, ``3 min 20 s``, ``1 h 02 min``, ``2 d 03 h``."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def moment(seconds: float) -> str:
    """Seconds of a step's parts, for people: ``0.84 ms``, ``12.3 ms``, ``208 ms``, ``2.31 s``."""
    if not math.isfinite(seconds):
        return "?"
    if abs(seconds) >= 0.9995:
        return duration(seconds)
    thousandths = 1e3 * seconds
    digits = 2 if abs(thousandths) < 9.995 else 1 if abs(thousandths) < 99.95 else 0
    return f"{thousandths:.{digits}f} ms"


def size(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves at least one of it: ``3.21 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            # three digits of 1,010 would be an exponent
            whole = unit == "B" or abs(num_bytes) >= 999.5
            return f"{num_bytes:.0f} {unit}" if whole else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def sizes(*nums_bytes: float) -> list[str]:
    """``size`` of each, for one sentence: without the unit where it is the last one named: ``8.2 GiB``, ``19.3``."""
    found, named = [], ""
    for number, unit in (size(num_bytes).split(" ") for num_bytes in nums_bytes):
        found.append(number if unit == named else f"{number} {unit}")
        named = unit
    return found


def amount(number: float) -> str:
    """A large count with three digits: ``812``, ``66.9 M``, ``1.24 B``."""
    for unit in ("", " k", " M", " B"):
        # 999.5 would be rounded to four digits
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} T"


def rate(per_second: float) -> str:
    """Samples or tokens a second: ``3.2``, ``412``, ``98,311``."""
    if not math.isfinite(per_second):
        return "?"
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def figure(value: float) -> str:
    """A loss or a metric: four decimals, scientific where those would say nothing, ``NaN`` as such."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.3e}"


def learning_rates(values: tuple[float, ...]) -> str:
    """The groups' learning rates, each different one once: ``5.00e-05/1.00e-03``."""
    different = list(dict.fromkeys(f"{value:.2e}" if value else "0" for value in values))
    return "/".join(different) if len(different) <= 3 else f"{min(values):.2e}..{max(values):.2e}"


def share(part: float) -> str:
    """A share of one in percent: ``12.3%``."""
    return f"{100 * part:.1f}%" if math.isfinite(part) else "?"


def difference(value: float, reference: float) -> str:
    """By how much of ``reference`` the value is larger, in percent: ``+1.2%``, ``-0.3%``."""
    return f"{value / reference - 1:+.1%}" if reference else "?"


def columns(rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> Iterator[str]:
    """Cells below one another, two blanks between: those of the columns ``left`` begin alike, figures end alike.

    A row may have fewer cells than others.
    """
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in itertools.zip_longest(*rows, fillvalue="")]
    for row in rows:
        cells = (cell.ljust(widths[at]) if at in left else cell.rjust(widths[at]) for at, cell in enumerate(row))
        yield "  ".join(cells).rstrip()
