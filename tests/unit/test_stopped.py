"""What a run that was stopped leaves in its folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.contract.stop import Stop
from paceline.run.stopped import given_up
from paceline.seams import Alone


def test_the_mark_of_a_run_that_was_given_up_names_the_signal(tmp_path: Path) -> None:
    """A job script goes by it: what the scheduler sent as a warning is answered with another start."""
    saved = tmp_path / "checkpoints" / "step-00000003"
    saved.mkdir(parents=True)
    (saved / "COMMITTED").touch()
    marks: list[str] = []
    folder = SimpleNamespace(path=tmp_path, mark_preempted=marks.append)
    request: Any = SimpleNamespace(folder=folder, world=Alone(), rows=[{}])
    stop = Stop()
    stop.requested_by = "SIGUSR2"
    assert given_up(request, stop).startswith("paceline.resume(")
    assert marks[0].startswith("stopped by SIGUSR2, and what was under way did not end; paceline.resume(")
