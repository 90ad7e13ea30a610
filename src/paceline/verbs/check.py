"""``paceline check``: what is promised of a run, tried on a person's own model, data and recipe."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from paceline.check.claim import Claim, Finding
from paceline.check.claims import chosen
from paceline.contract.errors import RunFolderError, UserError
from paceline.contract.exclusive import exclusive
from paceline.recipe import Recipe
from paceline.recipe.techniques import opened
from paceline.recipe.trust import NONE, Trust, require_trust
from paceline.run_folder import RunFolder, way_on

SAMPLES: Final = 20
"""Training samples that are taken where nobody says how many."""

FEWEST: Final = 5
"""Below that there is no smaller batch at the end of an epoch."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What became of all claims."""

    name: str
    device: str
    samples: int
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether no claim failed."""
        return not any(found.status == "failed" for found in self.findings)

    def plain(self) -> dict[str, Any]:
        """Nested plain data: what ``--json`` prints."""
        return {**asdict(self), "holds": self.holds, "counts": dict(self.counts)}

    @property
    def counts(self) -> Counter[str]:
        """Status -> number of claims."""
        return Counter(found.status for found in self.findings)


@exclusive("paceline check", trains=True)
def check(
    recipe: Recipe,
    only: Sequence[str] = (),
    *,
    samples: int = SAMPLES,
    budget_seconds: float | None = None,
    rows: object | None = None,
    trained: Path | None = None,
    begins: Callable[[Claim], None] = lambda _: None,
    told: Callable[[Finding], None] = lambda _: None,
) -> Checked:
    """Try what is promised of a run, on the recipe's own model and some of its data.

    The recipe's techniques are on; batches are small, and computed in fp32 where two ways of computing are compared.

    Args:
        recipe: the whole run.
        only: names of claims; none: all.
        samples: training samples to take, at least 5; half as many of each other split.
        budget_seconds: no claim is begun after so many seconds, but for the first.
        rows: data in memory in place of the recipe's source.
        trained: the model that a run has saved, whose weights are taken.
        begins: told of each claim before it is tried.
        told: told what became of it.

    Raises:
        UserError: an unknown claim; what ``train`` would say of the recipe before its first step.
    """
    claims, began = chosen(only), time.perf_counter()
    if samples < FEWEST:
        raise UserError(f"--samples {samples}", f"batches of an epoch need {FEWEST} or more", f"--samples {SAMPLES}")
    from paceline.check.checking import findings
    from paceline.check.subject import subject_of

    deadline = None if budget_seconds is None else began + budget_seconds
    found = []
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as folder:
        subject = subject_of(recipe, samples, Path(folder), rows=rows, trained=trained)
        with subject.closing:
            for finding in findings(claims, subject, deadline=deadline, begins=begins):
                told(finding)
                found.append(finding)
        subject.prepared.build.close()
    return Checked(
        name=recipe.name,
        device=subject.recipe.device,
        samples=len(subject.train),
        findings=tuple(found),
        seconds=time.perf_counter() - began,
    )


def of_run(folder: Path, settings: Sequence[str], trust: Trust = NONE) -> tuple[Recipe, Path | None]:
    """A run's recipe with what was switched on for its machine left open, and the model it has saved.

    Raises:
        RunFolderError: no run is there.
        UserError: its recipe would run code that nobody has allowed.
    """
    run = RunFolder.view(folder)
    recipe = run.read_recipe()
    recipe = recipe.with_settings([*opened(recipe), *(["data.resident=auto"] * (recipe.data.resident is True))])
    recipe = recipe.with_settings(settings)
    require_trust(recipe, folder, trust, settings)
    if recipe.data.source == "memory":
        why = "it was trained on rows in memory, which are not in its folder"
        raise RunFolderError(f"{folder}: has no data", why, f"a recipe with data.source; {way_on(folder)}")
    return recipe, run.model if run.model.is_dir() else None
