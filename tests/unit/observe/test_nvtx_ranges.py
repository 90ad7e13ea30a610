"""Spans as NVTX ranges: what a tool that listens is told, and what is said where the package is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UserError
from paceline.observe.nvtx_ranges import NvtxRanges

RECORDER = Path(__file__).with_name("nvtx_recorder.c")
SPANS = """
from paceline.observe.nvtx_ranges import NvtxRanges
from paceline.spans import listening, mark, span

with listening(NvtxRanges()):
    for step in (1, 2):
        with span("step", step=step):
            with span("forward", step=step):
                mark("recorded", step=step)
    try:
        with span("evaluate"):
            raise KeyError
    except KeyError:
        pass
    with span("step"):
        pass
"""


def headers() -> Path | None:
    """Where NVTX's headers are: a CUDA toolkit's, or those that come with a package."""
    places = [
        *Path("/usr/local").glob("cuda*/include"),
        *Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/include"),
    ]
    return next((place for place in places if (place / "nvtx3" / "nvToolsExt.h").is_file()), None)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("nvtx", reason="the package nvtx is not installed")
    include, compiler = headers(), shutil.which("cc") or shutil.which("gcc")
    if include is None or compiler is None:
        pytest.skip("needs a C compiler and NVTX's headers to build a tool that listens")
    library = tmp_path_factory.mktemp("nvtx") / "recorder.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", f"-I{include}", "-o", str(library), str(RECORDER)], check=True, timeout=60
    )
    return library


@pytest.fixture
def events(recorder: Path, tmp_path: Path) -> list[dict[str, Any]]:
    told = tmp_path / "events.jsonl"
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(recorder), "NVTX_RECORD": str(told)}
    subprocess.run([sys.executable, "-c", SPANS], check=True, env=environment, timeout=60)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    return [line for line in lines if line["domain"] == "paceline"]


def test_a_tool_hears_of_every_span_nested_and_in_order(events: list[dict[str, Any]]) -> None:
    told = [(e["kind"], e.get("name", ""), e.get("payload")) for e in events if e["kind"] != "category"]
    of_steps = []
    for step in (1, 2):
        of_steps += [("push", "step", step), ("push", "forward", step), ("mark", "recorded", step)]
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
