"""``paceline data``: fetch a public data set and write its files."""

from __future__ import annotations

from pathlib import Path

from paceline.contract.errors import UserError, nearest

KNOWN = ("imdb", "cifar10")


def data(name: str, folder: Path) -> tuple[Path, ...]:
    """Download the data set ``name`` into ``folder`` and return its files.

    Of imdb they are train, validation and test files; of cifar10 those of its binary version. A download that was cut
    short is taken up where it ended. Progress is shown on a terminal.

    Raises:
        UserError: an unknown name.
        DataError: no connection, or a wrong checksum.
        DiskFullError: not enough room.
    """
    if name not in KNOWN:
        close = "cifar10" if name.lower().startswith("cifar") else "imdb"
        raise UserError(f"{name}: no such data set", nearest(name, KNOWN), f"paceline data {close} DIR")

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from paceline.data.download import download_cifar10, download_imdb

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(name, total=None)

        def show(received: int, total: int | None) -> None:
            progress.update(task, completed=received, total=total)

        download = download_imdb if name == "imdb" else download_cifar10
        return tuple(download(Path(folder), progress=show).values())
