"""Rows at the end of a run: where it was best, what was saved, its speed, memory and time."""

from __future__ import annotations

import shlex
from pathlib import Path

from paceline.contract.records import LossScaling, RunRecord
from paceline.observe.formats import amount, duration, figure, printable, rate, share, size, sizes

MOST_THRESHOLDS = 10
"""Labels whose thresholds are told; all are in summary.json and the report."""

Facts = list[tuple[str, str]]
"""Label and value; either may be empty."""


def near(folder: str) -> str:
    """Return a folder as a person in the current one would name it."""
    path, here = Path(folder), Path.cwd()
    return printable(str(path.relative_to(here)) if path.is_relative_to(here) and path != here else folder)


_SAVED = {"weights": "the trained weights", "ema": "the average of the weights (ema)"}


def _scaling(found: LossScaling) -> str:
    """Return where the loss scale was, and how many gradients vanished."""
    scales = " to ".join(dict.fromkeys(amount(scale) for scale in (found.lowest, found.highest)))
    zeros = "" if found.zero_share is None else f", {share(found.zero_share)} of the gradients 0"
    return f"loss scale {scales}{zeros}"


def summary_facts(record: RunRecord, *, has_report: bool) -> Facts:
    """Return label and value of each row."""
    skipped = record.steps - record.applied_steps
    rows = [
        ("steps", f"{record.steps:,} in {record.epochs:.3g} epochs" + (f", {skipped:,} skipped" if skipped else ""))
    ]
    if record.loss_scaling is not None:
        rows.append(("fp16", _scaling(record.loss_scaling)))
    if record.best_step is not None:
        other = record.saved_step is not None and record.saved_step != record.best_step
        saved = f"; saved is the model of step {record.saved_step:,}" if other else ""
        rows.append(("best", f"step {record.best_step:,}{saved}"))
    if record.final_scores:
        rows.append(("saved", _SAVED[record.saved]))
    for split, metrics in record.final.items():
        values = "  ".join(f"{printable(name)} {figure(value)}" for name, value in metrics.items())
        rows.append((printable(split), values))
    for split, scores in record.final_scores.items():
        for of, metrics in scores.items():
            if of != record.saved:
                values = "  ".join(f"{printable(name)} {figure(value)}" for name, value in metrics.items())
                rows.append(("not saved", f"{of}, {printable(split)}: {values}"))
    for split, metrics in record.baseline.items():
        values = "  ".join(f"{printable(name)} {figure(value)}" for name, value in metrics.items())
        rows.append(("baseline", f"{printable(split)}: {values}"))
    if record.thresholds:
        told = [f"{printable(label)} {threshold:.4g}" for label, threshold in record.thresholds.items()]
        more = f", and {len(told) - MOST_THRESHOLDS} more" if len(told) > MOST_THRESHOLDS else ""
        rows.append(("thresholds", f"{', '.join(told[:MOST_THRESHOLDS])}{more}"))
    speed = [f"{rate(record.samples_per_second)} samples/s"]
    if record.tokens_per_second != record.samples_per_second:
        speed += [f"{rate(record.tokens_per_second)} tokens/s", f"padding {share(record.padding_share)}"]
    rows.append(("speed", "  ".join(speed)))
    rows += _memory(record)
    total = record.seconds.get("total") or sum(record.seconds.values())
    phases = [(name, spent) for name, spent in record.seconds.items() if name != "total" and spent >= 0.005 * total]
    spent = ", ".join(f"{share(part / total)} {printable(name)}" for name, part in sorted(phases, key=lambda f: -f[1]))
    first = record.first_update_seconds
    whole = duration(total) + (f", {duration(first)} to the first update" if first is not None else "")
    rows.append(("time", f"{whole}: {spent}" if spent else whole))
    if record.execution:
        # the reasons are in the report
        taken = (f"{printable(stage)} {printable(what.partition(':')[0])}" for stage, what in record.execution.items())
        rows.append(("execution", ", ".join(taken)))
    rows += [
        ("folder", near(record.folder)),
    ]
    if has_report:
        rows.append(("report", f"{near(record.folder)}/report.html"))
    return [*rows, ("next", f"paceline predict {shlex.quote(near(record.folder))} INPUT -o labelled.csv")]


def _memory(record: RunRecord) -> Facts:
    """What the run took of its GPU, beside what was predicted."""
    found = record.memory
    if found is None:
        return [] if record.peak_bytes is None else [("memory", f"{size(record.peak_bytes)} at the peak")]
    if found.plan is None:
        peak, reserved, total = sizes(found.allocated, found.reserved, found.total)
        taken = ("memory", f"{peak} at the peak, {reserved} reserved, {total} on the GPU")
        return [taken, *([("", f"not predicted: {printable(found.problem)}")] if found.problem else [])]
    plan = found.plan
    peak, foretold, reserved, total, whole = sizes(
        found.allocated, plan.allocated, found.reserved, found.total, plan.total
    )
    beside = f"{peak} at the peak (predicted {foretold}), {reserved} reserved, {total} on the GPU (predicted {whole})"
    return [("memory", beside)]
