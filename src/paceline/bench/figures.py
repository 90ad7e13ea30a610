"""The charts as files: SVG by ourselves, PNG and PDF by matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.ladder import Ladder
from paceline.bench.page import charts
from paceline.bench.standings import Standing
from paceline.contract.files import write_atomically
from paceline.report.page import standalone

NAMES = {"rate": "rate", "whole": "whole_job", "quality": "time_against_quality", "memory": "memory"}


def write_figures(ladder: Ladder, folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Every chart that has a value; the files' paths.

    Args:
        say: told where PNG and PDF are left out.
    """
    written = []
    for name, chart in charts(ladder.rows).items():
        path = folder / f"{NAMES[name]}.svg"
        write_atomically(path, standalone(str(chart)).encode("utf-8", "backslashreplace"))
        written.append(path)
    if importlib.util.find_spec("matplotlib") is None:
        say(f"{folder}: SVG alone; pip install matplotlib adds PNG and PDF")
        return written
    return written + _by_matplotlib(ladder.rows, folder)


def _by_matplotlib(rows: Sequence[Standing], folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [row for row in rows if row.whole]
    written = []
    for name, values, words in (
        ("rate", [(row, row.rate.median) for row in measured if row.rate], "samples a second"),
        ("whole_job", [(row, row.whole.median) for row in measured if row.whole], "seconds of the whole job"),
    ):
        if not values:
            continue
        picture, axes = pyplot.subplots(figsize=(8, 1 + 0.3 * len(values)))
        bars: Any = axes.barh([row.rung.name for row, _ in values], [value for _, value in values])
        for bar, (row, _) in zip(bars, values, strict=True):
            bar.set_color("#2563a8" if row.rung.contender == "paceline" else "#646c76")
        axes.invert_yaxis()
        axes.set_xlabel(words)
        picture.tight_layout()
        for kind in ("png", "pdf"):
            path = folder / f"{name}.{kind}"
            picture.savefig(path, dpi=200)
            written.append(path)
        pyplot.close(picture)
    return written
