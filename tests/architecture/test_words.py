"""Words that PyTorch and the field have others for: names, messages, docstrings and pages do without them."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "paceline"

WORDS = {
    r"cards?": "GPU",
    r"(launched|recorded) (step|pass)(es|s)?": "eager, or captured",
    r"(steps?|pass|passes|shapes?) (is|are|was|were) (launched|recorded)": "eager, or captured",
    r"recordings?": "capture, CUDA graph",
    r"sums? over (the )?ranks": "all-reduce",
    r"words that occur": "embedding rows",
    r"path (that|of) (the )?steps( took| take)?": "execution",
    r"confusions": "confusion matrix",
    r"deals?|dealt|dealing": "split, or shared out",
    r"(kept|keeps?|keeping) \w* ?apart": "isolated",
}
"""Word -> what is said instead. Parts of a name count as words."""

NAMES = {r"sum_|start_sum_": "all_reduce", r"sum_words|of_words": "embedding rows"}
"""The same of whole names."""

EXCEPTIONS = {
    "contract/records.py": (("card",), "the key of earlier releases, written beside today's for one release"),
    "machine/facts.py": (("cards",), "the key of earlier releases, written beside today's for one release"),
    "verbs/memory.py": (("card",), "the key of earlier releases, written beside today's for one release"),
    "data/order.py": (("deal",), "the name of a published benchmark, deal_balance.py"),
    "recipe/parts/parallel.py": (("sum_words",), "a field of older recipes, which is passed over"),
    "report/report.css": (("card",), "a tile of a page"),
    "docs/distributed.md": (("deal",), "the name of a published benchmark, deal_balance.py"),
    "docs/negative.md": (("sum_words", "cards"), "a setting that went, and the name of its record's file"),
    "docs/tracing.md": (("recording",), "the name of a stream in traces that people have"),
}
"""File, from src/paceline or the repository's root -> the words that stay there, and why."""

_WORDS = re.compile(rf"(?<![a-z])(?:{'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)
_NAMES = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")


def said(text: str) -> list[str]:
    """The words in a text; ``num_cards`` and ``FirstCard`` are two words each."""
    as_words = re.sub(r"(?<=[a-z])(?=[A-Z])|_(?=\w)", " ", text)
    return [each[0].lower() for each in (*_WORDS.finditer(as_words), *_NAMES.finditer(text))]


def in_python(text: str) -> Iterator[tuple[int, str]]:
    """Line and word of names, strings and comments."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT):
            for number, line in enumerate(token.string.split("\n"), token.start[0]):
                yield from ((number, word) for word in said(line))


def in_text(text: str) -> Iterator[tuple[int, str]]:
    """Line and word of a page."""
    for number, line in enumerate(text.split("\n"), 1):
        yield from ((number, word) for word in said(line))


def offenders(files: list[Path], root: Path) -> list[str]:
    """What is to be said otherwise, a line each."""
    found = []
    for file in files:
        name = str(file.relative_to(root))
        stays, _ = EXCEPTIONS.get(name, ((), ""))
        text = file.read_text(encoding="utf-8")
        lines = in_python(text) if file.suffix == ".py" else in_text(text)
        found += [f"{name}:{number}: {word}" for number, word in lines if word not in stays]
    return found


def test_the_source_speaks_as_the_field_does() -> None:
    files = [file for kind in ("py", "html", "css") for file in sorted(SOURCE.rglob(f"*.{kind}"))]
    assert len(files) > 200
    found = offenders(files, SOURCE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_pages_speak_as_the_field_does(page: Path) -> None:
    found = offenders([page], ROOT)
    assert not found, "\n".join(found)


def test_an_exception_has_a_reason_and_is_needed() -> None:
    for name, (stays, why) in EXCEPTIONS.items():
        file = SOURCE / name if (SOURCE / name).exists() else ROOT / name
        text = file.read_text(encoding="utf-8")
        there = {word for _, word in (in_python(text) if file.suffix == ".py" else in_text(text))}
        assert why, name
        assert set(stays) <= there, f"{name} does not say {set(stays) - there} any more"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_cards = 2", ["cards"]),
        ("class FirstCard: ...", ["card"]),
        ("CARD = 1", ["card"]),
        ("x = f'a card of {size}'", ["card"]),
        ('"""Recorded steps."""', ["recorded steps"]),
        ("# dealt to ranks", ["dealt"]),
        ("world.sum_(x)", ["sum_"]),
        ("world.start_sum_(x)", ["start_sum_"]),
        ("total = sum_rows(x) + self._sum", []),
        ("discard(cardinality, wildcards)", []),
        ("'the ideal: step by step, a kernel is launched'", []),
        ("'attention keeps them apart'", ["keeps them apart"]),
    ],
)
def test_the_guard_hears_every_form_of_a_word(text: str, words: list[str]) -> None:
    assert [word for _, word in in_python(text + "\n")] == words


def test_a_page_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Cards\n\nA GPU.\nThe batch is dealt.\n")
    assert offenders([tmp_path / "page.md"], tmp_path) == ["page.md:1: cards", "page.md:4: dealt"]


def test_what_stands_within_an_f_string_is_read() -> None:
    assert list(in_python("f'{names[\"card\"]}'\n")) == [(1, "card")]
