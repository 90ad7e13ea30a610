"""``paceline data``: fetch a public data set and write its split files."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import UserError, nearest

KNOWN = ("imdb",)


def data(name: str, folder: Path) -> tuple[Path, ...]:
    """Download the data set ``name`` into ``folder`` and return its train, validation and test files.

    A download that was cut short is taken up where it ended. Progress is shown on a terminal.

    Raises:
        UserError: an unknown name.
        DataError: no connection, or a wrong checksum.
        DiskFullError: not enough room.
    """
    if name not in KNOWN:
        raise UserError(f"{name}: no such data set", nearest(name, KNOWN), "paceline data imdb DIR")

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from paceline.data.download import download_imdb

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(name, total=None)

        def show(received: int, total: int | None) -> None:
            progress.update(task, completed=received, total=total)

        return tuple(download_imdb(Path(folder), progress=show).values())
