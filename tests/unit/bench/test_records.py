"""Records are on the disk at once, and nothing that was measured is lost."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.records import Records
from paceline.contract.errors import DiskFullError


def record(rung: str, repeat: int = 0, status: str = "ok") -> dict[str, Any]:
    return {"rung": rung, "repeat": repeat, "status": status}


def test_a_record_is_on_the_disk_when_it_is_added(tmp_path: Path) -> None:
    records = Records(tmp_path / "cells.jsonl")
    records.add(record("a"))
    assert list(Records(tmp_path / "cells.jsonl")) == [record("a")]
    records.add(record("a", 1))
    assert len((tmp_path / "cells.jsonl").read_text().splitlines()) == 2


def test_the_newest_of_a_cell_counts(tmp_path: Path) -> None:
    records = Records(tmp_path / "cells.jsonl")
    records.add(record("a", status="failed"))
    records.add(record("a"))
    again = Records(tmp_path / "cells.jsonl")
    assert list(again) == [record("a")]
    again.forget(("ok",))
    assert again.get("a", 0) is None
    assert Records(tmp_path / "cells.jsonl").get("a", 0) == record("a"), "the file keeps it"


def test_a_line_that_a_crash_cut_off_is_passed_over_and_spoils_none(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text(json.dumps(record("a")) + "\n" + '{"rung": "b", "rep')
    records = Records(path)
    assert list(records) == [record("a")]
    records.add(record("c"))
    assert list(Records(path)) == [record("a"), record("c")]


@pytest.mark.parametrize(
    "line",
    [
        '{"rung": "b", "repeat": 0}',
        '{"status": "ok"}',
        "[]",
        "7",
        '{"rung": [], "repeat": 0, "status": ""}',
        '"rung repeat status"',
    ],
)
def test_a_line_that_is_no_whole_record_is_passed_over(line: str, tmp_path: Path) -> None:
    (tmp_path / "cells.jsonl").write_text(json.dumps(record("a")) + "\n" + line + "\n")
    records = Records(tmp_path / "cells.jsonl", needs=("status",))
    records.forget(("failed",))
    assert list(records) == [record("a")]


def test_a_full_disk_is_emptied_once_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cells.jsonl"
    write, full, made = os.write, [False], []

    def limited(descriptor: int, content: Any) -> int:
        if full[0]:
            write(descriptor, bytes(content)[:3])  # some of it fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, content)

    def make_room() -> None:
        made.append(True)
        full[0] = False

    monkeypatch.setattr(os, "write", limited)
    records = Records(path, make_room)
    records.add(record("a"))
    full[0] = True
    records.add(record("b"))
    assert made == [True]
    assert [each["rung"] for each in Records(path)] == ["a", "b"]
    never = Records(path, lambda: None)
    full[0] = True
    with pytest.raises(DiskFullError):
        never.add(record("c"))
    assert [each["rung"] for each in Records(path)] == ["a", "b"], "what was there before is not whole"
    assert path.read_bytes().endswith(b"\n")
