"""The texts of the samples, read from the source once more: an encoded data set has tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.check.claim import NotApplicable
from paceline.check.subject import Subject
from paceline.contract.errors import UserError

_KEY = "texts"


def texts_of(subject: Subject) -> tuple[Sequence[str], Sequence[str] | None]:
    """The text of each sample of the data set, and the second texts of pairs.

    Raises:
        NotApplicable: the samples are none, or cannot be read twice.
    """
    from paceline.data.sources import read

    if _KEY in subject.kept:
        texts, pairs = subject.kept[_KEY]
        return texts, pairs
    subject.require_texts()
    if subject.prepared.tokenizer is None:
        raise NotApplicable("the samples are bare tokens, and have no tokenizer")
    dataset = subject.dataset
    try:
        table = read(
            subject.recipe.data, task=dataset.kind, rows=subject.rows, head=dataset.label_names, modality="text"
        )
    except UserError as error:
        raise NotApplicable(f"the texts cannot be read twice: {error.what}") from None
    if table.texts is None or len(table) != len(dataset):
        raise NotApplicable("the texts are not as many as the samples: some rows were left out")
    subject.kept[_KEY] = table.texts, table.pairs
    return table.texts, table.pairs
