"""``paceline restore``: a run folder made again from the copies that ``loop.checkpoint_mirror`` left elsewhere."""

from __future__ import annotations

from pathlib import Path

from paceline.verbs.notices import tell


def restore(url: str, out: str | Path | None = None) -> tuple[Path, int]:
    """Fetch a mirrored run; ``resume`` goes on with it.

    Args:
        url: of the run there: the mirror's own URL and the name of the run folder.
        out: the run folder to make; None: ``runs/<name>``.

    Returns:
        The run folder, and the step of its newest checkpoint.

    Raises:
        UserError: something is at ``out``, no run is at ``url``, or none of its checkpoints is whole.
    """
    from paceline.run.checkpoint.restore import restore as fetch

    folder = Path(out) if out is not None else Path("runs") / url.rstrip("/").rpartition("/")[2]
    return folder, fetch(url, folder, tell)
