"""Curves of a run as files: a table of its steps, and its loss and metrics as SVG, with matplotlib as PDF and PNG."""

from __future__ import annotations

import csv
import importlib.util
import io
import re
from collections.abc import Callable
from pathlib import Path

from paceline.contract.files import write_atomically
from paceline.observe.collect import Collected
from paceline.report.charts import Series, line_chart
from paceline.report.curves import loss_and_metrics
from paceline.report.page import standalone

COLOURS = ("#2563a8", "#b3541e", "#3b7d3b", "#7a4f9a", "#8a6d1d", "#646c76")
"""Colours on paper, by the number of a series."""


def write_table(run: Collected, path: Path) -> Path:
    """Write ``metrics.csv``: a row for each step, with what was measured after it; what was not is empty.

    Raises:
        DiskFullError: no room.
    """
    names = run.started.group_names if run.started else ()
    rows: dict[int, dict[str, object]] = {}
    for step in run.steps:
        row: dict[str, object] = {"step": step.step, "epoch": step.epoch, "train_loss": step.loss}
        if step.correct is not None and step.counted:
            row["train_accuracy"] = step.correct / step.counted
        row["gradient_norm"] = step.gradient_norm
        for number, rate in enumerate(step.learning_rates):
            alone = len(step.learning_rates) == 1
            row["lr" if alone else f"lr_{names[number] if number < len(names) else number}"] = rate
        row |= {"samples": step.samples, "tokens": step.tokens, "seconds": step.seconds, "skipped": step.skipped}
        rows[step.step] = row
    for record in run.evaluations:
        row = rows.setdefault(record.step, {"step": record.step, "epoch": record.epoch})
        row |= {f"{record.split}_{name}": value for name, value in {"loss": record.loss, **record.metrics}.items()}
    text = io.StringIO()
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[step] for step in sorted(rows))
    write_atomically(path, text.getvalue().encode("utf-8", "backslashreplace"))
    return path


def write_figures(run: Collected, folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Write the loss and each metric over the steps; returns the files' paths.

    Args:
        say: takes the notice that PDF and PNG are left out.

    Raises:
        DiskFullError: no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    curves = {name: series for name, series in loss_and_metrics(run).items() if any(one.points for one in series)}
    written = []
    for name, series in curves.items():
        path = folder / f"{_file_name(name)}.svg"
        chart = str(line_chart(name, series))
        if chart:
            write_atomically(path, standalone(chart).encode("utf-8", "backslashreplace"))
            written.append(path)
    if importlib.util.find_spec("matplotlib") is None:
        say(f"{folder}: SVG alone; pip install matplotlib adds PDF and PNG")
        return written
    return written + [path for name, series in curves.items() for path in _by_matplotlib(name, series, folder)]


def _by_matplotlib(name: str, series: list[Series], folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for one in series:
        steps, values = zip(*one.points, strict=True) if one.points else ((), ())
        colour = COLOURS[one.colour % len(COLOURS)]
        style = {"alpha": 0.3} if one.look == "faint" else {"marker": "o"} if one.look == "dots" else {}
        axes.plot(steps, values, label=one.name, color=colour, **style)
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.legend()
    figure.tight_layout()
    paths = [folder / f"{_file_name(name)}.{kind}" for kind in ("pdf", "png")]
    for path in paths:
        figure.savefig(path, dpi=200)
    pyplot.close(figure)
    return paths


def _file_name(metric: str) -> str:
    """Return a metric's name as a file can have it: one of a user's own has a colon, and may have anything.

    The curve of accuracy is ``acc``, as the tutorials call it.
    """
    return "acc" if metric == "accuracy" else re.sub(r"[^\w.-]", "_", metric)
