"""Names of a GPU's streams: what a tool that listens to NVTX is told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.machine import device
from paceline.observe import stream_names
from tests.unit.observe.nvtx_tool import built_tool, heard

NAMES = """
from paceline.observe.stream_names import name_streams

assert name_streams({4711: "sums", 815: "capture \\u00e9"})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the library that is told is NVIDIA's for Linux")
def test_a_tool_hears_of_the_names(tmp_path: Path) -> None:
    told = heard([sys.executable, "-c", NAMES], built_tool(tmp_path), tmp_path, domain="")
    streams = [(event["payload"], event["name"]) for event in told if event["kind"] == "stream"]
    assert streams == [(4711, "sums"), (815, "capture ?")]


@pytest.mark.parametrize("places", [[], ["broken"]], ids=["none", "broken"])
def test_without_the_library_streams_keep_their_numbers(
    places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken" / "cu13" / "lib" / stream_names.LIBRARY
    broken.parent.mkdir(parents=True)
    broken.write_text("no library")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / place) for place in places])
    monkeypatch.setattr(stream_names.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(stream_names, "_library", stream_names._library.__wrapped__)
    assert stream_names.name_streams({1: "sums"}) is False


def test_streams_that_are_made_with_a_name_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpus:
        @staticmethod
        def Stream(of: torch.device) -> Any:
            return SimpleNamespace(cuda_stream=7, of=of)

    monkeypatch.setattr(torch, "get_device_module", lambda _: Gpus)
    monkeypatch.setattr(device, "_stream_names", {})
    gpu = torch.device("cuda", 1)
    assert device.named_stream(gpu, "all-reduce").of == gpu
    assert dict(device.stream_names()) == {7: "all-reduce"}
