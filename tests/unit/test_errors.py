"""What people wrote is shown as they wrote it, and cannot act on a terminal or break its encoding."""

import os
import subprocess
import sys

import pytest

from paceline.contract.errors import DataError, close_words, excerpt, in_a_line, nearest


@pytest.mark.parametrize(
    "text", ["好评", "とても良い", "좋아요", "très bon", "füße", "очень", "ดีมาก", "e\u0301té", "👍"]
)
def test_letters_of_every_script_are_shown_as_they_are(text):
    assert excerpt(text) == f"'{text}'"
    assert f"(found '{text}')" in str(DataError("an unknown class", found=text))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", r"'a\x1b[2Jb'"),
        ("a\nb\tc", r"'a\nb\tc'"),
        ("好\u202e评", r"'好\u202e评'"),
        ("pos\u200b", r"'pos\u200b'"),
        ("pos\xa0", r"'pos\xa0'"),
        ("\ud800", r"'\ud800'"),
        ("\x9b2J", r"'\x9b2J'"),
    ],
)
def test_what_cannot_be_seen_or_acts_on_a_terminal_is_escaped(text, shown):
    assert excerpt(text) == shown


def test_a_long_text_is_cut_by_characters():
    assert excerpt("好" * 100, 60) == f"'{'好' * 60}' … (100 characters)"


def test_a_console_without_these_letters_is_no_crash(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("loop: {epochs: 很多}\ndata: {source: a.csv}\nmodel: {source: bert}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "paceline.verbs.cli", "train", recipe],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(b"paceline: loop.epochs = "), done.stderr
    assert b"Traceback" not in done.stderr, "the encoding of the console is not the user's mistake"


def test_what_nobody_raised_on_purpose_fits_in_a_line() -> None:
    assert in_a_line(ValueError("\nfirst\nsecond")) == "ValueError: first"
    assert in_a_line(KeyError()) == "KeyError: "


@pytest.mark.parametrize(
    ("word", "known", "close"),
    [
        ("lable", ["label", "text"], ["label"]),
        ("Batch-Size", ["batch_size", "batch"], ["batch_size"]),
        ("vaildation", ["train", "validation", "test"], ["validation"]),
        ("determ", ["deterministic", "name"], ["deterministic"]),
        ("AUROC", ["auroc", "accuracy"], ["auroc"]),
        ("hma", ["ham", "spam"], ["ham"]),
        ("gb18300", ["gb18030", "gb2312"], ["gb18030"]),
        ("adamw8", ["adamw", "adamw8bit", "adamwfp8"], ["adamw8bit"]),
        # two words, not a misspelling
        ("amp", ["name", "model"], []),
        ("eta_min", ["deterministic"], []),
        ("log_level", ["observe", "loop"], []),
        ("fp8", ["fp16", "fp32"], []),
        ("12", ["13", "1"], []),
        ("eval", ["evaluate_every", "evaluation_batch_size"], []),
        ("", ["a"], []),
        ("--", ["a"], []),
    ],
)
def test_a_close_word_is_a_misspelling_or_a_beginning(word: str, known: list[str], close: list[str]) -> None:
    assert close_words(word, known) == close


def test_of_many_known_words_some_are_listed() -> None:
    assert nearest("xyz", map(str, range(10_000))).endswith("and 9,980 more")
    assert nearest("xyz", ["b", "a"]) == "known: a, b"
