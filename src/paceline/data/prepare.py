"""From a recipe's data part to an encoded data set: read, split, label, encode, and remember."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.contract.errors import DataError
from paceline.data.builtin import PREFIX, builtin_fingerprint
from paceline.data.cache import FORMAT, DamagedEntry, dataset_fingerprint, load, save
from paceline.data.columns import NoLabelColumn
from paceline.data.dataset import Dataset, Images, Origins, Tokens
from paceline.data.doubts import doubts
from paceline.data.encode import KeepGoing, encode_texts, padding_id, truncate, wanted
from paceline.data.labels import Labels, empty_labels, encode_known_labels, encode_labels, place
from paceline.data.overflow import HEAD, Overflow
from paceline.data.sources.images import Picture
from paceline.data.splits import Ids, duplicate_keys, split_rows
from paceline.data.table import Table
from paceline.recipe.parts import DataPart, TaskPart
from paceline.recipe.places import absolute_data


class TokenizerSource(Protocol):
    """Where a tokenizer comes from: loaded with a model, or trained on the training texts."""

    @property
    def key(self) -> str:
        """Identifies vocabulary and settings: equal keys and equal training texts give equal tokens."""

    def get(self, training_texts: Iterable[str]) -> Any:
        """The tokenizer (of transformers); one that exists already ignores the texts."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A data set but for its tokens: what a model must be built for, known while the texts are still to be encoded."""

    kind: str
    label_names: tuple[str, ...]
    tokenizer: Any
    """That the texts are encoded with; None for images, for bare tokens, and for a data set out of the cache."""
    pad_id: int | None
    """None for images."""
    image_shape: tuple[int, int, int] | None
    """Height, width, channels; None for text."""
    cached: Dataset | None
    """The data set itself, where it came out of the cache."""
    finish: Callable[[KeepGoing], Dataset]
    """Encodes what is not encoded yet, on any thread. Raises DataError, or whatever its argument raises."""


def outline(
    part: DataPart,
    task: TaskPart,
    *,
    tokenizer: TokenizerSource | None,
    modality: str,
    cache: Path | None,
    rows: Any = None,
    quarantine: Path | None = None,
    head: Sequence[str] = (),
    picture: Picture | None = None,
) -> Outline:
    """Read the source, divide its rows into splits and label them; ``finish`` then encodes them.

    The first time, the result is kept under ``cache``. As long as neither the source's content nor a setting that
    matters changes, it is taken from there; the source is then hashed, not parsed.

    Args:
        part: the source and its columns.
        task: what is learned.
        tokenizer: needed for texts.
        modality: what the model takes: ``text``, ``image``, or ``any`` where a user's factory builds it.
        cache: folder of encoded data sets; None: not kept.
        rows: data in memory, which replaces ``part.source`` and is not cached.
        quarantine: file that takes the rows which ``part.on_bad_row: skip`` drops.
        head: class names of the checkpoint's head in index order; see ``encode_labels``.
        picture: the model's own image processor, where it has one that is to be used.

    Raises:
        DataError: the data cannot be used, are not what the model takes, or changed while they were being read.
    """
    from paceline.data.sources import file_states, read, require_unchanged

    states = file_states(part) if rows is None else {}
    content = _content_fingerprint(part) if rows is None and cache is not None else None
    entry = None
    if cache is not None and content is not None:
        entry = cache / _cache_key(content, part, task, _key_of(tokenizer or picture), modality, head)
    damage: tuple[str, ...] = ()
    if entry is not None:
        try:
            found = load(entry)
        except DamagedEntry as error:
            damage = (f"the cached data set {entry} is damaged ({error}) and was made anew",)
        else:
            if found is not None:
                return _outline_of(_put_aside(found, part, task, quarantine, picture, head))
    table = read(part, task=task.type, rows=rows, quarantine=quarantine, picture=picture, head=head, modality=modality)
    if rows is None:
        require_unchanged(part, states, content)
    if task.type not in ("auto", table.kind) and table.kind is not None:
        # files are read as the task has it; what is built in has labels of one kind
        raise DataError(f"task.type = {task.type}: {part.source} is for {table.kind}", fix="leave task.type out")
    remember = (
        _unkept
        if entry is None or table.names_files
        else partial(_remember, entry=entry, quarantine=quarantine, damage=damage)
    )
    return _outline(table, part, tokenizer, modality, remember, head)


def cached(
    part: DataPart,
    task: TaskPart,
    *,
    tokenizer: TokenizerSource | None,
    modality: str,
    cache: Path,
    head: Sequence[str] = (),
    picture: Picture | None = None,
) -> Dataset | None:
    """What ``outline`` would take from ``cache``; None where it would read the source. Arguments are the same.

    Raises:
        DataError: the source cannot be looked at.
    """
    content = _content_fingerprint(part)
    if content is None:
        return None
    try:
        return load(cache / _cache_key(content, part, task, _key_of(tokenizer or picture), modality, head))
    except DamagedEntry:
        return None


def _outline_of(dataset: Dataset) -> Outline:
    return Outline(
        kind=dataset.kind,
        label_names=dataset.label_names,
        tokenizer=None,
        pad_id=dataset.pad_id,
        image_shape=dataset.image_shape,
        cached=dataset,
        finish=lambda keep_going: dataset,
    )


def _outline(
    table: Table,
    part: DataPart,
    source: TokenizerSource | None,
    modality: str,
    remember: Callable[[Dataset], Dataset],
    head: Sequence[str],
) -> Outline:
    """A table's rows split and labelled; ``remember`` is given the data set once it is encoded."""
    if table.labels is None or table.kind is None:
        raise DataError(f"{part.source} has no labels", fix="name the label's column with data.label")
    for name in ("image_size", "image_bits"):
        if table.images is None and (value := getattr(part, name)) != DataPart.model_fields[name].default:
            raise DataError(f"data.{name} = {value}: no effect on texts", fix=f"leave data.{name} out")
    overflow = Overflow.of(part)
    _require_texts(table, part, overflow)
    kind, keys = table.kind, duplicate_keys(table)
    divided = split_rows(table.labels, kind, keys, table.splits, part.splits)
    labels = encode_labels(
        table.labels,
        kind,
        divided.splits,
        table.origins,
        target=table.columns.get("label", "target"),
        allow_single_class=part.allow_single_class,
        head=head,
        order=() if part.label is None or isinstance(part.label, str) else part.label,
    )
    _require_modality(table, part, modality)
    tokenizer = None if table.texts is None else _tokenizer(table, part, source, divided.splits["train"])

    def finish(keep_going: KeepGoing) -> Dataset:
        inputs = _inputs(table, tokenizer, part.max_length, overflow, keep_going)
        notices = table.notices + divided.notices + labels.notices
        if not part.source.startswith(PREFIX):  # what is built in is not the user's to mend
            notices += doubts(table, keys, divided.splits)
        return remember(_dataset(inputs, labels, kind, dict(divided.splits), table.origins, notices))

    pad_id = padding_id(tokenizer) if tokenizer is not None else table.tokens.pad_id if table.tokens else None
    return Outline(
        kind=kind,
        label_names=labels.names,
        tokenizer=tokenizer,
        pad_id=pad_id,
        image_shape=None if table.images is None else Images(table.images).shape,
        cached=None,
        finish=finish,
    )


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a trained model settles about data that it is measured on or labels."""

    tokenizer: Any
    """The tokenizer, one of transformers; None for a model of images or of bare tokens."""
    max_length: int | None
    label_names: tuple[str, ...]
    kind: str
    modality: str
    overflow: Overflow = HEAD
    pairs: bool = False
    """Whether a sample is two texts."""
    image_shape: tuple[int, int, int] | None = None
    """Height, width, channels."""
    picture: Picture | None = None
    """The image processor that the model was trained with; None: images are resized to the model's size."""


def prepare_to_evaluate(part: DataPart, given: Given, *, rows: Any = None) -> Dataset:
    """Labelled data to measure a trained model on; the one split is named ``all``.

    Labels are encoded with the model's own names; a single row, and rows of a single class, will do.

    Raises:
        DataError: the data cannot be used, are not what the model takes, have a label that it does not know, or
            changed while they were being read.
    """
    from paceline.data.sources import file_states, read, require_unchanged

    part = _as_trained(part.model_copy(update={"allow_single_class": True}), given)
    states = file_states(part) if rows is None else {}
    try:
        table = read(
            part, task=given.kind, rows=rows, picture=given.picture, known=given.label_names, modality=given.modality
        )
    except NoLabelColumn as error:
        predict = f"paceline predict RUN {shlex.quote(error.file)}" if rows is None else "paceline.predict(RUN, ROWS)"
        fix = f"{error.fix}; {predict} labels rows that have no label"
        raise DataError(error.problem, file=error.file, why=error.why, fix=fix) from None
    if rows is None:
        require_unchanged(part, states)
    if table.kind != given.kind or table.labels is None:
        raise DataError(
            f"{part.source} is for {table.kind}, but the model was trained for {given.kind}",
            fix=f"give data for {given.kind}, or another model",
        )
    _require_kin(table, part, given)
    labels = encode_known_labels(table.labels, given.kind, given.label_names, table.origins, table.columns.get("label"))
    dataset = _for_inference(table, labels, part, given)
    splits = list(dict.fromkeys(table.splits or ()))
    if len(splits) < 2:
        return dataset
    notice = f"{part.source}: all of {' and '.join(splits)} is measured together; name the file or folder of one split"
    return replace(dataset, notices=(*dataset.notices, notice))


def prepare_to_predict(
    part: DataPart, given: Given, size: int, *, rows: Any = None, tell: Callable[[str], None]
) -> Iterator[tuple[Dataset, Table]]:
    """Rows to predict for, at most ``size`` at a time: with labels of zero, and as they were in the source.

    Raises:
        DataError: from iteration; the rows cannot be used, or are not what the model takes.
    """
    from paceline.data.sources import read_unlabelled

    part = _as_trained(part, given)
    modality = given.modality
    for table in read_unlabelled(part, size, rows=rows, tell=tell, picture=given.picture, modality=modality):
        _require_kin(table, part, given)
        labels = empty_labels(len(table), given.kind, given.label_names)
        yield _for_inference(table, labels, part, given), table


def _as_trained(part: DataPart, given: Given) -> DataPart:
    """A data part that asks for samples as the model knows them.

    Images are brought to its size, as the image processor beside the saved model does; a second text is only looked
    for by a model of pairs.
    """
    changed: dict[str, Any] = {} if given.pairs else {"pair": None}
    shape = given.image_shape
    if shape is not None and given.picture is None and part.image_size is None and shape[0] == shape[1]:
        changed["image_size"] = shape[0]
    return part.model_copy(update=changed)


def _require_kin(table: Table, part: DataPart, given: Given) -> None:
    """Refuse samples of another kind than those the model was trained on."""
    _require_modality(table, part, given.modality)
    if given.pairs and table.texts is not None and table.pairs is None:
        raise DataError(
            "the second text is missing",
            file=table.origins.files[0],
            why=f"the model was trained on pairs of texts, and only column {table.columns.get('text')!r} was found",
            fix="name both: --set data.text=COLUMN --set data.pair=COLUMN; typed ones: --text TEXT --pair TEXT",
        )
    if given.tokenizer is not None and table.tokens is not None:
        raise DataError(
            f"{part.source} holds bare tokens, but the model was trained on texts",
            why="its vocabulary is another",
            fix="give texts",
        )
    if given.tokenizer is None and table.texts is not None:
        raise DataError(
            f"{part.source} holds texts, but the model was trained on bare tokens",
            why="there is no tokenizer that makes tokens of them",
            fix="train it on texts",
        )


def _for_inference(table: Table, labels: Labels, part: DataPart, given: Given) -> Dataset:
    everything = np.arange(len(table), dtype=np.int64)
    _require_texts(table, part, given.overflow)
    inputs = _inputs(table, given.tokenizer, given.max_length or part.max_length, given.overflow)
    if isinstance(inputs, Images) and given.image_shape is not None:
        inputs = Images(_of_shape(inputs.pixels, given.image_shape, part))
    return _dataset(inputs, labels, given.kind, {"all": everything}, table.origins, table.notices + labels.notices)


def _of_shape(pixels: NDArray[np.uint8], shape: tuple[int, int, int], part: DataPart) -> NDArray[np.uint8]:
    """Pixels [n, height, width, channels] as the model takes them: grey is a colour, too, but not the reverse."""
    found, wanted = pixels.shape[1:], tuple(shape)
    if found[2] == 1 and wanted[2] == 3:
        pixels = np.broadcast_to(pixels, (*pixels.shape[:3], 3))
        found = pixels.shape[1:]
    if found != wanted:
        colours = {1: "grey", 3: "in colour"}
        raise DataError(
            f"{part.source}: the images are {_size(found)} and {colours.get(found[2], found[2])}",
            why=f"the model was trained on images of {_size(wanted)}, {colours.get(wanted[2], wanted[2])}",
            fix="convert the images to what it was trained on",
        )
    return pixels


def _size(shape: Sequence[int]) -> str:
    return f"{shape[1]} × {shape[0]} pixels"


def _tokenizer(table: Table, part: DataPart, source: TokenizerSource | None, train: Ids) -> Any:
    if source is None:
        raise DataError(
            f"{part.source} holds texts, but the model comes without a tokenizer",
            fix="name one with model.tokenizer (a Hub name or a folder)",
        )
    return source.get(_training_texts(table, train))


def _require_texts(table: Table, part: DataPart, overflow: Overflow) -> None:
    """Refuse another choice than ``head`` where there is nothing to choose."""
    if overflow.kind != HEAD.kind and table.texts is None:
        held = "images" if table.images is not None else "bare tokens, of which none is known to be special"
        raise DataError(
            f"data.overflow = {overflow.kind}: no effect on {part.source}",
            why=f"it says what is kept of a long text, and these are {held}",
            fix="leave data.overflow out",
        )


def _inputs(
    table: Table, tokenizer: Any, max_length: int, overflow: Overflow, keep_going: KeepGoing = wanted
) -> Tokens | Images:
    if table.images is not None:
        return Images(table.images)
    if table.tokens is not None:
        return truncate(table.tokens, max_length)
    assert table.texts is not None
    tokens = encode_texts(tokenizer, table.texts, table.pairs, max_length, overflow, keep_going=keep_going)
    empty = np.flatnonzero(tokens.lengths == 0)
    if len(empty):
        raise DataError(
            "the tokenizer finds no token in this text",
            **place(table.origins, int(empty[0])),
            found=table.texts[empty[0]],
            fix="remove the row",
        )
    return tokens


def _require_modality(table: Table, part: DataPart, modality: str) -> None:
    holds = "text" if table.images is None else "image"
    if modality not in (holds, "any"):
        raise DataError(
            f"{part.source} holds {holds} data, but the model takes {modality} data",
            fix=f"choose a model for {holds} data, or other data",
        )


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


def _put_aside(
    found: Dataset,
    part: DataPart,
    task: TaskPart,
    quarantine: Path | None,
    picture: Picture | None,
    head: Sequence[str],
) -> Dataset:
    """A data set out of the cache, with the rows that were dropped from it in this run's file too.

    They are found in the source again: it is the same, and nothing is encoded.
    """
    from paceline.data.sources import read

    if quarantine is None or part.on_bad_row == "stop" or not found.notices:
        return found
    modality = "image" if isinstance(found.inputs, Images) else "text"
    told = read(part, task=task.type, quarantine=quarantine, picture=picture, head=head, modality=modality).notices
    return replace(found, notices=told + found.notices[len(told) :])


def _unkept(dataset: Dataset) -> Dataset:
    return dataset


def _remember(dataset: Dataset, entry: Path, quarantine: Path | None, damage: tuple[str, ...]) -> Dataset:
    """Keep the data set for the next time and go on with the memory-mapped one, which the system may page out."""
    notices = dataset.notices + damage
    # whoever takes it from there has a quarantine of its own, or none
    plain = tuple(notice.removesuffix(f"; see {quarantine}") for notice in dataset.notices)
    try:
        save(replace(dataset, notices=plain), entry)
    except OSError as error:
        # a cache is a convenience: the run goes on without it, and says so
        lost = f"the encoded data set cannot be kept in {entry.parent} ({error}): the next run encodes it again"
        return replace(dataset, notices=(*notices, lost))
    try:
        found = load(entry)
    except DamagedEntry:
        found = None  # another process is just replacing the entry by its own
    return replace(dataset if found is None else found, notices=notices)


def _content_fingerprint(part: DataPart) -> str | None:
    """Digest of what the source holds; None for a source that does not say whether it has changed."""
    if part.source.startswith(PREFIX):
        return builtin_fingerprint(part)
    from paceline.data.sources import source_fingerprint

    return source_fingerprint(part)


def _key_of(encodes: TokenizerSource | Picture | None) -> str | None:
    return None if encodes is None else encodes.key


def _cache_key(
    content: str,
    part: DataPart,
    task: TaskPart,
    tokenizer: str | None,
    modality: str,
    head: Sequence[str],
) -> str:
    """Name of the entry: everything that decides what an encoded data set looks like."""
    # absolute, so that a run finds the entry from every folder
    idle = {"max_length", "augment", "resident", "pad_to_multiple_of", "aggregate"}
    settings = absolute_data(part).model_dump(mode="json", exclude=idle)
    decides = [FORMAT, content, settings, task.type, tokenizer, part.max_length, modality, list(head)]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]
