"""Verdicts and budgets in words, for a console."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.observe.formats import moment, printable
from paceline.tracing.budgets import Budgets
from paceline.tracing.cut import CATEGORIES
from paceline.tracing.judge import Verdict

BAR = 32
"""Characters of a whole step."""

LEAST = 5e-6
"""Seconds of a step below which a category is left out."""

_EIGHTHS = " ▏▎▍▌▋▊▉"
_MOST_RANKS, _LONGEST_NAME, _NUM_TOP = 4, 64, 3


def told(verdict: Verdict, budgets: Budgets) -> str:
    """The verdict and what it rests on, in at most 25 lines of 100 characters."""
    return "\n".join([*sentences(verdict), "", *_table(budgets), *figures(verdict, budgets)])


def sentences(verdict: Verdict) -> list[str]:
    """What is the matter, the evidence, and what to do; the first line says it all."""
    if verdict.bound is None:
        lines = [f"no bottleneck: {verdict.told}"]
    else:
        lines = [f"bound by {verdict.bound}: {verdict.told} ({verdict.lost:.0%})"]
    lines += [f"  {line}" for line in verdict.evidence]
    if verdict.switch:
        seconds = verdict.gain * (verdict.step_seconds - verdict.added_seconds)
        won = f"predicted to win back {moment(seconds)} of a step, {verdict.gain:.0%}"
        lines.append(f"  --set {verdict.switch.text} is {won}")
    if verdict.advice:
        lines.append(f"  {'also' if verdict.switch else 'no setting wins it back'}: {verdict.advice}")
    if verdict.others:
        lines.append("  then: " + ", ".join(f"{bound} {share:.0%}" for bound, share in verdict.others))
    return [printable(line) for line in lines]


def _table(budgets: Budgets) -> Iterator[str]:
    """A line a category, a column a rank; the bar is of the rank that takes longest for its own work."""
    means = {rank: budgets.mean(rank) for rank in budgets.ranks}
    shown, drawn = shown_ranks(budgets, _MOST_RANKS), budgets.slowest
    first, last = budgets.settled[0], budgets.settled[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}, a mean one"
    heading = "".join(f"{f'rank {rank}':>11}" for rank in shown) if len(budgets.ranks) > 1 else f"{'':>11}"
    yield f"{steps:<28}{heading}".rstrip()
    walls = {rank: sum(means[rank].values()) for rank in shown}
    for name in CATEGORIES:
        if all(means[rank][name] < LEAST for rank in shown):
            continue
        cells = "".join(f"{moment(means[rank][name]):>11}" for rank in shown)
        share = means[drawn][name] / walls[drawn]
        yield f"  {name:<26}{cells} {share:5.0%}  {_bar(share)}".rstrip()
    yield f"  {'a step':<26}" + "".join(f"{moment(walls[rank]):>11}" for rank in shown)


def shown_ranks(budgets: Budgets, most: int) -> list[int]:
    """All of them, or the slowest and the fastest one: who takes longest for its own work, and who waits longest."""
    if len(budgets.ranks) <= most:
        return list(budgets.ranks)
    ordered = sorted(budgets.ranks, key=lambda rank: -budgets.own_seconds(rank))
    return sorted([*ordered[: most - 1], ordered[-1]])


def _bar(share: float) -> str:
    eighths = round(share * BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def figures(verdict: Verdict, budgets: Budgets) -> Iterator[str]:
    """Shares of the peak, kinds of kernels and the longest of them, a line each."""
    if verdict.added_seconds > 0:
        added = moment(verdict.added_seconds)
        yield f"{added} of the host gap are the window's own: the run replays graphs (trace.graph: keep traces those)"
    if verdict.mfu is not None:
        at = "" if verdict.roofline is None else f"; {verdict.roofline:.0%} of a step at the GPU's roofline"
        yield f"{verdict.mfu:.0%} of the peak's floating-point operations (MFU){at}"
    whole = sum(seconds for _, seconds in verdict.kinds)
    if whole:
        kinds = ", ".join(
            f"{kind} {seconds / whole:.0%}" for kind, seconds in verdict.kinds if seconds >= 0.005 * whole
        )
        yield f"by kind: {kinds}"
    spent = sum(top.seconds for top in budgets.top)
    for top in budgets.top[:_NUM_TOP]:
        name = printable(top.name)
        shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        yield f"  {moment(top.seconds / len(budgets.steps)):>9} {top.seconds / spent:4.0%}  {shown}"


def measured_gain(before: Budgets, after: Budgets) -> float:
    """The share of a step that a change has won back; negative where it has cost something."""
    return 1 - after.step_seconds / before.step_seconds


def compared(before: Budgets, after: Budgets, verdict: Verdict) -> str:
    """What a switch has won, beside what was predicted of it."""
    gain = measured_gain(before, after)
    switch = verdict.switch.text if verdict.switch else "the change"
    walls = f"a step took {moment(before.step_seconds)} and takes {moment(after.step_seconds)}"
    won = f"{gain:.0%} won back" if gain >= 0 else f"{-gain:.0%} slower"
    lines = [f"with {switch} {walls}: {won}; predicted were {verdict.gain:.0%}"]
    first, now = (budgets.mean(budgets.slowest) for budgets in (before, after))
    changes = sorted(CATEGORIES, key=lambda name: -abs(now[name] - first[name]))[:_NUM_TOP]
    lines += [f"  {name:<26}{moment(first[name]):>11} -> {moment(now[name])}" for name in changes]
    return "\n".join(lines)
