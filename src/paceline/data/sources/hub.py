"""Data sets of the Hugging Face Hub, through the ``datasets`` library."""

from __future__ import annotations

from pathlib import Path

from paceline.contract.errors import DataError
from paceline.data.sources.memory import read_memory
from paceline.data.sources.rows import Source, not_installed

PREFIX = "hub:"


def read_hub(source: str) -> list[Source]:
    """Rows of ``hub:NAME`` or ``hub:NAME:CONFIGURATION``, one source a split. No code of the data set is run.

    Raises:
        DataError: datasets is not installed, the Hub cannot be reached, or it has no such data set.
    """
    name, _, configuration = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise DataError(f"data.source = {source!r}", why="no name after hub:", fix="hub:stanfordnlp/imdb, for example")
    if Path(name).exists():
        raise DataError(
            f"{source}: {name} is also here, in the current folder",
            why="the datasets library would read that in place of the Hub's data set",
            fix=f"--data {name} reads what is here; for the Hub's, rename it or start from another folder",
        )
    try:
        import datasets
    except ImportError:
        raise not_installed(f"{source} needs the datasets library", "hub") from None
    try:
        found = datasets.load_dataset(name, configuration or None)
    except (OSError, ValueError, RuntimeError) as error:
        raise _failed(source, name, error) from error
    return read_memory(found, source)


def _failed(source: str, name: str, error: Exception) -> DataError:
    message = str(error).strip().split("\n", 1)[0]
    kind = type(error).__name__
    if "Config name is missing" in str(error) or "BuilderConfig" in str(error):
        return DataError(
            f"{source}: which configuration?", why=" ".join(str(error).split()), fix=f"hub:{name}:CONFIGURATION"
        )
    if isinstance(error, ConnectionError | TimeoutError) or "Offline" in kind or "Connect" in kind:
        return DataError(
            f"{source}: the Hub cannot be reached",
            why=message or kind,
            fix="go online once (the data set is then cached), set HF_HOME to a cache that has it, or download its"
            " files and pass --data FILE",
        )
    return DataError(
        f"{source}: cannot be loaded",
        why=message or kind,
        fix=f"check the name at https://huggingface.co/datasets/{name}; private data needs `hf auth login`",
    )
