"""``paceline predict``: labels and probabilities for rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from paceline.contract.errors import UserError, excerpt
from paceline.contract.exclusive import exclusive
from paceline.contract.python_fixes import python_fixes
from paceline.recipe.trust import Trust
from paceline.verbs.notices import counter, tell

if TYPE_CHECKING:
    from paceline.run.predictions import Predictions


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
@python_fixes()
@exclusive("paceline.predict", trains=False)
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
        data: rows to label: a source as ``data.source`` takes it, or rows in memory as ``train`` takes them, which may
            also be texts or images alone. A label column is not needed.
        out: file to write, whole or not at all, in bounded memory: .csv, .tsv or .jsonl. None: the rows are returned.
        rows: rows in memory, as ``data`` takes them too.
        settings: ``key=value`` changes of how rows are read (``data.text=review``) or how it is computed (``device``).
        trust_remote_code: run Python code that came with the model, where the run's recipe says that there is some.
        trust_references: run functions of the folder's recipe (``package.module:function``), found in the environment
            and the current folder.
        safe_csv: put an apostrophe before each cell that a spreadsheet would take for a formula; numbers stay. Of
            ``out`` alone.

    Returns:
        The labelled rows: a DataFrame for a DataFrame or a Series, with the index and the types of the rows that could
        be used, else a list of dicts. With ``out`` the number of rows written.

    Raises:
        DataError: the rows cannot be used. RunFolderError: no run is there. ModelError: it has no trained model yet.
        UserError: ``out`` cannot be written, or is of an unknown kind; another thread of this process trains.
        MemoryFullError: a batch does not fit.

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
    if isinstance(data, str):
        _require_no_text(data)
    given = rows if rows is not None else None if source is not None else data
    found = Predictions()
    with counter("rows labelled") as advance:
        target = found if out is None else Path(out)
        count = predict_rows(Path(folder), source, target, given, settings, tell, advance, trust, safe_csv=safe_csv)
    return count if out is not None else _like(given, found)


def _require_no_text(source: str) -> None:
    """Refuse a source that reads as a text to label, where a file or folder is to be named.

    Raises:
        UserError: nothing is there under that name, and it has blanks or neither a folder nor a suffix.
    """
    is_prefixed = source.startswith(("hub:", "builtin:"))
    is_path = not any(map(str.isspace, source)) and ("/" in source or Path(source).suffix not in ("", "."))
    with contextlib.suppress(OSError):  # a name too long for a file
        if is_prefixed or is_path or source == "-" or Path(source).expanduser().exists():
            return
    raise UserError(
        f"{excerpt(source)}: no such file or folder",
        "it names where rows are; a text to label is written otherwise",
        'predict(run, ["TEXT"]); paceline predict RUN --text "TEXT"; or correct the path',
    )


def _like(given: Any, found: Predictions) -> Any:
    """The labelled rows as the type they were given in.

    A DataFrame keeps the index and the types of the rows that are left, so that a column of the result can be put
    back; a Series becomes such a frame. For all else a list of dicts.
    """
    added = {name: [row[name] for row in found.rows] for name in found.names}
    places = [line - 1 for line in found.lines]
    if hasattr(given, "iloc") and hasattr(given, "index"):  # pandas
        frame = given if hasattr(given, "columns") else given.to_frame("text")
        return (frame if len(places) == len(frame) else frame.iloc[places]).assign(**added)
    if hasattr(given, "iter_rows") and hasattr(given, "hstack"):  # polars
        return given[places].hstack(type(given)(added))
    return found.rows
