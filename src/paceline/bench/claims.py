"""What the acceleration tutorials claim, beside what was measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.bench.standings import Standing


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One rung over another, and between which factors the claim holds."""

    text: str
    rungs: tuple[str, ...]
    """The first of them that was measured is taken."""
    beside: tuple[str, ...]
    low: float
    high: float
    of: str = "rate"
    """``rate``: steady samples a second. ``whole``: how many times as fast the whole job is."""


CLAIMS = (
    Claim(
        text="Lightning's Trainer brings no speed by itself",
        rungs=("lightning",),
        beside=("plain_dynamic",),
        low=0.9,
        high=1.1,
    ),
    Claim(
        text="mixed precision trains 3 times as fast",
        rungs=("lightning_fp16", "lightning_bf16"),
        beside=("lightning",),
        low=2.5,
        high=float("inf"),
    ),
    Claim(
        text="torch.compile brings little on top, or nothing",
        rungs=("lightning_compile",),
        beside=("lightning_bf16", "lightning_fp16"),
        low=0.0,
        high=1.15,
    ),
    Claim(
        text="from 22.63 to 3.15 minutes: 7 times as fast, by mixed precision and 4 GPUs",
        rungs=("deepspeed_2", "ddp"),
        beside=("plain",),
        low=6.0,
        high=float("inf"),
        of="whole",
    ),
    Claim(
        text="an SVM on features is the quickest way",
        rungs=("features_svm",),
        beside=("plain_dynamic", "plain"),
        low=1.0,
        high=float("inf"),
        of="whole",
    ),
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
