"""Which column plays which role: named in the recipe, or found by its name and reported as a guess."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paceline.contract.errors import DataError, excerpt, nearest
from paceline.contract.label_names import listed
from paceline.recipe.parts import DataPart

TEXT_NAMES = (
    ("text", "texts", "文本"),
    (
        *("内容", "评论", "评价", "正文", "句子"),
        *("sentence", "review", "content", "document", "comment", "body", "message", "tweet", "post", "article"),
        *("utterance", "passage", "review_text", "full_text", "comment_text"),
    ),
    ("question", "query", "title", "headline", "subject", "description", "summary", "prompt", "input", "标题", "问题"),
)
"""Names of text columns by rank: a name of an earlier rank wins, two of the same rank are ambiguous."""

_ALL_TEXT_NAMES = frozenset(name for rank in TEXT_NAMES for name in rank)

PAIR_NAMES = (
    ("sentence1", "sentence2"),
    ("sentence_1", "sentence_2"),
    ("sentence_a", "sentence_b"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question_1", "question_2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("text_1", "text_2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question", "answer"),
    ("query", "passage"),
    ("query", "document"),
    ("claim", "evidence"),
    ("句子1", "句子2"),
    ("文本1", "文本2"),
)
"""Column names that belong together as first and second text."""

IMAGE_NAMES = (
    ("image", "images", "img", "picture", "pixel_values", "图片", "图像"),
    ("file_name", "filename", "image_path", "image_file", "img_path", "filepath", "file_path", "path", "file"),
)
"""Names of image columns by rank."""

LABEL_NAMES = (
    ("label", "labels", "标签"),
    ("class", "classes", "target", "targets", "category", "categories", "类别", "分类"),
    ("sentiment", "score", "rating", "stars", "y", "emotion", "intent", "topic", "情感", "评分"),
)
"""Names of label columns by rank, as for texts."""

SPLIT_NAMES = (("split", "fold", "subset", "partition"),)

_LISTED = 30
"""Columns that a message names."""

IDENTIFIER_NAMES = frozenset({"id", "ids", "idx", "index", "guid", "uuid", "uid", "file", "filename", "path", "url"})
"""Columns that hold words and are still no text to learn from."""

SPLITS = {
    **dict.fromkeys(("train", "training", "训练", "训练集"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "development", "eval", "验证", "验证集"), "validation"),
    **dict.fromkeys(("test", "testing", "测试", "测试集"), "test"),
}
"""How a split may be written, in lower case, and its name here."""

_LONGEST_TYPED = 80
"""Letters of a column's name that a fix spells out."""


def column_list(names: Sequence[str]) -> str:
    """Names of columns for a message: the first of them, shortened."""
    return listed([excerpt(name) for name in names[:_LISTED]] + list(names[_LISTED:]), _LISTED)


def known_names() -> frozenset[str]:
    """Names by which columns are found, or known to be none of those; as ``normal`` gives them."""
    ranks = (*TEXT_NAMES, *PAIR_NAMES, *IMAGE_NAMES, *LABEL_NAMES, *SPLIT_NAMES)
    return frozenset(name for rank in ranks for name in rank) | IDENTIFIER_NAMES


class NoLabelColumn(DataError):
    """A table without the column of the label."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The columns that are read."""

    content: str
    """Column of the text, or of the image."""
    is_image: bool = False
    pair: str | None = None
    label: tuple[str, ...] = ()
    """One column, several 0/1 columns, or none when labels are not read."""
    places: tuple[str, ...] = ()
    """Names of the classes by place, where the one label column holds lists of 0 and 1."""
    split: str | None = None
    notices: tuple[str, ...] = ()
    """One sentence for each guess."""

    @property
    def columns(self) -> dict[str, str]:
        """Role -> column name; several label columns are joined by commas."""
        found = {"image" if self.is_image else "text": self.content}
        found |= {"pair": self.pair} if self.pair else {}
        found |= {"label": ",".join(self.label)} if self.label else {}
        return found | ({"split": self.split} if self.split else {})


def find_roles(
    part: DataPart,
    columns: Sequence[str],
    sample: Sequence[Mapping[str, Any]],
    *,
    file: str,
    labelled: bool = True,
    image_columns: Sequence[str] = (),
    picture_names: Sequence[str] = (),
    modality: str = "any",
) -> Roles:
    """The role of each column of a file.

    Args:
        part: the recipe's data part; what it names is taken as it is, ``auto`` is found by name.
        columns: the file's columns.
        sample: a few of its rows, consulted when no name is known.
        file: for messages.
        labelled: whether a label is needed; when not, neither label nor split is read.
        image_columns: columns that hold images.
        picture_names: columns that name files of images, which are no texts.
        modality: ``image`` takes images where there are texts, too; ``text`` takes no names of files.

    Raises:
        DataError: a named column is missing, or a role cannot be found or is ambiguous; lists the columns.
    """
    search = _Search(columns, file)
    label = _label(part, search) if labelled else ()
    places = part.label if isinstance(part.label, tuple) and label and label[0] not in part.label else ()
    split = _split(part, search) if labelled else None
    taken = {*label, *([split] if split else [])} if labelled else _set_aside(part, columns)
    usable = [name for name in (*image_columns, *(picture_names if modality != "text" else ())) if name not in taken]
    is_image = part.text in usable
    no_texts = {*taken, *picture_names}
    if part.text == "auto" and usable and (modality == "image" or not _has_text(search, no_texts)):
        content, pair, is_image = _image(search, usable), None, True
    else:
        content, pair = _texts(part, search, sample, no_texts)
    playing = [name for name in (content, pair, *label, split) if name]
    if len(set(playing)) < len(playing):
        twice = next(name for name in playing if playing.count(name) > 1)
        raise DataError(
            f"column {twice!r} has two roles",
            file=file,
            why=f"text: {content}, second text: {pair}, label: {', '.join(label)}, split: {split}",
            fix=f"--set data.text=COLUMN --set data.label=COLUMN, of {search.listing}",
        )
    roles = Roles(content=content, is_image=is_image, pair=pair, label=label, places=places, split=split)
    unread = [name for name in columns if normal(name) in _ALL_TEXT_NAMES and name not in playing] if labelled else []
    return replace(roles, notices=tuple(_guesses(part, roles, unread)))


def _guesses(part: DataPart, roles: Roles, unread: Sequence[str]) -> Iterable[str]:
    if part.text == "auto":
        what = "image" if roles.is_image else "text"
        yield f"{what} column: {roles.content!r} (guessed; --set data.text=... to change)"
        if unread and not roles.is_image:
            told = f"text columns that are not read: {', '.join(map(repr, unread))}"
            if part.pair == "auto" and roles.pair is None:
                both = shlex.join(["--set", f"data.text={unread[0]}", "--set", f"data.pair={roles.content}"])
                told += f" ({both} reads two of them, as a pair of texts)"
            yield told
    if part.pair == "auto" and roles.pair:
        yield f"second text column: {roles.pair!r} (guessed; --set data.pair=null for none)"
    if (part.label == "auto" or roles.places) and roles.label:
        yield f"label column: {roles.label[0]!r} (guessed; --set data.label=... to change)"
    if part.split == "auto" and roles.split:
        yield f"split column: {roles.split!r} (guessed; --set data.split=null to ignore it)"


@dataclass(frozen=True)
class _Search:
    """Columns by their normalised names."""

    names: Sequence[str]
    file: str

    @property
    def listing(self) -> str:
        return column_list(self.names)

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.names)

    def named(self, name: str, setting: str) -> str:
        if name in self._known:
            return name
        kind = NoLabelColumn if setting == "data.label" else DataError
        raise kind(
            f"no column {name!r}",
            file=self.file,
            why=f"the columns are {self.listing}; {nearest(name, self.names)}",
            fix=f"--set {setting}=COLUMN",
        )

    def by_rank(self, ranks: Sequence[Sequence[str]], taken: Iterable[str], role: str) -> str | None:
        """The one free column whose name is of the earliest rank; None when no name is known."""
        gone = set(taken)
        free = [name for name in self.names if name not in gone]
        for rank in ranks:
            found = [name for name in free if normal(name) in rank]
            if len(found) > 1:
                raise self.ambiguous(role, found)
            if found:
                return found[0]
        return None

    def ambiguous(self, role: str, found: Sequence[str]) -> DataError:
        return DataError(
            f"which column is the {role}?",
            file=self.file,
            why=f"{column_list(found)} could each be it; the columns are {self.listing}",
            fix=f"--set data.{role}={found[0]}",
        )

    def unknown(self, role: str, taken: Iterable[str] = ()) -> DataError:
        """Return the error for a role that no column's name is known for; one that is left can only be it."""
        free = [name for name in self.names if name not in {*taken} and normal(name) not in known_names()]
        column = free[0] if len(free) == 1 and len(free[0]) <= _LONGEST_TYPED else "COLUMN"
        is_delimited = self.file.removesuffix(".gz").endswith((".csv", ".tsv", ".txt"))
        header = "; if the first line is data, add a line before it that names the columns, for example text,label"
        kind = NoLabelColumn if role == "label" else DataError
        return kind(
            f"no {role} column found",
            file=self.file,
            why=f"none of the columns {self.listing} has a name known for it",
            fix=f"--set data.{role}={column}{header if is_delimited else ''}",
        )


def normal(name: str) -> str:
    """A column's name as names are compared: lower case, ``_`` for blanks and hyphens."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _set_aside(part: DataPart, columns: Sequence[str]) -> set[str]:
    """Columns of unlabelled rows that are no text either, should labels or splits happen to be there."""
    named = {*((part.label,) if isinstance(part.label, str) else part.label), part.split}
    known = {name for rank in (*LABEL_NAMES[:2], *SPLIT_NAMES) for name in rank}
    return {name for name in columns if name in named or normal(name) in known} - {part.text, part.pair}


def _label(part: DataPart, search: _Search) -> tuple[str, ...]:
    taken = [name for name in (part.text, part.pair, part.split) if name]
    if isinstance(part.label, tuple):
        is_columns = not part.label or set(part.label) & set(search.names)
        if not is_columns and (column := search.by_rank(LABEL_NAMES, taken, "label")):
            return (column,)  # the list names its classes by place
        found = tuple(search.named(name, "data.label") for name in part.label)
        if len(set(found)) < len(found) or not found:
            raise DataError(
                f"data.label = {list(found)}", why="a column is named twice, or none", fix="name each column once"
            )
        return found
    if part.label != "auto":
        return (search.named(part.label, "data.label"),)
    guess = search.by_rank(LABEL_NAMES, taken, "label")
    if guess is None:
        raise search.unknown("label", taken)
    return (guess,)


def _split(part: DataPart, search: _Search) -> str | None:
    if part.split is None:
        return None
    if part.split != "auto":
        return search.named(part.split, "data.split")
    return search.by_rank(SPLIT_NAMES, [], "split")


def _has_text(search: _Search, taken: Iterable[str]) -> bool:
    return search.by_rank(TEXT_NAMES[:2], taken, "text") is not None


def _image(search: _Search, image_columns: Sequence[str]) -> str:
    ranked = ([name for name in image_columns if normal(name) in rank] for rank in IMAGE_NAMES)
    known = next(filter(None, ranked), list(image_columns))
    if len(known) > 1:
        raise search.ambiguous("text", known)
    return known[0]


def _texts(
    part: DataPart, search: _Search, sample: Sequence[Mapping[str, Any]], taken: set[str]
) -> tuple[str, str | None]:
    """The text's column and that of its second text, if any."""
    given_pair = search.named(part.pair, "data.pair") if part.pair not in (None, "auto") and part.pair else None
    if part.text != "auto":
        text = search.named(part.text, "data.text")
        if part.pair != "auto":
            return text, given_pair
        seconds = {second for first, second in PAIR_NAMES if first == normal(text)}
        return text, next((name for name in search.names if normal(name) in seconds and name not in taken), None)
    if part.pair == "auto" and search.by_rank(TEXT_NAMES[:1], taken, "text") is None:
        free = {normal(name): name for name in search.names if name not in taken}
        for first, second in PAIR_NAMES:
            if first in free and second in free:
                return free[first], free[second]
    reserved = taken | ({given_pair} if given_pair else set())
    guess = search.by_rank(TEXT_NAMES, reserved, "text")
    return guess or _only_text(search, sample, reserved), given_pair


def _only_text(search: _Search, sample: Sequence[Mapping[str, Any]], taken: set[str]) -> str:
    """The one column that holds words, when no name is known."""
    free = [name for name in search.names if name not in taken and normal(name) not in IDENTIFIER_NAMES]
    wordy = [name for name in free if any(_has_words(row.get(name)) for row in sample)]
    if len(wordy) > 1:
        raise search.ambiguous("text", wordy)
    if not wordy:
        raise search.unknown("text")
    return wordy[0]


def _has_words(value: object) -> bool:
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False
