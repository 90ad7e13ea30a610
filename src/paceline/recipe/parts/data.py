"""Where the samples are, what they mean, and how they are changed."""

from __future__ import annotations

from encodings.aliases import aliases
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from paceline.contract.errors import close_words
from paceline.recipe.parts.part import (
    AS_TYPED,
    EXECUTION,
    Columns,
    Part,
    SettingError,
    Switch,
    read_punctuation,
    share_or_count,
)
from paceline.recipe.techniques import entry_of

_OWN = "data.normalise=own"


class SplitsPart(Part):
    """How rows without a given split are divided: a share below 1, a number of rows from 1, or the rest (null)."""

    train: float | int | None = Field(None, ge=0, description="Null: everything that the others leave.")
    validation: float | int = Field(0.1, ge=0, description="Share or number of rows; 0 for none.")
    test: float | int = Field(0.1, ge=0, description="Share or number of rows; 0 for none.")
    seed: int = Field(0, ge=0, description="Of the split alone, so that runs with other seeds share their splits.")

    _usable = field_validator("train", "validation", "test")(share_or_count)

    @model_validator(mode="after")
    def _sums(self) -> Self:
        shares = [v for v in (self.train, self.validation, self.test) if v is not None and 0 < v < 1]
        if sum(shares) > 1 + 1e-9 or (self.train is None and abs(sum(shares) - 1) < 1e-9):
            raise SettingError(
                f"shares add up to {sum(shares):g}, which leaves nothing for the rest",
                ".validation=0.1",
                ".test=0.1",
                ".train=null",
            )
        return self


class RandomPart(Part):
    """Shapes of ``builtin:random``, for memory and speed runs."""

    samples: int = Field(512, ge=2, le=2**40, description="Number of samples.")
    classes: int = Field(2, ge=1, le=2**31, description="Number of labels.")
    length: int | tuple[int, int] = Field(512, description="Tokens a sequence, or the range they are drawn from.")
    vocabulary: int = Field(30000, ge=200, le=2**31, description="Number of token ids; drawn from 100 up to it.")
    image: tuple[int, int, int] | None = Field(None, description="Height, width, channels: images, not tokens.")


class AugmentPart(Part):
    """Random changes of training images, drawn anew each time an image is seen; 0 or false: none."""

    flip: bool = Field(False, description="Mirror left and right, every second time, by chance.")
    crop: int = Field(0, ge=0, description="Shift by up to this many pixels each way; what is uncovered is black.")
    cutout: int = Field(0, ge=0, description="Blank a square of this many pixels a side.")

    mixup: float = Field(0.0, ge=0, allow_inf_nan=False, description=entry_of("mixup").description)
    cutmix: float = Field(0.0, ge=0, allow_inf_nan=False, description=entry_of("cutmix").description)

    @property
    def any(self) -> bool:
        """Whether anything is changed at all."""
        return self.changes_each or self.mixes

    @property
    def changes_each(self) -> bool:
        """Whether images are changed by themselves."""
        return self.flip or self.crop > 0 or self.cutout > 0

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return self.mixup > 0 or self.cutmix > 0


class NormalisePart(Part):
    """Mean and standard deviation that images are normalised by: one number a channel, of pixels scaled to 0..1."""

    mean: tuple[float, ...] = Field(min_length=1, description="For example [0.485, 0.456, 0.406].")
    std: tuple[float, ...] = Field(min_length=1, description="Each above 0.")

    @field_validator("mean", "std")
    @classmethod
    def _scaled(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= number <= 1 for number in value):
            raise SettingError(
                "pixels are scaled to 0..1, and so are mean and std; those of 0..255 are divided by 255", _OWN
            )
        return value

    @field_validator("std")
    @classmethod
    def _of_each_channel(cls, value: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if min(value) == 0:
            raise SettingError("a deviation is above 0", _OWN)
        if len(value) != len(info.data.get("mean", value)):
            raise SettingError(
                f"{len(info.data['mean'])} means and {len(value)} deviations: one of each a channel", _OWN
            )
        return value


_OF_OVERFLOW = {"head": "head+tail", "stride": "windows", "aggregate": "windows", "max_windows": "windows"}
"""Settings that have an effect with one value of ``overflow`` alone."""

OVERFLOW = ("overflow", *_OF_OVERFLOW)
"""All settings that say what is kept of a text that is too long."""


class DataPart(Part):
    """Where the labelled samples are and what their columns mean."""

    source: str = Field(
        "memory",
        description="Path of a csv, tsv, jsonl or json (also .gz), xlsx, xls, ods, parquet or arrow file, of a folder"
        " per class or of what save_to_disk left, or of CIFAR-10's binary version; hub:NAME; builtin:docstrings,"
        " builtin:digits, builtin:random; memory: rows given from Python.",
    )
    validation: str | None = Field(None, description="A file of its own for validation.")
    test: str | None = Field(None, description="A file of its own for the test.")
    text: str = Field("auto", description="Column of the text; auto finds it by name and prints the guess.")
    pair: str | None = Field("auto", description="Column of the second text of a pair; null for none.")
    label: Columns = Field(
        "auto",
        description="Column of the label; several 0/1 columns for multi-label, or the classes by place of one column of"
        " lists of 0 and 1.",
    )
    split: str | None = Field("auto", description="Column naming each row's split; null for none.")
    label_separator: str | None = Field(
        None,
        json_schema_extra=AS_TYPED,
        description="Splits a label cell into several labels (multi-label); \\t is a tab.",
    )
    decimal: Literal["auto", ".", ","] = Field(
        "auto",
        json_schema_extra=AS_TYPED,
        description="What stands before the decimals of numbers in the label column; auto: by those that can be read in"
        " one way only.",
    )
    encoding: str = Field(
        "auto", description="Encoding of text files, such as gb18030; auto tells it by the bytes and says which."
    )
    delimiter: str = Field(
        "auto",
        json_schema_extra=AS_TYPED,
        description="What separates the cells of a csv or tsv file, one character, \\t for a tab; auto looks at the"
        " header.",
    )
    quote: str = Field(
        "auto",
        json_schema_extra=AS_TYPED,
        description="What stands around a cell of a csv or tsv file that holds a delimiter or a line break: one"
        ' character; none: quotes are characters as others; auto: ", or none where that reads no tsv file.',
    )
    splits: SplitsPart = SplitsPart()
    max_length: int = Field(512, ge=4, description="Tokens kept of a sample; never more than the model's positions.")
    overflow: Literal["head", "tail", "head+tail", "windows"] = Field(
        "head",
        description=f"{entry_of('overflow').description} head: the beginning. tail: the end. head+tail: both, in the"
        " shares of data.head. windows: all, in pieces that overlap, whose logits are joined. Where it is not set, tail"
        " for a tokenizer whose truncation_side is left.",
    )
    head: float = Field(
        0.25, gt=0, lt=1, description="With overflow: head+tail, share of the kept tokens that are the beginning's."
    )
    stride: float | int = Field(
        0.25,
        ge=0,
        description="With overflow: windows, by how much neighbours overlap: a share of a window below 1, or tokens.",
    )
    aggregate: Literal["mean", "max"] = Field(
        "mean", description="With overflow: windows, how the logits of a text's windows become the text's."
    )
    max_windows: int | None = Field(
        None, ge=1, description="With overflow: windows, the most that a text has; what is behind them is cut."
    )
    image_size: int | None = Field(None, ge=8, description="Images are resized to this many pixels a side.")
    image_bits: int = Field(
        16,
        ge=8,
        le=16,
        description="Bits that grey images of 16 bits use, such as 12 of a microscope; the upper 8 of them are read.",
    )
    normalise: Annotated[
        Annotated[Literal["own", "imagenet", "cifar10"], Tag("(name)")] | Annotated[NormalisePart, Tag("(numbers)")],
        Discriminator(lambda given: "(name)" if isinstance(given, str) else "(numbers)"),
    ] = Field(
        "own",
        description="What images are normalised by, after augmentation, and in every later use of the model. own: by"
        " the pretrained model's image processor, else by 0.5 and 0.5. imagenet, cifar10: by that data set's mean and"
        " deviation. Or mean and std.",
    )
    on_bad_row: Literal["stop", "skip"] = Field(
        "stop",
        description="skip drops rows that cannot be used, counts them and writes them to a quarantine file.",
    )
    bad_rows_allowed: float = Field(
        0.01, ge=0, le=1, description="With on_bad_row: skip, the share of rows above which the run stops."
    )
    allow_single_class: bool = Field(False, description="Accept data in which every label is the same.")
    augment: AugmentPart = AugmentPart()
    pad_to_multiple_of: int | None = Field(
        None,
        ge=1,
        le=2**20,
        json_schema_extra=EXECUTION,
        description="Round lengths of padded batches and totals of packed rows up to a multiple of this; null: 1 where"
        " steps are eager, else by the length of the run, so that shapes come again.",
    )
    resident: Switch = Field(
        "auto",
        json_schema_extra=EXECUTION,
        description="Keep all samples on the GPU and gather batches there. auto: when they take at most a tenth of"
        " its memory.",
    )
    random: RandomPart = RandomPart()

    def kept_of_long_texts(self) -> dict[str, Any] | None:
        """What is kept of texts that are too long, by names of these fields; None: their beginning."""
        return None if self.overflow == "head" else {name: getattr(self, name) for name in OVERFLOW}

    _usable_stride = field_validator("stride")(share_or_count)

    @model_validator(mode="after")
    def _overflow_has_use(self) -> Self:
        for name, kind in _OF_OVERFLOW.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and self.overflow != kind:
                why = f"{name} = {value}: no effect with overflow = {self.overflow}"
                raise SettingError(why, f"data.overflow={kind}")
        return self

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        if value == "auto":
            return value
        try:
            "a".encode(value)
        except (LookupError, ValueError):
            near = close_words(value, {*aliases, *aliases.values()})
            hint = f"; did you mean {near[0]}?" if near else "; for example utf-8, gb18030, cp932, cp1252"
            raise SettingError(
                f"no text encoding {value!r}{hint}", f"data.encoding={near[0] if near else 'auto'}"
            ) from None
        return value

    _as_typed = field_validator("label_separator", "decimal", "delimiter", "quote", mode="before")(read_punctuation)

    @field_validator("delimiter")
    @classmethod
    def _usable_delimiter(cls, value: str) -> str:
        if value != "auto" and (len(value) != 1 or value in '"\r\n\0'):
            raise SettingError(f"one character such as ';' or a tab, or auto; found {value!r}", "data.delimiter=auto")
        return value

    @field_validator("quote")
    @classmethod
    def _usable_quote(cls, value: str) -> str:
        if value not in ("auto", "none") and (len(value) != 1 or value.isspace() or value == "\0"):
            raise ValueError(f"one character such as \" or ', or none, or auto; found {value!r}")
        return value

    @model_validator(mode="after")
    def _quotes_do_not_separate(self) -> Self:
        if self.quote == self.delimiter != "auto":
            raise ValueError(f"quote = {self.quote!r} is the delimiter, too; set one of them to another character")
        return self
