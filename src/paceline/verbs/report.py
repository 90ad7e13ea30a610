"""``paceline report``: a run's report.html, written again from what its folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.contract.errors import UserError
from paceline.observe.collect import collect
from paceline.report.build import build_report
from paceline.report.figures import write_figures, write_table


def report(folder: Path) -> Path:
    """Write report.html of the run in ``folder`` again and return its path; a cut-short run has a report too.

    Raises:
        RunFolderError: it is no run folder, or a file of it is damaged.
        DiskFullError: no room; an earlier report is intact.
    """
    return build_report(Path(folder))


def export(folder: Path, figures: Path | None, table: Path | None, say: Callable[[str], None]) -> list[Path]:
    """Write a run's curves as figures into one folder, and its steps as a table into a file; returns their paths.

    Args:
        say: takes the notice that there is no matplotlib for PDF and PNG.

    Raises:
        RunFolderError, DiskFullError: as of ``report``.
        UserError: the folder or the file cannot be written to.
    """
    run, written = collect(Path(folder)), list[Path]()
    try:
        if figures is not None:
            written += write_figures(run, figures, say)
        if table is not None:
            written.append(write_table(run, table))
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError, FileNotFoundError) as error:
        raise UserError(f"{error.filename}: cannot be written to", error.strerror or "", "name another one") from error
    return written
