"""Which curves a run has: loss, metrics, learning rate, gradient norm and speed over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from paceline.observe.collect import Collected
from paceline.observe.formats import amount, learning_rates, rate, share
from paceline.report.charts import Point, Series, line_chart

TRAIN, VALIDATION, TEST = 0, 1, 2
COLOURS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
COLOURS |= {"validation, ema": VALIDATION, "validation, weights": 4, "test, ema": TEST, "test, weights": 5}
TITLES = {"auroc": "AUROC", "mse": "MSE", "mae": "MAE", "rmse": "RMSE"}
LARGEST_NUM_METRICS = 12
LARGEST_NUM_GROUPS = 6
LARGEST_NUM_EPOCH_MARKS = 24


def curves(run: Collected) -> list[Markup]:
    """The charts that have something to show."""
    epoch = run.started.steps_per_epoch if run.started else 0
    steps = [*(record.step for record in run.steps), *(record.step for record in run.evaluations)]
    first, last = min(steps, default=0), max(steps, default=0)
    ends = range(epoch, last, epoch) if epoch and last / epoch <= LARGEST_NUM_EPOCH_MARKS else range(0)
    chart = partial(line_chart, span=(float(first), float(last)), marks=[float(step) for step in ends])
    charts = [
        chart("Loss", _loss(run)),
        *(chart(TITLES.get(name, name), _metric(run, name)) for name in _metric_names(run)),
        chart("Learning rate", _learning_rates(run), write=lambda value: learning_rates((value,))),
        chart("Gradient norm", _smoothed(run, "gradient norm", "gradient_norm", 3)),
        chart("Loss scale", _of_fp16(run, "loss_scale", 4), from_zero=True, write=amount),
        chart("Gradients that are 0", _of_fp16(run, "zero_share", 5), from_zero=True, write=share),
        chart("Samples a second", _speed(run), from_zero=True, write=rate),
    ]
    return [chart for chart in charts if chart]


def loss_and_metrics(run: Collected) -> dict[str, list[Series]]:
    """Return the curves of the loss and of each metric over the steps, by name."""
    return {"loss": _loss(run), **{name: _metric(run, name) for name in _metric_names(run)}}


def smooth(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred mean over ``window`` values (fewer at the ends), of those that are finite; shape [n] in and out."""
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    at = np.arange(len(values))
    low, high = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    num = counts[high] - counts[low]
    return np.where(num > 0, (sums[high] - sums[low]) / np.maximum(num, 1), np.nan)


def _window(num_steps: int) -> int:
    return max(1, num_steps // 40)


def _smoothed(run: Collected, name: str, field: str, colour: int) -> list[Series]:
    """A step's field as it is, faintly, and smoothed."""
    steps = [record.step for record in run.steps]
    raw = np.array([getattr(record, field) for record in run.steps], dtype=np.float64)
    if _window(len(raw)) == 1:
        return [Series(name=name, points=_points(steps, raw), colour=colour)]
    return [
        Series(name=f"{name}, each step", points=_points(steps, raw), look="faint", colour=colour),
        Series(name=name, points=_points(steps, smooth(raw, _window(len(raw)))), colour=colour),
    ]


def _loss(run: Collected) -> list[Series]:
    series = _smoothed(run, "train", "loss", TRAIN)
    return series + [
        Series(name=split, points=points, look="dots", colour=COLOURS.get(split, 4))
        for split, points in _evaluated(run, "loss").items()
    ]


def _metric_names(run: Collected) -> list[str]:
    names = [name for record in run.evaluations for name in record.metrics]
    return [name for name in dict.fromkeys(names) if name != "loss"][:LARGEST_NUM_METRICS]


def _metric(run: Collected, name: str) -> list[Series]:
    series = [
        Series(name=split, points=points, look="dots", colour=COLOURS.get(split, 4))
        for split, points in _evaluated(run, name).items()
    ]
    train = [
        (float(record.step), record.train_metrics[name]) for record in run.evaluations if name in record.train_metrics
    ]
    return [Series(name="train", points=sorted(train), look="dots", colour=TRAIN)] * bool(train) + series


def _evaluated(run: Collected, name: str) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for record in sorted(run.evaluations, key=lambda record: record.step):
        counted = {record.split: {**record.metrics, "loss": record.loss}}
        both = {f"{record.split}, {of}": scores for of, scores in record.scores.items()}
        for series, scores in (both or counted).items():
            found.setdefault(series, []).append((float(record.step), scores.get(name, math.nan)))
    return found


def _learning_rates(run: Collected) -> list[Series]:
    num_groups = max((len(record.learning_rates) for record in run.steps), default=0)
    names = run.started.group_names if run.started else ()
    series: dict[tuple[float, ...], Series] = {}
    for group in range(min(num_groups, LARGEST_NUM_GROUPS)):
        values = tuple(record.learning_rates[group] for record in run.steps if group < len(record.learning_rates))
        name = names[group] if group < len(names) else f"group {group}"
        if values in series:
            # the same curve: weights with and without decay, for example
            name = f"{series[values].name}, {name}"
        points = [(float(record.step), value) for record, value in zip(run.steps, values, strict=False)]
        colour = series[values].colour if values in series else len(series)
        series[values] = Series(name=name, points=points, colour=colour)
    return list(series.values())


def _of_fp16(run: Collected, field: str, colour: int) -> list[Series]:
    """What loss scaling tells of each step; gaps where a step was skipped, whose gradients tell nothing."""
    told = [(float(step.step), getattr(step, field), step.skipped) for step in run.steps]
    points = [
        (at, math.nan if skipped and field == "zero_share" else value)
        for at, value, skipped in told
        if value is not None
    ]
    return [Series(name="each step", points=points, colour=colour)] if points else []


def _speed(run: Collected) -> list[Series]:
    steps = run.steps[1:]  # the first one compiles and allocates
    seconds = np.array([record.seconds for record in steps], dtype=np.float64)
    samples = np.array([record.samples for record in steps], dtype=np.float64)
    window = max(5, _window(len(steps)))
    spent = smooth(seconds, window)
    speed = np.divide(smooth(samples, window), spent, out=np.full(len(steps), np.nan), where=spent > 0)
    return [Series(name="samples a second", points=_points([record.step for record in steps], speed), colour=TRAIN)]


def _points(steps: Sequence[int], values: NDArray[np.float64]) -> list[Point]:
    return [(float(step), float(value)) for step, value in zip(steps, values, strict=True)]
