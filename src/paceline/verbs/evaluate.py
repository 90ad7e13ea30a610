"""``paceline evaluate``: a saved model, measured on labelled data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.errors import UserError
from paceline.contract.exclusive import exclusive
from paceline.contract.python_fixes import python_fixes
from paceline.machine.cluster import TIMEOUT_SECONDS, Place
from paceline.recipe.trust import Trust
from paceline.verbs.notices import tell

if TYPE_CHECKING:
    from paceline.contract.records import EvaluationRecord


@python_fixes()
@exclusive("paceline.evaluate", trains=False)
def evaluate(
    folder: str | Path,
    *,
    data: object | None = None,
    rows: object | None = None,
    split: str = "test",
    settings: Sequence[str] = (),
    trust_remote_code: bool = False,
    trust_references: bool = False,
    place: Place | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> EvaluationRecord:
    """Loss and metrics of a saved model.

    Guesses and warnings about ``data`` go to standard error.

    Args:
        folder: a run folder; or a trained classifier alone, as transformers saves it, or its name on the Hub. That
            has no data of its own.
        data: labelled data, a source as ``data.source`` takes it or rows in memory as ``train`` takes them; None: the
            run's own, its ``split``.
        rows: rows in memory, as ``data`` takes them too.
        split: which of the run's own splits; with ``data`` only a name in the result.
        settings: ``key=value`` changes of how data are read (``data.text=review``) or how it is computed (``device``).
        trust_remote_code: run Python code that came with the model, where the run's recipe says that there is some.
        trust_references: run functions of the folder's recipe (``package.module:function``), found in the environment
            and the current folder.
        place: who this process is among ranks that all evaluate, each its share; None: alone.
        timeout_seconds: how long ranks wait for one another.

    Returns:
        What was measured, the same on every rank.

    Raises:
        UserError: the folder's recipe would run code that nobody has allowed; both ``data`` and ``rows`` are given;
            another thread of this process trains.
        RunFolderError: no run is there. DataError: the data cannot be used, or have a label unknown to the model.
        MemoryFullError: a batch does not fit; it names the setting.
    """
    if data is not None and rows is not None:
        raise UserError(
            "evaluate: give data or rows", "they are two sources of the same", "evaluate(folder, data=data)"
        )
    trust = Trust(remote_code=trust_remote_code, references=trust_references)
    from paceline.run.inference import evaluate_saved

    source = str(data) if isinstance(data, str | Path) else None
    rows = data if source is None and data is not None else rows
    return evaluate_saved(
        Path(folder), source, rows, split, settings, tell, trust, place or Place(), timeout_seconds=timeout_seconds
    )
