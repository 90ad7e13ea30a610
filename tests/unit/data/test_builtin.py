"""The data sets that need no download."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from paceline.contract.errors import DataError
from paceline.data import docstrings
from paceline.data.builtin import builtin_fingerprint, read_builtin
from paceline.recipe.parts import DataPart, RandomPart

GIVEAWAYS = ("numpy", "np.", "scipy", "sklearn", "scikit", "torch.", "pytorch", "transformers", "python", ">>>", "http")


def test_unknown_names_get_the_nearest() -> None:
    for call in (read_builtin, builtin_fingerprint):
        with pytest.raises(DataError, match=r"'builtin:digit'(.|\n)*did you mean 'builtin:digits'"):
            call(DataPart(source="builtin:digit"))


def test_digits_are_images() -> None:
    table = read_builtin(DataPart(source="builtin:digits"))
    assert table.images is not None
    assert table.images.shape == (1797, 8, 8, 1)
    assert table.images.dtype == np.uint8
    assert (table.images.min(), table.images.max()) == (0, 255)
    assert set(table.labels or ()) == set("0123456789")
    assert len(table) == 1797


def test_digits_are_resized() -> None:
    """A recipe that asked for larger digits trained on 8 x 8 pixels, without a word."""
    small, large = (DataPart(source="builtin:digits", image_size=size) for size in (None, 16))
    images, original = read_builtin(large).images, read_builtin(small).images
    assert images is not None
    assert original is not None
    assert images.shape == (1797, 16, 16, 1)
    assert np.abs(images[:, ::2, ::2].mean() - original.mean()) < 3
    assert builtin_fingerprint(large) != builtin_fingerprint(small)


def test_random_images_are_made_in_one_size() -> None:
    random = RandomPart(samples=4, image=(10, 10, 3))
    with pytest.raises(DataError, match=r"image_size = 12: no effect(.|\n)*data.random.image=\[12,12,3\]"):
        read_builtin(DataPart(source="builtin:random", random=random, image_size=12))
    assert read_builtin(DataPart(source="builtin:random", random=random, image_size=10)).images is not None


@pytest.mark.parametrize("length", [7, (3, 9)])
def test_random_tokens(length: int | tuple[int, int]) -> None:
    part = DataPart(source="builtin:random", random=RandomPart(samples=64, classes=3, length=length, vocabulary=300))
    table, again = read_builtin(part), read_builtin(part)
    assert table.tokens is not None
    assert again.tokens is not None
    assert len(table.tokens) == len(table) == 64
    shortest, longest = (length, length) if isinstance(length, int) else length
    assert shortest == table.tokens.lengths.min()
    assert longest == table.tokens.lengths.max()
    assert 100 <= table.tokens.flat.min() <= table.tokens.flat.max() < 300
    assert np.array_equal(table.tokens.flat, again.tokens.flat)
    assert table.labels == again.labels
    assert Counter(table.labels or ()) == {"0": 22, "1": 21, "2": 21}


def test_random_tokens_of_a_large_vocabulary() -> None:
    table = read_builtin(DataPart(source="builtin:random", random=RandomPart(samples=512, vocabulary=250_000)))
    assert table.tokens is not None
    assert table.tokens.flat.dtype == np.uint32
    assert table.tokens.flat.max() > 2**16


def test_random_images() -> None:
    table = read_builtin(DataPart(source="builtin:random", random=RandomPart(samples=4, classes=9, image=(5, 6, 3))))
    assert table.images is not None
    assert table.tokens is None
    assert table.images.shape == (4, 5, 6, 3)
    assert table.images.dtype == np.uint8
    assert len(set(table.labels or ())) == 4, "as many classes as samples allow"


@pytest.mark.parametrize(
    "options",
    [
        {"length": 0},
        {"length": (9, 3)},
        {"length": 10**30},
        {"image": (0, 5, 3)},
        {"image": (10**30, 5, 3)},
        # more than the main memory
        {"samples": 2**40},
        {"samples": 10**9, "length": 10**6},
        {"samples": 10**7, "image": (2**31, 2**31, 3)},
    ],
)
def test_impossible_shapes(options: dict[str, object]) -> None:
    part = DataPart(source="builtin:random", random=RandomPart.model_validate(options))
    with pytest.raises(DataError, match=rf"data\.random\.{next(iter(options))}"):
        read_builtin(part)


def test_fingerprints_follow_what_they_depend_on() -> None:
    parts = [
        DataPart(source="builtin:docstrings"),
        DataPart(source="builtin:digits"),
        DataPart(source="builtin:random"),
        DataPart(source="builtin:random", random=RandomPart(samples=3)),
    ]
    assert len({builtin_fingerprint(part) for part in parts}) == len(parts)
    assert builtin_fingerprint(parts[0]) == builtin_fingerprint(DataPart(source="builtin:docstrings", max_length=8))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Sum of `np.array` and :func:`~scipy.stats.norm` here.", "Sum of and here."),
        ("See https://example.org/numpy/x.html for more", "See for more"),
        ("Add.\n\n>>> import numpy\n>>> f(1)\n[1]\n\nThe end.", "Add.\n\nThe end."),
        (".. versionadded:: 0.17\n\nParameters\n----------\nx : int", "Parameters\nx : int"),
        ("A PyTorch or Hugging Face thing, torch_xla, scikit-learn's.", "A or thing, , 's."),
        ("Nothing of inputs, torches is_np_like changes", "Nothing of inputs, is_np_like changes"),
    ],
)
def test_what_gives_a_library_away_is_removed(text: str, expected: str) -> None:
    assert docstrings.clean(text) == expected


def test_sources_are_parsed_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sampled"
    (package / "tests").mkdir(parents=True)
    words = "one two three four five six seven"
    (package / "__init__.py").write_text(
        f'"""Module {words}."""\nraise SystemExit("was run")\n'
        f'if True:\n    def f():\n        """Function {words}."""\n\nclass C:\n    async def m(self):\n'
        f'        """Method  {words}."""\n    """Not a docstring {words}."""\n'
        '    def short(self):\n        """Few."""\n'
    )
    (package / "copy.py").write_text(f'def g():\n    """FUNCTION {words}."""\n')
    (package / "broken.py").write_text(f'"""Broken {words}."""\nprint 1\n')
    (package / "tests" / "case.py").write_text(f'"""Test {words}."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(docstrings.LIBRARIES, "sampled", "sampled")
    found = docstrings.collect(["sampled"])
    assert "sampled" not in sys.modules
    assert sorted(one.text.split()[0].casefold() for one in found) == ["function", "method", "module"]
    method = next(one for one in found if one.text.startswith("Method"))
    assert (method.file, method.line) == ("sampled/__init__.py", 9)
    assert len(docstrings.collect(["sampled"], most=2)) == 2


def test_a_library_without_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(docstrings.LIBRARIES, "absent", "no_such_package_at_all")
    with pytest.raises(DataError, match="needs the sources of absent"):
        docstrings.collect(["absent"])


def test_docstrings_of_the_smallest_libraries() -> None:
    found = docstrings.collect(["numpy", "python"], most=150)
    assert Counter(one.library for one in found) == {"numpy": 150, "python": 150}
    assert len({" ".join(one.text.casefold().split()) for one in found}) == 300
    assert min(len(one.text.split()) for one in found) >= 8
    assert found == docstrings.collect(["numpy", "python"], most=150), "the choice is deterministic"
    shown = [word for one in found for word in GIVEAWAYS if word in one.text.casefold().split()]
    assert not shown


@pytest.mark.slow
def test_docstrings_are_learnable_but_not_trivial() -> None:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from sklearn.pipeline import make_pipeline

    table = read_builtin(DataPart(source="builtin:docstrings"))
    assert table.texts is not None
    assert table.labels is not None
    counts = Counter(table.labels)
    assert set(counts) == set(docstrings.LIBRARIES)
    assert min(counts.values()) >= 1200
    assert max(counts.values()) <= docstrings.MOST_PER_LIBRARY
    lengths = [len(text.split()) for text in table.texts]
    assert np.percentile(lengths, 95) > 10 * np.percentile(lengths, 25), "lengths vary widely"
    train, test, train_labels, test_labels = train_test_split(
        list(table.texts), list(table.labels), test_size=0.1, stratify=list(table.labels), random_state=0
    )
    baseline = make_pipeline(TfidfVectorizer(), LogisticRegression(max_iter=1000)).fit(train, train_labels)
    assert 0.80 < baseline.score(test, test_labels) < 0.92
