"""What became of claims, as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.check.claim import Claim, Finding
from paceline.verbs.check import Checked

_WIDTH = len("not applicable")


def lines(found: Finding, names: int) -> Iterator[str]:
    """A claim in a line; one that failed with what is to blame, and the switch, below it.

    Args:
        names: characters of the longest name.
    """
    yield f"{found.claim:<{names}}  {found.status:<{_WIDTH}}  {found.told}  ({found.seconds:.1f} s)"
    if found.status == "failed":
        indent = " " * (names + 2)
        yield f"{indent}claim: {found.says}"
        if found.likely:
            yield f"{indent}likely: {found.likely}"
        yield f"{indent}switch: {found.switch or 'none; this is a fault to report'}"


def summary(checked: Checked) -> str:
    """All claims in a line."""
    counts = [f"{count} {status}" for status, count in checked.counts.items()]
    return f"{', '.join(counts)} in {checked.seconds:.0f} s, on {checked.samples} training samples ({checked.device})"


def left_out(checked: Checked) -> str:
    """What to type for the claims that there was no time for; empty where there are none."""
    names = [found.claim for found in checked.findings if found.status == "left out"]
    return f"no time was left for: {', '.join(names)}; try --only {','.join(names)}" if names else ""


def table(claims: Sequence[Claim]) -> Iterator[str]:
    """The claims, a line each."""
    names = max(len(claim.name) for claim in claims)
    yield from (f"{claim.name:<{names}}  {claim.says}" for claim in claims)
