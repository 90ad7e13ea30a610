"""What the acceleration tutorials claim, beside what was measured here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.standings import Standing


@dataclass(frozen=True)
class Claim:
    """One rung over another, and between which factors the claim holds: those that its text says."""

    text: str
    rungs: tuple[str, ...]
    """The first of them that was measured is taken."""
    beside: tuple[str, ...] = ()
    """Likewise; empty: the fastest of all other rungs."""
    low: float = 0.0
    high: float = math.inf
    """Bounds of the factor as it is printed, with two decimals."""
    of: str = "rate"
    """``rate``: steady samples a second. ``whole``: how many times as fast the whole job is."""


CLAIMS = (
    Claim("Lightning's Trainer brings no speed by itself (within 10 %)", ("lightning",), ("plain_dynamic",), 0.9, 1.1),
    Claim("mixed precision trains 3 times as fast", ("lightning_fp16", "lightning_bf16"), ("lightning",), 3.0),
    Claim(
        "torch.compile brings little on top (at most 15 %), or nothing",
        ("lightning_compile",),
        ("lightning_bf16", "lightning_fp16"),
        high=1.15,
    ),
    Claim(
        "from 22.63 to 3.15 minutes: 7 times as fast, by mixed precision and 4 GPUs",
        ("deepspeed_2", "ddp"),
        ("plain",),
        7.0,
        of="whole",
    ),
    Claim("an SVM on features is the quickest way", ("features_svm",), low=1.0, of="whole"),
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
    measured = {name: row for name, row in rows.items() if (row.rate if claim.of == "rate" else row.whole)}
    mine = next((measured[name] for name in claim.rungs if name in measured), None)
    others = [measured[name] for name in claim.beside or measured if name in measured and name not in claim.rungs]
    if mine is None or not others:
        missing = claim.rungs if mine is None else claim.beside or ("plain",)
        return Answer(claim=claim.text, measured=f"needs the rung {missing[0]}", verdict="not measured")
    factors = [(factor, row) for row in others if (factor := _factor(claim, mine, row)) is not None]
    if not factors:
        needs = f"needs cells of {mine.rung.name} and {others[0].rung.name} with the same caches"
        return Answer(claim=claim.text, measured=needs, verdict="not measured")
    factor, other = factors[0] if claim.beside else min(factors, key=lambda pair: pair[0])
    is_so = claim.low <= round(factor, 2) <= claim.high
    strange = [row.rung.name for row in (mine, other) if row.verdict == "different"]
    aside = f" ({' and '.join(strange)} learned something else)" if strange else ""
    return Answer(
        claim=claim.text,
        measured=f"{mine.rung.name} {factor:.2f} x {other.rung.name}{aside}",
        verdict="holds here" if is_so else "not here",
    )


def _factor(claim: Claim, mine: Standing, theirs: Standing) -> float | None:
    """How many times as fast; None where one was only measured with empty caches and the other with full ones."""
    if claim.of == "rate":
        return mine.rate.median / theirs.rate.median if mine.rate and theirs.rate else None
    for one, other in ((mine.warm, theirs.warm), (mine.cold, theirs.cold)):
        if one and other:
            return other.median / one.median
    return None
