"""Encoded samples, ready to be split into batches. Arrays only: nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Origins:
    """Where each sample came from, so that errors and predictions can point at it."""

    files: tuple[str, ...]
    file_index: NDArray[np.int32]
    """[n]: index into ``files``."""
    lines: NDArray[np.int64]
    """[n]: line number of the row's first line, from 1; 0 where a source has no lines."""

    def of(self, sample: int) -> str:
        """``file:line`` of a sample."""
        file, line = self.files[self.file_index[sample]], int(self.lines[sample])
        return f"{file}:{line}" if line else file


@dataclass(frozen=True)
class Tokens:
    """All samples' tokens in one flat array (memory-mapped when it comes from the cache)."""

    flat: NDArray[np.unsignedinteger]
    """[total]: token ids, uint16 or uint32."""
    offsets: NDArray[np.int64]
    """[n + 1]: sample i is ``flat[offsets[i]:offsets[i + 1]]``."""
    pad_id: int
    second: NDArray[np.int32] | None = None
    """[n]: position in the sample at which a pair's second text begins (token type 1); None: all are of type 0."""
    whole: NDArray[np.int64] | None = None
    """[n]: number of tokens of each sample before it was cut; None where none was."""
    types: NDArray[np.uint8] | None = None
    """[total]: token types that are not 0, then 1, such as XLNet's; then no ``second``."""
    pairs: bool = False
    """Whether a sample is two texts."""
    typed: bool = False
    """Whether the tokenizer names token types as an input of its model, also where all of them are 0."""
    pad_type: int = 0
    """Token type of the filling."""
    pad_left: bool = False
    """Whether the filling stands before the text."""
    specials: tuple[int, ...] = ()
    """Ids of the tokenizer's special tokens; a text may name one of them, such as ``<pad>``."""
    windows: NDArray[np.int64] | None = None
    """[n + 1]: sample i is the sequences ``windows[i]:windows[i + 1]``, of which ``offsets``, ``second`` and ``types``
    are then; None: a sample is one sequence."""

    def __len__(self) -> int:
        return len(self.offsets if self.windows is None else self.windows) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[n]: number of tokens of each sample, over all of its windows."""
        return np.diff(self.offsets if self.windows is None else self.offsets[self.windows])

    @property
    def num_windows(self) -> NDArray[np.int64]:
        """[n]: number of sequences that each sample is."""
        return np.ones(len(self), dtype=np.int64) if self.windows is None else np.diff(self.windows)

    def window_lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[W]: number of tokens of each window of these samples, sample by sample."""
        rows = ids if self.windows is None else ranges(self.windows[ids], self.num_windows[ids])
        return self.offsets[rows + 1] - self.offsets[rows]

    def each_window(self) -> Tokens:
        """The same tokens with every window a sample of its own."""
        return replace(self, windows=None, whole=None)

    def begins_of_second(self, always: bool) -> NDArray[np.signedinteger] | None:
        """[n]: where type 1 begins in each sample, its length for nowhere; None: no types are to be given by it.

        Args:
            always: give types of 0 only as well, to a model for which they are not the same as none.
        """
        if self.second is None and self.types is None and self.typed and always:
            return self.lengths
        return self.second


@dataclass(frozen=True)
class Images:
    """All images at one size."""

    pixels: NDArray[np.uint8]
    """[n, height, width, channels]."""

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width, channels."""
        height, width, channels = self.pixels.shape[1:]
        return height, width, channels


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Everything a run learns from and is measured on."""

    inputs: Tokens | Images
    labels: NDArray[np.int64] | NDArray[np.float32]
    """int64 [n] class indices, float32 [n] targets, or float32 [n, classes] of 0 and 1."""
    kind: str
    """Name of the task."""
    label_names: tuple[str, ...]
    """Class names in index order; one name for regression."""
    splits: Mapping[str, NDArray[np.int64]]
    """Sample ids of ``train``, ``validation`` and ``test``; a split may be missing."""
    origins: Origins
    fingerprint: str
    """Digest of samples, labels and splits: equal fingerprints train equally."""
    notices: tuple[str, ...] = ()

    @property
    def is_images(self) -> bool:
        """Whether the samples are images rather than texts."""
        return isinstance(self.inputs, Images)

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Height, width, channels; None for text."""
        return self.inputs.shape if isinstance(self.inputs, Images) else None

    @property
    def pad_id(self) -> int | None:
        """Token id of the filling; None for images."""
        return self.inputs.pad_id if isinstance(self.inputs, Tokens) else None

    def each_window(self) -> Dataset:
        """The same data with every window a sample of its own, which has its text's label, split and origin; the same
        object where no sample has windows."""
        if not isinstance(self.inputs, Tokens) or self.inputs.windows is None:
            return self
        counts, begins = self.inputs.num_windows, self.inputs.windows
        origins = self.origins
        return replace(
            self,
            inputs=self.inputs.each_window(),
            labels=self.labels.repeat(counts, axis=0),
            splits={name: ranges(begins[ids], counts[ids]) for name, ids in self.splits.items()},
            origins=replace(origins, file_index=origins.file_index.repeat(counts), lines=origins.lines.repeat(counts)),
        )

    def __len__(self) -> int:
        return len(self.inputs)


def ranges(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``begins[0], begins[0] + 1, ...``, ``counts[0]`` numbers; then those from ``begins[1]``, and so on."""
    before = counts.cumsum() - counts
    within: NDArray[np.int64] = np.arange(counts.sum()) - before.repeat(counts)
    return within + begins.repeat(counts)
