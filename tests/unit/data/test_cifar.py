"""CIFAR-10's binary version: a few records in the same format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.contract.errors import DataError
from paceline.data.sources.fingerprint import source_fingerprint
from paceline.data.sources.reader import read, read_unlabelled
from paceline.recipe.parts import DataPart

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def write_cifar(folder: Path, samples: int = 10, seed: int = 0) -> np.ndarray:
    """A folder in the data set's format: two files of training images and one of the test's; returns the pixels."""
    folder.mkdir()
    generator, written = np.random.default_rng(seed), []
    for file in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        pixels = generator.integers(0, 256, (samples, 3, 32, 32), dtype=np.uint8)
        labels = (np.arange(samples) % 10).astype(np.uint8)[:, None]
        np.concatenate([labels, pixels.reshape(samples, -1)], axis=1).tofile(folder / file)
        written.append(pixels)
    (folder / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    return np.concatenate(written)


def test_pixels_labels_and_splits_are_those_of_the_files(tmp_path: Path) -> None:
    pixels = write_cifar(tmp_path / "bin")
    table = read(DataPart(source=str(tmp_path / "bin")))
    assert np.array_equal(table.images, pixels.transpose(0, 2, 3, 1))
    assert list(table.labels) == NAMES * 3
    assert list(table.splits) == ["train"] * 20 + ["test"] * 10
    assert table.origins.of(21).endswith("test_batch.bin:2")


def test_rows_to_predict_for_need_no_labels(tmp_path: Path) -> None:
    write_cifar(tmp_path / "bin")
    tables = read_unlabelled(DataPart(source=str(tmp_path / "bin")), 16, tell=pytest.fail)
    assert [len(table) for table in tables] == [16, 14]


def test_the_cache_sees_another_byte(tmp_path: Path) -> None:
    for folder, seed in (("one", 0), ("same", 0), ("other", 1)):
        write_cifar(tmp_path / folder, seed=seed)
    one, same, other = (source_fingerprint(DataPart(source=str(tmp_path / n))) for n in ("one", "same", "other"))
    assert one == same != other


def test_without_names_classes_are_numbers(tmp_path: Path) -> None:
    write_cifar(tmp_path / "bin")
    (tmp_path / "bin" / "batches.meta.txt").unlink()
    assert list(read(DataPart(source=str(tmp_path / "bin"))).labels[:3]) == ["0", "1", "2"]


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path / "bin")
    path = tmp_path / "bin" / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_2\.bin(.|\n)*30,729 bytes"):
        read(DataPart(source=str(tmp_path / "bin")))


def test_a_label_beyond_the_names_is_refused_with_its_row(tmp_path: Path) -> None:
    write_cifar(tmp_path / "bin")
    content = bytearray((tmp_path / "bin" / "test_batch.bin").read_bytes())
    content[3073] = 10
    (tmp_path / "bin" / "test_batch.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"test_batch\.bin:2(.|\n)*label without a name"):
        read(DataPart(source=str(tmp_path / "bin")))


def test_pickles_are_not_opened_and_the_way_round_is_told(tmp_path: Path) -> None:
    (tmp_path / "py").mkdir()
    for file in ("batches.meta", "data_batch_1", "test_batch"):
        (tmp_path / "py" / file).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    part = DataPart(source=str(tmp_path / "py"))
    for use in (read, source_fingerprint):
        with pytest.raises(DataError, match=r"pickled batches(.|\n)*cifar-10-binary\.tar\.gz"):
            use(part)
