"""``paceline predict``: labels and probabilities for rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import UserError
from paceline.verbs.notices import counter, tell


def predict(
    folder: str | Path,
    data: str | None,
    out: str | Path,
    *,
    rows: object | None = None,
    settings: Sequence[str] = (),
    safe_csv: bool = False,
) -> int:
    """Write every row of ``data`` with its predicted label and probabilities, in bounded memory.

    Every row is written as it was, in its order, followed by ``prediction`` and ``probability of LABEL`` (with ``_``
    after a name that a column has already). Guesses and warnings go to standard error.

    Args:
        folder: the run folder.
        data: rows to label, as ``data.source`` takes them; a label column is not needed. None with ``rows``.
        out: file to write, whole or not at all: .csv, .tsv or .jsonl.
        rows: rows in memory in place of ``data``.
        settings: ``key=value`` changes of how rows are read (``data.text=review``) or how it is computed (``device``).
        safe_csv: put an apostrophe before each cell that a spreadsheet would take for a formula; numbers stay.

    Returns:
        The number of rows written.

    Raises:
        DataError: the rows cannot be used. RunFolderError: no run is there. ModelError: it has no trained model yet.
        UserError: ``out`` cannot be written, or is of an unknown kind. MemoryFullError: a batch does not fit.
    """
    if (data is None) == (rows is None):
        raise UserError("predict: give data or rows", "they are two sources of the same", "predict(folder, data, out)")
    from paceline.inference import predict_rows

    with counter("rows labelled") as advance:
        return predict_rows(Path(folder), data, Path(out), rows, settings, tell, advance, safe_csv)
