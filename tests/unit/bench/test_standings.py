"""Figures of a rung, and whether it learned what the first rung learned."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from paceline.bench.claims import Claim, answers
from paceline.bench.rungs import TEXT, Rung
from paceline.bench.standings import Standing, pieces, standings

FIRST = Rung(name="first", contender="x", change="")
OTHER = Rung(name="other", contender="x", change="")
ROWS = 1000


def curve(start: float = 2.0, noise: float = 0.02, steps: int = 80) -> list[float]:
    return [start * math.exp(-step / 60) + noise * (-1) ** step for step in range(steps)]


def record(rung: Rung, seed: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "rung": rung.name,
        "repeat": seed,
        "seed": seed,
        "status": "ok",
        "cold": seed == 0,
        "losses": curve(),
        "quality": 0.8,
        "samples_per_second": 100.0,
        "whole_seconds": 10.0,
        "stages": {"train": 5.0},
        **fields,
    }


def verdict(*others: dict[str, Any], first: list[dict[str, Any]] | None = None, rung: Rung = OTHER) -> Standing:
    firsts = first if first is not None else [record(FIRST, seed, losses=curve(2 + 0.01 * seed)) for seed in range(3)]
    return standings([FIRST, rung], [*firsts, *others], {}, ROWS)[1]


def test_the_same_losses_and_quality_are_the_same_and_the_fastest_is_named() -> None:
    cells = [record(OTHER, seed, losses=curve(2.005 + 0.01 * seed), samples_per_second=200.0) for seed in (0, 1)]
    row = verdict(*cells)
    assert (row.verdict, row.is_best, row.n) == ("same", True, 2)
    assert row.rate is not None
    assert row.rate.median == 200


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"losses": curve(2.6)}, "loss +0.5"),
        ({"losses": curve(1.6)}, "loss -0.3"),
        ({"losses": [*curve()[:70], *[float("nan")] * 10]}, "piece 8 of 8"),
        ({"quality": 0.6}, "quality -20.0%"),
        ({"quality": 0.95}, "quality +15.0%"),
        ({"quality": math.nan}, "its quality is NaN"),
    ],
)
def test_what_learns_something_else_is_flagged_and_never_crowned(fields: dict[str, Any], told: str) -> None:
    row = verdict(record(OTHER, samples_per_second=900.0, **fields))
    assert row.verdict == "different"
    assert told in row.told
    assert not row.is_best


def test_a_cell_that_failed_beside_others_is_told() -> None:
    row = verdict(
        record(OTHER), record(OTHER, 1), {"rung": "other", "repeat": 2, "status": "failed", "why": "no model"}
    )
    assert (row.state, row.n) == ("measured", 2)
    assert row.why == "1 of 3 cells failed: no model"


def test_seeds_that_scatter_widen_the_band() -> None:
    scattered = [record(FIRST, seed, quality=quality) for seed, quality in enumerate((0.7, 0.8, 0.9))]
    assert verdict(record(OTHER, 1, quality=0.6), first=scattered).verdict == "same"
    assert verdict(record(OTHER, 1, quality=0.6)).verdict == "different"


def test_one_cell_has_no_spread_and_a_wide_band() -> None:
    one = [record(FIRST)]
    assert verdict(record(OTHER, quality=0.76), first=one).verdict == "same"
    assert verdict(record(OTHER, quality=0.7), first=one).verdict == "different"


def test_an_order_of_its_own_is_held_to_its_end_alone() -> None:
    losses = [2.5] * 10 + curve()[10:]
    assert verdict(record(OTHER, losses=losses)).verdict == "different"
    own = replace(OTHER, own_order=True)
    assert verdict(record(own, losses=losses), rung=own).verdict == "same"
    assert verdict(record(own, losses=curve(3.0)), rung=own).verdict == "different"


def test_what_learns_something_else_by_design_is_not_held_against_the_first() -> None:
    frozen = replace(OTHER, by_design=True)
    row = verdict(record(frozen, losses=[], quality=0.5, samples_per_second=None), rung=frozen)
    assert (row.verdict, row.rate, row.is_best) == ("by design", None, False)


def test_the_first_rung_that_was_measured_is_what_others_are_held_against() -> None:
    failed = record(FIRST, status="failed", why="no room")
    rows = standings([FIRST, OTHER], [failed, record(OTHER)], {}, ROWS)
    assert [(row.state, row.verdict) for row in rows] == [("failed", ""), ("measured", "first")]
    assert rows[0].why == "no room"


def test_cold_and_warm_cells_have_figures_of_their_own() -> None:
    row = verdict(*[record(OTHER, seed, whole_seconds=seconds) for seed, seconds in enumerate((30.0, 10.0, 12.0))])
    medians = [spread.median for spread in (row.cold, row.warm) if spread]
    assert (*medians, row.n) == (30.0, 11.0, 3)


def test_rungs_that_did_not_run_say_why() -> None:
    rows = standings([FIRST, OTHER], [record(FIRST)], {"other": ("absent", "pip install x")}, ROWS)
    assert (rows[1].state, rows[1].why) == ("absent", "pip install x")


def test_pieces_are_means_of_like_lengths() -> None:
    assert pieces([1.0, 3.0, 5.0, 7.0], 2) == (2.0, 6.0)
    assert pieces([1.0, 2.0], 8) == (1.0, 2.0)
    assert pieces([]) == ()


def test_one_seed_that_went_astray_decides_neither_way() -> None:
    """Of three pairs the median counts: their mean would leave the band, or hide that two of them do."""
    one_astray = [record(OTHER, seed, quality=quality) for seed, quality in enumerate((0.8, 0.8, 0.5))]
    assert verdict(*one_astray).verdict == "same"
    one_right = [record(OTHER, seed, quality=quality) for seed, quality in enumerate((0.75, 0.75, 0.9))]
    assert verdict(*one_right).verdict == "different"
    losses = [record(OTHER, seed, losses=curve(start)) for seed, start in enumerate((2.0, 2.01, 4.0))]
    assert verdict(*losses).verdict == "same"
    row = verdict(*[record(OTHER, seed, samples_per_second=rate) for seed, rate in enumerate((1.0, 100.0, 110.0))])
    assert row.rate is not None
    assert row.rate.median == 100.0


def test_quality_that_is_nan_is_no_ground_to_compare_with() -> None:
    """The first rung learned nothing: what others learned is not the same, and it is not the fastest."""
    broken = [record(FIRST, quality=math.nan, samples_per_second=900.0)]
    rows = standings([FIRST, OTHER], [*broken, record(OTHER)], {}, ROWS)
    assert [row.verdict for row in rows] == ["different", "first"]
    assert not any(row.is_best for row in rows)
    mixed = [record(FIRST, quality=0.8), record(FIRST, 1, quality=math.nan)]
    rows = standings([FIRST, OTHER], [*mixed, record(OTHER), record(OTHER, 1)], {}, ROWS)
    assert [row.verdict for row in rows] == ["different", "first"]
    assert rows[0].quality is not None
    assert math.isnan(rows[0].quality.median)


def test_one_measured_rung_is_the_fastest_of_nothing() -> None:
    rows = standings([FIRST, OTHER], [record(FIRST)], {}, ROWS)
    assert not any(row.is_best for row in rows)
    rows = standings([FIRST, OTHER], [record(FIRST), record(OTHER, quality=0.1)], {}, ROWS)
    assert not any(row.is_best for row in rows), "the other learned something else"


def test_quality_is_of_the_seeds_that_all_rungs_have() -> None:
    firsts = [record(FIRST, seed, quality=quality) for seed, quality in enumerate((0.9, 0.5, 0.5))]
    rows = standings([FIRST, OTHER], [*firsts, record(OTHER, quality=0.9)], {}, ROWS)
    assert [(row.quality.median, row.n) for row in rows if row.quality] == [(0.9, 3), (0.9, 1)]


@pytest.mark.parametrize(
    ("claim", "rates", "whole", "verdict"),
    [
        ("mixed precision trains 3 times as fast", {"lightning": 100.0, "lightning_bf16": 252.0}, {}, "not here"),
        ("mixed precision trains 3 times as fast", {"lightning": 100.0, "lightning_bf16": 299.6}, {}, "holds here"),
        ("from 22.63 to 3.15 minutes", {}, {"plain": 69.0, "ddp": 10.0}, "not here"),
        ("from 22.63 to 3.15 minutes", {}, {"plain": 70.0, "ddp": 10.0}, "holds here"),
        ("Lightning's Trainer", {"plain_dynamic": 100.0, "lightning": 111.0}, {}, "not here"),
        ("Lightning's Trainer", {"plain_dynamic": 100.0, "lightning": 110.0}, {}, "holds here"),
        ("torch.compile", {"lightning_bf16": 100.0, "lightning_compile": 116.0}, {}, "not here"),
        ("an SVM", {}, {"plain": 20.0, "features_svm": 10.0, "paceline": 9.0}, "not here"),
        ("an SVM", {}, {"plain": 20.0, "features_svm": 10.0, "paceline": 11.0}, "holds here"),
    ],
)
def test_a_claim_holds_where_its_figure_reaches_what_it_says(
    claim: str, rates: dict[str, float], whole: dict[str, float], verdict: str
) -> None:
    names = {**rates, **whole}
    rungs = [Rung(name=name, contender="x", change="") for name in names]
    records = [
        record(rung, samples_per_second=rates.get(rung.name, 1.0), whole_seconds=whole.get(rung.name, 10.0))
        for rung in rungs
    ]
    (answer,) = (each for each in answers(standings(rungs, records, {}, ROWS)) if each.claim.startswith(claim))
    assert answer.verdict == verdict, answer.measured


def test_a_claim_compares_jobs_with_the_same_caches_and_says_who_learned_something_else() -> None:
    claim = Claim(text="b is done first", rungs=("b",), beside=("a",), low=1, of="whole")
    a, b = (Rung(name=name, contender="x", change="") for name in "ab")
    warm = [record(b, 1, whole_seconds=5.0)]
    (answer,) = answers(standings([a, b], [record(a), *warm], {}, ROWS), [claim])
    assert (answer.verdict, answer.measured) == ("not measured", "needs cells of b and a with the same caches")
    (answer,) = answers(standings([a, b], [record(a), record(b, quality=0.1)], {}, ROWS), [claim])
    assert answer.measured == "b 1.00 x a (b learned something else)"


def test_claims_are_held_against_what_was_measured() -> None:
    claim = Claim(text="b is 3 times as fast", rungs=("b",), beside=("a",), low=3, high=9)
    whole = Claim(text="b is done first", rungs=("b",), beside=("a",), low=1, high=9, of="whole")
    a, b = (Rung(name=name, contender="x", change="") for name in "ab")

    def told(rate: float) -> list[str]:
        rows = standings([a, b], [record(a), record(b, samples_per_second=rate, whole_seconds=20.0)], {}, ROWS)
        return [f"{each.measured}: {each.verdict}" for each in answers(rows, [claim, whole])]

    assert told(300) == ["b 3.00 x a: holds here", "b 0.50 x a: not here"]
    assert told(200)[0] == "b 2.00 x a: not here"
    alone = answers(standings([a], [record(a)], {}, ROWS), [claim])
    assert [each.verdict for each in alone] == ["not measured"]


def test_claims_name_rungs_that_there_are() -> None:
    names = {rung.name for rung in TEXT}
    for answer in answers([]):
        assert answer.verdict == "not measured"
        assert answer.measured.removeprefix("needs the rung ") in names
