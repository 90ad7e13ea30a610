"""The table of terms, and the pages made from it: each word of the tutorials has an answer."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from paceline.recipe import Recipe, flatten
from paceline.recipe.terms import Section, find_word, is_setting, plain, read_sections
from paceline.verbs.techniques import techniques
from tests.unit.test_docs import script

SECTIONS = read_sections()
TERMS = [term for section in SECTIONS for term in section.terms]
SETTINGS = dict(flatten(Recipe.parse({"model": {"source": "m"}, "data": {"source": "d.csv"}}).resolved()))
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("tutorial", WORDS)
def test_every_word_of_the_tutorials_has_an_answer_in_both_languages(tutorial: str) -> None:
    for word in WORDS[tutorial]["words"]:
        term = find_word(word)
        assert term is not None, word
        assert term.here or term.note, word
        assert term.zh, f"{word}: a Chinese note puts it on the pages"
        assert term.page, word


@pytest.mark.parametrize("tutorial", WORDS)
def test_the_techniques_command_answers_every_word(tutorial: str, capsys: pytest.CaptureFixture[str]) -> None:
    for word in WORDS[tutorial]["words"]:
        techniques(word)
        assert "docs/" in capsys.readouterr().out, word


def test_a_chinese_word_is_answered_in_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    techniques("混合精度")
    chinese = capsys.readouterr().out
    techniques("AMP")
    assert "权重保持 fp32" in chinese
    assert "techniques.precision=fp16" in chinese
    assert "torch.autocast over fp32 weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "entries", "shown"),
    [
        ("amp", ["precision"], "techniques.precision=fp16"),
        ("fp16", ["precision"], "techniques.precision=fp16"),
        ("gradient checkpointing", ["recompute"], "techniques.recompute=true"),
        ("torch.cuda.amp.GradScaler()", ["precision"], "skipped"),
        ("warmup", [], "schedule.warmup"),
        ("lr_lambda", [], "MODULE:FUNCTION"),
        ("DataParallel", ["dp"], "parallel.strategy=dp"),
        ("LoRA", ["lora"], "lora"),
        ("ema", ["ema"], "optimizer.ema"),
        ("clip_norm", [], "optimizer.clip_norm: Largest global gradient norm"),
    ],
)
def test_a_word_leads_to_its_technique(
    word: str, entries: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [entry.name for entry in techniques(word)] == entries
    assert shown in capsys.readouterr().out


def test_every_name_stands_once_and_is_no_other_setting_of_ours() -> None:
    names = Counter(plain(name) for term in TERMS for name in term.names)
    assert [name for name, count in names.items() if count > 1] == []
    known = {key.partition(".")[0] for key in SETTINGS}
    assert [term for term in TERMS for name in term.names if name in known and name != term.here] == []


def test_what_takes_its_place_is_a_setting() -> None:
    for term in TERMS:
        for here in (term.here, *term.values.values()):
            if is_setting(here):
                key = here.partition("=")[0]
                assert key in SETTINGS or key.rpartition(".")[0] in SETTINGS, f"{term.names}: no setting {key}"


def test_words_of_the_pages_have_both_notes_and_a_page() -> None:
    for section in SECTIONS:
        for term in section.terms:
            assert bool(term.zh) == bool(term.page), term.names
            assert term.here or term.note, term.names
            assert len(term.note) < 140, f"{term.names}: a clause"


@pytest.mark.parametrize("page", ["terms.md", "terms.zh.md", "coming-from.md"])
def test_the_pages_are_made_of_the_table(page: str) -> None:
    writer = script("terms")
    text = (writer.DOCS / page).read_text(encoding="utf-8")
    assert text == writer.write_tables(page, text), "run: python scripts/terms.py"
    for section in SECTIONS:
        for term in section.terms if is_on(page, section) else ():
            if page == "coming-from.md" or term.zh:
                assert all(name in text for name in term.names)


def is_on(page: str, section: Section) -> bool:
    return not section.zh or page != "coming-from.md"
