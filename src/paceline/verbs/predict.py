"""``paceline predict``: labels and probabilities for rows."""

from __future__ import annotations

from pathlib import Path


def predict(folder: str | Path, data: str, out: str | Path, *, rows: object | None = None) -> int:
    """Write every row of ``data`` with its predicted label and probabilities, in bounded memory.

    Args:
        folder: the run folder.
        data: rows to label, as ``data.source`` takes them; a label column is not needed.
        out: file to write: .csv, .tsv or .jsonl.
        rows: rows in memory in place of ``data``.

    Returns:
        The number of rows written.

    Raises:
        DataError: the rows cannot be used. RunFolderError: no trained model is there, or ``out`` cannot be written.
    """
    from paceline.inference import predict_rows

    return predict_rows(Path(folder), data, Path(out), rows)
