"""Where ranks that waited for one another had come to, in words."""

from __future__ import annotations

from typing import Any

from paceline.verbs.launch.collectives import differences

SUM, COPY = "all_reduce of 8 Float", "broadcast of 2x4 Float"


def told(*operations: str, first: int = 1, at: int | None = None) -> dict[str, Any]:
    ops = {str(first + index): operation for index, operation in enumerate(operations)}
    return {"at": at or first + len(operations) - 1, "ops": ops}


def test_nothing_is_said_of_ranks_that_have_made_the_same() -> None:
    assert differences({0: {"all": told(SUM, COPY)}, 1: {"all": told(SUM, COPY)}, 2: {}}) == []
    assert differences({}) == []


def test_a_rank_that_is_behind() -> None:
    ahead = {"all": told(SUM, SUM, COPY, at=2)}
    assert differences({2: {"all": told(SUM)}, 0: ahead, 1: ahead, 3: ahead}) == [
        f"collectives of all: ranks 0, 1, 3 reached number 2, {SUM}; rank 2 reached number 1, {SUM}\n"
        f"  the first that differs is number 2: ranks 0, 1, 3 made {SUM}; rank 2 made none"
    ]


def test_ranks_that_parted_earlier_than_they_wait() -> None:
    said = differences({0: {"all": told(SUM, COPY, SUM)}, 1: {"all": told(SUM, SUM, SUM)}})
    assert [text.partition("\n  ")[2] for text in said] == [
        f"the first that differs is number 2: rank 0 made {COPY}; rank 1 made {SUM}"
    ]


def test_what_one_rank_no_longer_tells_is_no_difference() -> None:
    assert differences({0: {"all": told(COPY, SUM, SUM)}, 1: {"all": told(SUM, SUM, first=2)}}) == []


def test_each_group_has_numbers_of_its_own_and_ranks_outside_are_no_part() -> None:
    said = differences({0: {"a": told(SUM, SUM)}, 1: {"a": told(SUM), "b": told(SUM)}, 2: {"b": told(SUM)}})
    assert len(said) == 1
    assert said[0].startswith("collectives of a: rank 0 ")
