"""A claim, and what became of it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["passed", "failed", "not applicable", "left out"]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something that is promised of a run.

    Its room has a function ``check``: a ``Subject`` to what was seen, in words, where the claim holds.
    """

    name: str
    says: str
    """In a line, for people."""
    room: str = ""
    """The module in ``paceline.check``; empty: it is called as the claim is."""
    switch: str = ""
    """Settings that do without what the claim is about, as they are typed; empty: there are none."""
    likely: str = ""
    """The usual cause of a difference."""

    @property
    def module(self) -> str:
        """The whole name of its room."""
        return f"paceline.check.{self.room or self.name}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What became of a claim."""

    claim: str
    says: str
    status: Status
    told: str
    """What was seen; or where it differs; or why it could not be asked."""
    tensor: str | None = None
    """Where it failed: the first tensor that differs, where there is one."""
    away: float | None = None
    """How far, in units of the norm of what was expected."""
    likely: str = ""
    switch: str = ""
    seconds: float = 0.0


class NotApplicable(Exception):
    """A claim has nothing to be about here; says why."""


class Broken(Exception):
    """A claim does not hold.

    Args:
        told: what differs, in a sentence without its end.
        tensor: the first that differs.
        away: how far.
        switch: what turns it off; empty: what the claim says.
    """

    def __init__(self, told: str, *, tensor: str | None = None, away: float | None = None, switch: str = "") -> None:
        super().__init__(told)
        self.told, self.tensor, self.away, self.switch = told, tensor, away, switch


class Untried(Exception):
    """A comparison that could not be made, since one of its processes failed; says which, and with which error."""
