"""A run that is started again after a failure, by what started it: it goes on where it was, if it is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from paceline.contract.errors import RunFolderError
from paceline.contract.records import RunRecord
from paceline.contract.redaction import redacted_command
from paceline.contract.streams import write_error
from paceline.machine.jobs import is_restart, job_of
from paceline.run_folder import RunFolder, has_checkpoint

Way = Literal["begin", "anew", "go on", "done"]


def way_of(out: str | Path | None, environment: Mapping[str, str], command: Sequence[str]) -> Way:
    """What a start does in a run folder.

    Args:
        out: the run folder that was asked for; None: one of its own making.
        command: the command line of this start.
        environment: says whether this start follows one that failed, and of which job.

    Returns:
        ``begin``: a run, in a folder that must not have one; ``anew``: this job's run, no step of which was saved;
        ``go on``: with this job's run; ``done``: this job's run has ended.
    """
    job = job_of(environment)
    if out is None or job is None or not is_restart(environment) or not (Path(out) / "recipe.yaml").is_file():
        return "begin"
    seen = RunFolder.view(out)
    last = seen.read_manifest()["starts"][-1] if seen.manifest.is_file() else {}
    if last.get("job") != job:
        return "begin"
    if seen.summary.exists():
        return "done"
    if has_checkpoint(seen.path):
        return "go on"  # what is not as it was is found beside the checkpoint
    return "anew" if last.get("command") == redacted_command(command) else "begin"


def say(line: str) -> None:
    """Tell who has started the run again what becomes of it: nobody has asked for that in so many words."""
    write_error(f"paceline: {line}")


def ended_run(folder: Path) -> RunRecord:
    """Return the summary of a run that has ended, and say that it has.

    Raises:
        RunFolderError: its summary is damaged.
    """
    from paceline.observe.collect import read_summary

    record = read_summary(folder / "summary.json")
    if record is None:
        why = "it holds nothing"
        raise RunFolderError(f"{folder / 'summary.json'}: damaged", why, "remove the file, and the run ends once more")
    say(f"{folder}: the run is finished, and nothing is left to do")
    return record
