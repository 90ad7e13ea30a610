"""What is left, and said, of a run that was stopped or had no room."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from paceline.contract.errors import Preempted
from paceline.contract.stop import NOT_BEGUN, Stop
from paceline.recipe.trust import switches
from paceline.run.job import Request
from paceline.run_folder import has_checkpoint, is_unbegun, way_on


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
        return NOT_BEGUN
    if request.rows is not None:
        return f"paceline.resume({str(request.folder.path)!r}, data=rows) goes on"
    return f"paceline train {shlex.quote(str(request.folder.path))} --resume{switches(request.recipe)} goes on"


def given_up(request: Request, stop: Stop) -> str:
    """What a person does after what was under way did not end; the other ranks, and the run folder, have word of it."""
    what = f"stopped by {stop.asked_by}, and what was under way did not end"
    request.world.announce(Preempted(what))
    path = request.folder.path
    if not has_checkpoint(path):
        return way_on(path) if request.folder.recipe.exists() and not is_unbegun(path) else NOT_BEGUN
    goes_on = then(request, saved=True)
    if request.world.is_first:
        request.folder.mark_preempted(f"{what}; {goes_on}")
    return goes_on


def then_with_room(request: Request) -> str:
    """What a person does once the disk has room again."""
    folder = request.folder
    if folder.summary.exists():
        return f"the run itself is whole: paceline report {shlex.quote(str(folder.path))}"
    if has_checkpoint(folder.path):
        return then(request, saved=True)
    return way_on(folder.path) if folder.recipe.exists() else "start it again"
