"""The verdict: what a step is bound by, why, and the switch that wins it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.observe.formats import moment
from paceline.tracing.bounds import EVERY, Found, little_use_of_the_gpu
from paceline.tracing.budgets import Budgets
from paceline.tracing.case import WORTH, Case, Switch
from paceline.tracing.cut import BACKWARD, FORWARD
from paceline.tracing.kinds import COPY, KINDS, OPTIMIZER, POINTWISE
from paceline.tracing.places import UPDATE
from paceline.tracing.window import Window

NOTICED = 0.03
"""Share of a step that a switch must be predicted to win back: less is not told from chance by two windows."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a traced window says of its run. Shares are of a step as it is in the run."""

    bound: str | None
    """input, launch, memory bandwidth, compute, communication, padding, recompiles or straggler; None: nothing."""
    told: str
    """What is the matter, in a few words."""
    lost: float
    """The share that the bound takes."""
    switch: Switch | None
    """The setting that wins it back; None where none does."""
    gain: float
    """The share that the switch is predicted to win back; 0 without one."""
    evidence: tuple[str, ...]
    advice: str
    """What to look at where no switch helps, or beside it."""
    rank: int | None
    """Whom the others wait for; None unless the bound is a straggler."""
    others: tuple[tuple[str, float], ...]
    """Other bounds and the shares that they take, the largest first."""
    step_seconds: float
    """Seconds of a mean step in the window."""
    added_seconds: float
    """The part of it that only the window has: it launches kernels one by one that the run replays."""
    mfu: float | None
    """Floating-point operations of the model beside the device's peak; None where either is not known."""
    roofline: float | None
    """Share of a step for which the device would be busy if its matrix products ran at its peak and all that only reads
    and writes memory took what it takes now: what is left to win without another model or GPU is the rest."""
    kinds: tuple[tuple[str, float], ...]
    """Seconds of a step by kind of kernel, or of operator on a CPU, the largest first."""


def verdict(window: Window, budgets: Budgets) -> Verdict:
    """The bound of a window's steps, or that there is none."""
    case = Case(window, budgets)
    every = sorted(filter(None, (bound(case) for bound in EVERY)), key=lambda found: -found.lost)
    worth = [found for found in every if found.lost >= (WORTH * case.seconds if found.bound != "straggler" else 0.0)]
    if not worth and (found := little_use_of_the_gpu(case)):
        worth = [found]
    return _verdict(case, worth)


def _verdict(case: Case, worth: Sequence[Found]) -> Verdict:
    flops, peak, seconds = case.flops(), case.facts.peak_flops, case.seconds
    found = worth[0] if worth else None
    switch = found.switch if found and found.won >= NOTICED * seconds else None
    moved = case.kind(POINTWISE, OPTIMIZER, COPY)
    kinds = {kind: case.kind(kind) for kind in KINDS}
    return Verdict(
        bound=found.bound if found else None,
        told=found.told if found else _fine(case),
        lost=found.lost / seconds if found else 0.0,
        switch=switch,
        gain=found.won / seconds if found and switch else 0.0,
        evidence=found.evidence if found else (),
        advice=found.advice if found else "",
        rank=found.rank if found else None,
        others=tuple((other.bound, other.lost / seconds) for other in worth[1:]),
        step_seconds=case.traced_seconds,
        added_seconds=case.added,
        mfu=flops / (peak * seconds) if flops and peak else None,
        roofline=(flops / peak + moved) / seconds if flops and peak and case.facts.on_gpu else None,
        kinds=tuple(sorted(((kind, spent) for kind, spent in kinds.items() if spent > 0), key=lambda pair: -pair[1])),
    )


def _fine(case: Case) -> str:
    if not case.facts.on_gpu:
        passes = sum(case.category(name) for name in (FORWARD, BACKWARD, UPDATE))
        return f"forward, backward and update take {passes / case.seconds:.0%} of the {moment(case.seconds)} of a step"
    busy = sum(case.category(name) for name in (FORWARD, BACKWARD, UPDATE))
    return f"the GPU computes {busy / case.seconds:.0%} of the {moment(case.seconds)} of a step"
