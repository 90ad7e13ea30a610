"""``paceline predict``: labels and probabilities for rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from paceline.contract.errors import UserError
from paceline.recipe.trust import Trust
from paceline.verbs.notices import counter, tell


@overload
def predict(
    folder: str | Path,
    data: object,
    out: None = None,
    *,
    rows: None = None,
    settings: Sequence[str] = (),
    trust_remote_code: bool = False,
    trust_references: bool = False,
    safe_csv: bool = False,
) -> Any: ...
@overload
def predict(
    folder: str | Path,
    data: None = None,
    out: None = None,
    *,
    rows: object,
    settings: Sequence[str] = (),
    trust_remote_code: bool = False,
    trust_references: bool = False,
    safe_csv: bool = False,
) -> Any: ...
@overload
def predict(
    folder: str | Path,
    data: object | None,
    out: str | Path,
    *,
    rows: object | None = None,
    settings: Sequence[str] = (),
    trust_remote_code: bool = False,
    trust_references: bool = False,
    safe_csv: bool = False,
) -> int: ...
def predict(
    folder: str | Path,
    data: object | None = None,
    out: str | Path | None = None,
    *,
    rows: object | None = None,
    settings: Sequence[str] = (),
    trust_remote_code: bool = False,
    trust_references: bool = False,
    safe_csv: bool = False,
) -> Any:
    """Label rows: each as it was, followed by ``prediction`` and ``probability of LABEL``.

    An added name gets a ``_`` where the rows have a column of that name. Guesses and warnings go to standard error.

    Args:
        folder: a run folder; or a trained classifier alone, as transformers saves it, or its name on the Hub.
        data: rows to label: a source as ``data.source`` takes it, or rows in memory, which may be texts alone. A label
            column is not needed.
        out: file to write, whole or not at all, in bounded memory: .csv, .tsv or .jsonl. None: the rows are returned.
        rows: rows in memory, as ``data`` takes them too.
        settings: ``key=value`` changes of how rows are read (``data.text=review``) or how it is computed (``device``).
        trust_remote_code: run Python code that came with the model, where the run's recipe says that there is some.
        trust_references: run functions of the folder's recipe (``package.module:function``), found in the environment
            and the current folder.
        safe_csv: put an apostrophe before each cell that a spreadsheet would take for a formula; numbers stay. Of
            ``out`` alone.

    Returns:
        The labelled rows: a DataFrame for a DataFrame, else a list of dicts. With ``out`` the number of rows written.

    Raises:
        DataError: the rows cannot be used. RunFolderError: no run is there. ModelError: it has no trained model yet.
        UserError: ``out`` cannot be written, or is of an unknown kind. MemoryFullError: a batch does not fit.

    Example:
        >>> paceline.predict("runs/reviews", ["A wonderful evening."])[0]["prediction"]
        'positive'
    """
    if (data is None) == (rows is None):
        raise UserError("predict: give data or rows", "they are two sources of the same", "predict(folder, data, out)")
    trust = Trust(remote_code=trust_remote_code, references=trust_references)
    from paceline.run.inference import predict_rows
    from paceline.run.predictions import Predictions

    source = str(data) if isinstance(data, str | Path) else None
    given = rows if rows is not None else None if source is not None else data
    found = Predictions()
    with counter("rows labelled") as advance:
        taken, changes = _of_texts(given, settings)
        target = found if out is None else Path(out)
        count = predict_rows(Path(folder), source, target, taken, changes, tell, advance, trust, safe_csv=safe_csv)
    return count if out is not None else _like(given, found)


def _of_texts(rows: object, settings: Sequence[str]) -> tuple[object, Sequence[str]]:
    """Texts alone as rows of one column."""
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, str) for row in rows):
        return [{"text": row} for row in rows], [*settings, "data.text=text"]
    return rows, settings


def _like(given: object, found: Any) -> Any:
    """The rows as they were given: for a DataFrame one with its index and types, and what is added."""
    if not (hasattr(given, "itertuples") and hasattr(given, "columns")):
        return found.rows
    frame: Any = given
    if len(found.rows) != len(frame):  # rows that could not be used were dropped
        return type(frame)(found.rows)
    return frame.assign(**{name: [row[name] for row in found.rows] for name in found.names})
