"""``paceline report``: a run's report.html, written again from what its folder holds."""

from __future__ import annotations

from pathlib import Path

from paceline.report.build import build_report


def report(folder: Path) -> Path:
    """Write report.html of the run in ``folder`` again and return its path; a cut-short run has a report too.

    Raises:
        RunFolderError: it is no run folder, or a file of it is damaged.
        DiskFullError: no room; an earlier report is intact.
    """
    return build_report(Path(folder))
