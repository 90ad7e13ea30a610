"""What is left, and said, of a run that was stopped or had no room."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from paceline.contract.errors import Preempted
from paceline.recipe.trust import switches
from paceline.run.job import Request
from paceline.run_folder import has_checkpoint, way_on


@contextlib.contextmanager
def preemption_marked(request: Request) -> Iterator[None]:
    """A stop leaves word in the run folder."""
    try:
        yield
    except Preempted as stopped:
        if request.world.is_first:
            request.folder.mark_preempted(str(stopped))
        raise


def then(request: Request, *, saved: bool) -> str:
    """What a person does after a stop."""
    if not saved:
        return "no step was made, so nothing is lost: start it again"
    if request.rows is not None:
        return f"paceline.resume({str(request.folder.path)!r}, data=rows) goes on"
    return f"paceline train {shlex.quote(str(request.folder.path))} --resume{switches(request.recipe)} goes on"


def then_with_room(request: Request) -> str:
    """What a person does once the disk has room again."""
    folder = request.folder
    if folder.summary.exists():
        return f"the run itself is whole: paceline report {shlex.quote(str(folder.path))}"
    if has_checkpoint(folder.path):
        return then(request, saved=True)
    return way_on(folder.path) if folder.recipe.exists() else "start it again"
