"""From a recipe's data part to an encoded data set: read, deal, label, encode, and remember."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.data.builtin import PREFIX, builtin_fingerprint
from paceline.data.cache import FORMAT, DamagedEntry, dataset_fingerprint, load, save
from paceline.data.dataset import Dataset, Images, Origins, Tokens
from paceline.data.encode import encode_texts, truncate
from paceline.data.labels import Labels, empty_labels, encode_known_labels, encode_labels, place
from paceline.data.splits import Ids, deal, duplicate_keys
from paceline.data.table import Table
from paceline.errors import DataError
from paceline.recipe.parts import DataPart, TaskPart


class TokenizerSource(Protocol):
    """Where a tokenizer comes from: loaded with a model, or trained on the training texts."""

    @property
    def key(self) -> str:
        """Identifies vocabulary and settings: equal keys and equal training texts give equal tokens."""

    def get(self, training_texts: Iterable[str]) -> Any:
        """The tokenizer (of transformers); one that exists already ignores the texts."""


def prepare(
    part: DataPart,
    task: TaskPart,
    *,
    tokenizer: TokenizerSource | None,
    max_length: int | None,
    modality: str,
    cache: Path | None,
    rows: Any = None,
    quarantine: Path | None = None,
) -> Dataset:
    """The data set to train on, validate with and test on.

    The first time, the source is read, its rows dealt into splits, labelled and encoded, and the result is kept under
    ``cache``. As long as neither the source's content nor a setting that matters changes, it is taken from there; the
    source is then hashed, not parsed.

    Args:
        part: the source and its columns.
        task: what is learned.
        tokenizer: needed for texts.
        max_length: tokens kept of a sample; None: ``part.max_length``.
        modality: ``text`` or ``image``: what the model takes.
        cache: folder of encoded data sets; None: not kept.
        rows: data in memory, which replaces ``part.source`` and is not cached.
        quarantine: file that takes the rows which ``part.on_bad_row: skip`` drops.

    Raises:
        DataError: the data cannot be used, or are not what the model takes.
    """
    from paceline.data.sources import read

    length = max_length or part.max_length
    entry = None
    if rows is None and cache is not None:
        content = _content_fingerprint(part)
        if content is not None:
            key = None if tokenizer is None else tokenizer.key
            entry = cache / _cache_key(content, part, task, key, length, modality)
    damage: tuple[str, ...] = ()
    if entry is not None:
        try:
            found = load(entry)
        except DamagedEntry as error:
            damage = (f"the cached data set {entry} is damaged ({error}) and was made anew",)
        else:
            if found is not None:
                return found
    table = read(part, task=task.type, rows=rows, quarantine=quarantine)
    dataset = _encode(table, part, tokenizer, length, modality)
    if entry is None:
        return dataset
    return _remember(dataset, entry, damage)


def prepare_for_inference(
    part: DataPart,
    *,
    tokenizer: TokenizerSource | None,
    max_length: int | None,
    label_names: tuple[str, ...],
    kind: str,
    labelled: bool,
    rows: Any = None,
    modality: str = "text",
) -> tuple[Dataset, Table]:
    """Data to evaluate a trained model on (``labelled``) or to predict for; the one split is named ``all``.

    Labels are encoded with the model's ``label_names``; without labels they are zeros. The table has ``rows``, the
    original rows in the order of the samples.

    Raises:
        DataError: the data cannot be used, are not what the model takes, or have a label that it does not know.
    """
    from paceline.data.sources import read

    # one class is too few to learn from, but not to be measured on
    single = part.model_copy(update={"allow_single_class": True})
    table = read(single, task=kind, rows=rows, labelled=labelled, keep_rows=True)
    if labelled and table.kind != kind:
        raise DataError(f"{part.source} is for {table.kind}, but the model was trained for {kind}")
    everything = np.arange(len(table), dtype=np.int64)
    if labelled and table.labels is not None:
        labels = encode_known_labels(table.labels, kind, label_names, table.origins)
    else:
        labels = empty_labels(len(table), kind, label_names)
    inputs = _inputs(table, part, tokenizer, max_length or part.max_length, modality, everything)
    return _dataset(inputs, labels, kind, {"all": everything}, table.origins, table.notices), table


def _encode(table: Table, part: DataPart, tokenizer: TokenizerSource | None, max_length: int, modality: str) -> Dataset:
    """A table's rows dealt, labelled and encoded."""
    if table.labels is None or table.kind is None:
        raise DataError(f"{part.source} has no labels", fix="name the label's column with data.label")
    dealt = deal(table.labels, table.kind, duplicate_keys(table), table.splits, part.splits)
    labels = encode_labels(
        table.labels,
        table.kind,
        dealt.splits,
        table.origins,
        target=table.columns.get("label", "target"),
        allow_single_class=part.allow_single_class,
    )
    inputs = _inputs(table, part, tokenizer, max_length, modality, dealt.splits["train"])
    return _dataset(inputs, labels, table.kind, dict(dealt.splits), table.origins, table.notices + dealt.notices)


def _inputs(
    table: Table, part: DataPart, tokenizer: TokenizerSource | None, max_length: int, modality: str, train: Ids
) -> Tokens | Images:
    holds = "text" if table.images is None else "image"
    if holds != modality:
        raise DataError(
            f"{part.source} holds {holds} data, but the model takes {modality} data",
            fix=f"choose a model for {holds} data, or other data",
        )
    if table.images is not None:
        return Images(table.images)
    if table.tokens is not None:
        return truncate(table.tokens, max_length)
    assert table.texts is not None
    if tokenizer is None:
        raise DataError(
            f"{part.source} holds texts, but the model comes without a tokenizer",
            fix="name one with model.tokenizer (a Hub name or a folder)",
        )
    tokens = encode_texts(tokenizer.get(_training_texts(table, train)), table.texts, table.pairs, max_length)
    empty = np.flatnonzero(tokens.lengths == 0)
    if len(empty):
        raise DataError(
            "the tokenizer finds no token in this text",
            **place(table.origins, int(empty[0])),
            found=table.texts[empty[0]],
            fix="remove the row",
        )
    return tokens


def _training_texts(table: Table, train: Ids) -> Iterator[str]:
    for sample in train:
        for texts in (table.texts, table.pairs):
            if texts is not None:
                yield texts[sample]


def _dataset(
    inputs: Tokens | Images,
    labels: Labels,
    kind: str,
    splits: dict[str, Ids],
    origins: Origins,
    notices: tuple[str, ...],
) -> Dataset:
    return Dataset(
        inputs=inputs,
        labels=labels.values,
        kind=kind,
        label_names=labels.names,
        splits=splits,
        origins=origins,
        fingerprint=dataset_fingerprint(inputs, labels.values, kind, labels.names, splits),
        notices=notices,
    )


def _remember(dataset: Dataset, entry: Path, notices: tuple[str, ...]) -> Dataset:
    """Keep the data set for the next time and go on with the memory-mapped one, which the system may page out."""
    try:
        save(dataset, entry)
    except OSError as error:
        # a cache is a convenience: the run goes on without it, and says so
        lost = f"the encoded data set cannot be kept in {entry.parent} ({error}): the next run encodes it again"
        return replace(dataset, notices=(*dataset.notices, *notices, lost))
    try:
        found = load(entry)
    except DamagedEntry:
        found = None  # another process is just replacing the entry by its own
    if found is None:
        found = dataset
    return replace(found, notices=found.notices + notices)


def _content_fingerprint(part: DataPart) -> str | None:
    if part.source.startswith(PREFIX):
        return builtin_fingerprint(part)
    from paceline.data.sources import source_fingerprint

    return source_fingerprint(part)


def _cache_key(
    content: str, part: DataPart, task: TaskPart, tokenizer: str | None, max_length: int, modality: str
) -> str:
    """Name of the entry: everything that decides what an encoded data set looks like."""
    settings = part.model_dump(mode="json", exclude={"max_length"})
    decides = [FORMAT, content, settings, task.type, tokenizer, max_length, modality]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]
