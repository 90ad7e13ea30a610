"""A tool that listens to NVTX and writes what it hears, built where a C compiler and NVTX's headers are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("nvtx_recorder.c")


def built_tool(folder: Path) -> Path:
    """The library that ``NVTX_INJECTION64_PATH`` names; skips the test where it cannot be built."""
    include, compiler = _headers(), shutil.which("cc") or shutil.which("gcc")
    if include is None or compiler is None:
        pytest.skip("needs a C compiler and NVTX's headers to build a tool that listens")
    library = folder / "recorder.so"
    command = [compiler, "-shared", "-fPIC", "-O1", f"-I{include}", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return library


def heard(
    command: Sequence[str], tool: Path, folder: Path, *, domain: str | None = "paceline", timeout: float = 60
) -> list[dict[str, Any]]:
    """Runs a command beside the tool; returns the events of a domain, or of all, in order."""
    told = folder / "events.jsonl"
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(tool), "NVTX_RECORD": str(told)}
    subprocess.run(command, check=True, env=environment, timeout=timeout)
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    return [line for line in lines if domain is None or line["domain"] == domain]


def nested(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Each range, and each mark, with those that it is in, outermost first; of one thread. Fails where one is left."""
    inside: list[str] = []
    found = []
    for event in events:
        if event["kind"] == "push":
            inside.append(event["name"])
            found.append(tuple(inside))
        elif event["kind"] == "mark":
            found.append((*inside, event["name"]))
        elif event["kind"] == "pop":
            assert inside, "a range ends that never began"
            inside.pop()
    assert not inside, f"left open: {inside}"
    return found


def _headers() -> Path | None:
    """Where NVTX's headers are: a CUDA toolkit's, or those that come with a package."""
    places = [
        *Path("/usr/local").glob("cuda*/include"),
        *Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/include"),
    ]
    return next((place for place in places if (place / "nvtx3" / "nvToolsExt.h").is_file()), None)
