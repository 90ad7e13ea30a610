"""Spans as NVTX ranges: what a tool that listens is told, and what is said where the package is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import UserError
from paceline.contract.spans import listening, mark, span
from paceline.observe.nvtx_ranges import NvtxRanges, nvtx_ranges
from tests.unit.observe.nvtx_tool import built_tool, heard, nested

SPANS = """
from paceline.observe.nvtx_ranges import NvtxRanges
from paceline.contract.spans import listening, mark, span

with listening(NvtxRanges()):
    for step in (1, 2):
        with span("step", step=step):
            with span("forward", step=step):
                mark("captured", step=step)
    try:
        with span("evaluate"):
            raise KeyError
    except KeyError:
        pass
    with span("step"):
        pass
"""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("nvtx", reason="the package nvtx is not installed")
    return built_tool(tmp_path_factory.mktemp("nvtx"))


@pytest.fixture
def events(recorder: Path, tmp_path: Path) -> list[dict[str, Any]]:
    return heard([sys.executable, "-c", SPANS], recorder, tmp_path)


def test_a_tool_hears_of_every_span_nested_and_in_order(events: list[dict[str, Any]]) -> None:
    told = [(e["kind"], e.get("name", ""), e.get("payload")) for e in events if e["kind"] != "category"]
    of_steps = []
    for step in (1, 2):
        of_steps += [("push", "step", step), ("push", "forward", step), ("mark", "captured", step)]
        of_steps += [("pop", "", None)] * 2
    assert told[: len(of_steps)] == of_steps
    assert [each[:2] for each in told[len(of_steps) :]] == [
        *(("push", "evaluate"), ("pop", "")),  # also where an exception ended it
        *(("push", "step"), ("pop", "")),
    ]
    assert told[-2][2] not in (1, 2), "a span without a step carries the step of an earlier one"


def test_each_name_has_a_category_of_its_own(events: list[dict[str, Any]]) -> None:
    named = {e["category"]: e["name"] for e in events if e["kind"] == "category"}
    pushed = [e for e in events if e["kind"] in ("push", "mark")]
    assert pushed
    assert all(named[e["category"]] == e["name"] for e in pushed)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(UserError, match=r"paceline\[nvtx\]"):
        NvtxRanges()


TITLED = """
from paceline.observe.nvtx_ranges import NvtxRanges
from paceline.contract.spans import listening, mark, pop, push, span

def title(name, step):
    return name if step is None else f"{name} number {step}"

with listening(NvtxRanges(title)):
    for step in (7, 8):
        push("step", step=step)
        try:
            with span("forward"), span("inner", step=step):
                raise KeyError
        except KeyError:
            pass
        pop()
    mark("checkpoint committed", step=8)
"""


def test_titles_are_free_and_categories_stay(recorder: Path, tmp_path: Path) -> None:
    events = heard([sys.executable, "-c", TITLED], recorder, tmp_path)
    # also where exceptions ended ranges, each ends before what it is in
    tree = nested(events)
    once = [("step number 7",), ("step number 7", "forward"), ("step number 7", "forward", "inner number 7")]
    again = [tuple(name.replace("7", "8") for name in names) for names in once]
    assert tree == [*once, *again, ("checkpoint committed number 8",)]
    named = {event["category"]: event["name"] for event in events if event["kind"] == "category"}
    pushed = [event for event in events if event["kind"] in ("push", "mark")]
    assert [named[event["category"]] for event in pushed] == [*["step", "forward", "inner"] * 2, "checkpoint committed"]
    assert [event["payload"] for event in pushed if "number" in event["name"]] == [7, 7, 8, 8, 8]


def test_where_nobody_listens_spans_go_by() -> None:
    pytest.importorskip("nvtx", reason="the package nvtx is not installed")
    for sink in (NvtxRanges(), NvtxRanges(lambda name, step: f"{name} {step}"), nvtx_ranges()):
        with listening(sink):
            for step in (1, 2):
                with span("step", step=step), span("forward"):
                    mark("captured", step=step)
