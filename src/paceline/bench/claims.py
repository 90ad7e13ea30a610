"""What the acceleration tutorials claim, beside what was measured here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.standings import Standing


@dataclass(frozen=True)
class Claim:
    """One rung over another, and between which factors the claim holds."""

    text: str
    rungs: tuple[str, ...]
    """The first of them that was measured is taken."""
    beside: tuple[str, ...]
    low: float = 0.0
    high: float = math.inf
    of: str = "rate"
    """``rate``: steady samples a second. ``whole``: how many times as fast the whole job is."""


CLAIMS = (
    Claim("Lightning's Trainer brings no speed by itself", ("lightning",), ("plain_dynamic",), 0.9, 1.1),
    Claim("mixed precision trains 3 times as fast", ("lightning_fp16", "lightning_bf16"), ("lightning",), 2.5),
    Claim(
        "torch.compile brings little on top, or nothing",
        ("lightning_compile",),
        ("lightning_bf16", "lightning_fp16"),
        high=1.15,
    ),
    Claim(
        "from 22.63 to 3.15 minutes: 7 times as fast, by mixed precision and 4 GPUs",
        ("deepspeed_2", "ddp"),
        ("plain",),
        6.0,
        of="whole",
    ),
    Claim("an SVM on features is the quickest way", ("features_svm",), ("plain_dynamic", "plain"), 1.0, of="whole"),
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A row: what is claimed, what was found, and whether it holds here."""

    claim: str
    measured: str
    verdict: str
    """``holds here``, ``not here`` or ``not measured``."""


def answers(rows: Sequence[Standing], claims: Sequence[Claim] = CLAIMS) -> list[Answer]:
    """Every claim, beside the rows' medians."""
    by_name = {row.rung.name: row for row in rows}
    return [_answer(claim, by_name) for claim in claims]


def _answer(claim: Claim, rows: Mapping[str, Standing]) -> Answer:
    mine, theirs = _figure(claim, claim.rungs, rows), _figure(claim, claim.beside, rows)
    if mine is None or theirs is None:
        missing = claim.rungs if mine is None else claim.beside
        return Answer(claim=claim.text, measured=f"needs the rung {missing[0]}", verdict="not measured")
    ratio = mine[1] / theirs[1] if claim.of == "rate" else theirs[1] / mine[1]
    verdict = "holds here" if claim.low <= ratio <= claim.high else "not here"
    return Answer(claim=claim.text, measured=f"{mine[0]} {ratio:.2f} x {theirs[0]}", verdict=verdict)


def _figure(claim: Claim, names: Sequence[str], rows: Mapping[str, Standing]) -> tuple[str, float] | None:
    for name in names:
        row = rows.get(name)
        found = None if row is None else row.rate if claim.of == "rate" else row.warm or row.whole
        if found is not None:
            return name, found.median
    return None
