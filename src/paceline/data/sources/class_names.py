"""Names of classes that Hugging Face's datasets keeps beside their numbers: ClassLabel, and lists of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.contract.errors import DataError


@dataclass(frozen=True)
class ClassNames:
    """The classes of one column in index order."""

    names: tuple[str, ...]
    is_list: bool

    def read(self, value: Any, *, file: str, line: int, column: str) -> Any:
        """Return the name of a class number, or the names of a list of them; None for -1, the Hub's "unlabelled".

        Raises:
            DataError: a number that no class has.
        """
        if hasattr(value, "dtype") and hasattr(value, "tolist"):
            value = value.tolist()  # arrays and tensors, as the data set's format has them
        if self.is_list and isinstance(value, list | tuple):
            return [self._name(number, file, line, column) for number in value]
        return None if value is None or value == -1 else self._name(value, file, line, column)

    def _name(self, number: Any, file: str, line: int, column: str) -> Any:
        if not isinstance(number, int):
            return number
        if not 0 <= number < len(self.names):
            raise DataError(
                "a class number without a name",
                file=file,
                line=line,
                column=column,
                found=str(number),
                why=f"the data set names {len(self.names):,} classes, counted from 0",
                fix="save the data set again with all of its class names",
            )
        return self.names[number]


def class_names_of(features: Mapping[str, Any] | None) -> dict[str, ClassNames]:
    """Return the classes of each column that has some: of features of datasets, which need not be installed."""
    columns = {}
    for column, feature in (features or {}).items():
        if isinstance(feature, ClassNames):
            columns[column] = feature
            continue
        inner, is_list = _element(feature)
        if hasattr(inner, "int2str") and hasattr(inner, "names"):
            columns[column] = ClassNames(tuple(map(str, inner.names)), is_list)
    return columns


def class_names_in(metadata: Mapping[bytes, bytes] | None) -> dict[str, ClassNames]:
    """Return the classes of each column that has some: of the metadata that datasets writes into Arrow's schemas."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"].items()
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
    columns = {}
    for column, feature in features:
        is_list = isinstance(feature, list) or (isinstance(feature, dict) and "feature" in feature)
        inner = feature[0] if isinstance(feature, list) and feature else feature
        inner = inner.get("feature", inner) if isinstance(inner, dict) else inner
        if isinstance(inner, dict) and inner.get("_type") == "ClassLabel" and isinstance(inner.get("names"), list):
            columns[column] = ClassNames(tuple(map(str, inner["names"])), is_list)
    return columns


def _element(feature: Any) -> tuple[Any, bool]:
    """A feature, or that of a list's elements: ``Sequence(ClassLabel)``, ``List(ClassLabel)``, ``[ClassLabel]``."""
    if isinstance(feature, list) and len(feature) == 1:
        return feature[0], True
    inner = getattr(feature, "feature", None)
    return (feature, False) if inner is None else (inner, True)
