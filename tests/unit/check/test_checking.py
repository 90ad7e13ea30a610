"""Going through the claims: what becomes of errors, of time, and of names."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline.check.checking import findings
from paceline.check.claim import Broken, Claim, Finding, NotApplicable, Untried
from paceline.check.claims import CLAIMS, chosen
from paceline.contract.errors import RecipeError, UserError
from paceline.verbs.check import Checked
from paceline.verbs.check_shown import left_out, lines, summary


@dataclass(frozen=True)
class Folder:
    """As much of a subject as going through the claims needs."""

    folder: Path
    seen: list[Path] = field(default_factory=list)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Claim]:
    """Makes a claim whose room does what it is given."""

    def made(name: str, check: Callable[[Any], str], **more: str) -> Claim:
        module = ModuleType(f"paceline.check.room_{name}")
        module.check = check  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return Claim(name=name, says=f"{name} holds", room=f"room_{name}", **more)

    return made


def raises(error: BaseException) -> Callable[[Any], str]:
    def check(_: Any) -> str:
        raise error

    return check


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (NotApplicable("no GPU"), "not applicable", "no GPU"),
        (Broken("a differs", tensor="a", away=0.5), "failed", "a differs"),
        (Untried("rank 1 of 2 failed: no module"), "failed", "it could not be tried: rank 1 of 2 failed: no module"),
        (ValueError("odd\nand more"), "failed", "it could not be tried: ValueError: odd (test_checking.py:"),
        (RecipeError("x = 1", "it is odd"), "failed", "it could not be tried: x = 1"),
        (torch.OutOfMemoryError("no room"), "not applicable", "memory ran out"),
    ],
)
def test_what_a_claim_raises_is_what_became_of_it(
    error: Exception, status: str, told: str, room: Callable[..., Claim], tmp_path: Path
) -> None:
    claim = room("one", raises(error), likely="the moon", switch="--set moon=off")
    subject: Any = Folder(tmp_path)
    (found,) = findings([claim], subject)
    assert found.status == status
    assert found.told.startswith(told)
    if not isinstance(error, Broken):
        assert not found.likely, "only a difference has the usual cause of one"
    else:
        assert (found.tensor, found.away, found.likely, found.switch) == ("a", 0.5, "the moon", "--set moon=off")


def test_each_claim_has_a_folder_of_its_own(room: Callable[..., Claim], tmp_path: Path) -> None:
    claims = [room(name, lambda subject: str(subject.folder)) for name in ("one", "two")]
    subject: Any = Folder(tmp_path)
    assert [found.told for found in findings(claims, subject)] == [str(tmp_path / "one"), str(tmp_path / "two")]


def test_after_the_deadline_no_claim_begins_but_the_first(room: Callable[..., Claim], tmp_path: Path) -> None:
    begun: list[str] = []
    claims = [room(name, lambda subject: "held") for name in ("one", "two", "three")]
    subject: Any = Folder(tmp_path)
    found = findings(claims, subject, deadline=time.perf_counter() - 1, begins=lambda claim: begun.append(claim.name))
    assert [each.status for each in found] == ["passed", "left out", "left out"]
    assert begun == ["one"]


def test_every_claim_has_a_room_with_a_check() -> None:
    import importlib

    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS) >= 19
    for claim in CLAIMS:
        assert callable(importlib.import_module(claim.module).check), claim.name


def test_claims_are_chosen_by_name_in_their_own_order() -> None:
    assert chosen([]) == CLAIMS
    assert [claim.name for claim in chosen(["resume", "labels"])] == ["labels", "resume"]
    with pytest.raises(UserError, match="did you mean 'resume'"):
        chosen(["labels", "resum"])


def finding(**changes: Any) -> Finding:
    return Finding(**{"claim": "loop", "says": "steps are plain", "status": "passed", "told": "equal", **changes})


def test_a_claim_is_one_line_and_a_fault_without_a_switch_says_so() -> None:
    assert list(lines(finding(seconds=1.24), 6)) == ["loop    passed          equal  (1.2 s)"]
    shown = list(lines(finding(status="failed", told="apart", likely="the loss"), 6))
    assert shown[0].startswith("loop    failed          apart")
    assert [line.strip() for line in shown[1:]] == [
        "claim: steps are plain",
        "likely: the loss",
        "switch: none; this is a fault to report",
    ]


def test_the_last_lines_count_and_name_what_there_was_no_time_for() -> None:
    found = (finding(), finding(status="failed"), finding(claim="ranks", status="left out"))
    done = Checked(name="x", device="cpu", samples=20, findings=found, seconds=3.2)
    assert summary(done) == "1 passed, 1 failed, 1 left out in 3 s, on 20 training samples (cpu)"
    assert left_out(done) == "no time was left for: ranks; try --only ranks"
    assert not done.holds
    assert done.plain()["counts"] == {"passed": 1, "failed": 1, "left out": 1}
