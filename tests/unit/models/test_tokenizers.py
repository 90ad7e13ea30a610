"""Tokenizers: the model's own, another's, or one trained on the training texts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from paceline.contract.errors import ModelError
from paceline.models.config import read_config
from paceline.models.tokenizers import SPECIAL_TOKENS, cuts_on_the_left, tokenizer_source, train_wordpiece
from paceline.recipe.parts import ModelPart
from tests.testing.tiny import TEXTS, tiny_bert_config, tiny_distilbert_config, write_tiny_model


def trained(settings: dict[str, object], cache: Path | None = None, size: int = 200):
    part = ModelPart(config=settings, vocabulary_size=size)
    return tokenizer_source(part, read_config(part), cache)


def test_a_trained_tokenizer_is_berts() -> None:
    tokenizer = trained(tiny_bert_config()).get(TEXTS)
    assert tokenizer.convert_ids_to_tokens(range(5)) == list(SPECIAL_TOKENS)
    assert 100 < len(tokenizer) <= 200
    assert tokenizer.model_max_length == 64
    both = tokenizer("A WONDERFUL evening", "bad jökes")
    words = tokenizer.convert_ids_to_tokens(both["input_ids"])
    assert words[0] == "[CLS]"
    assert [i for i, word in enumerate(words) if word == "[SEP]"] == [words.index("[SEP]"), len(words) - 1]
    assert both["token_type_ids"] == [0] * (words.index("[SEP]") + 1) + [1] * (len(words) - words.index("[SEP]") - 1)
    assert tokenizer.decode(both["input_ids"], skip_special_tokens=True) == "a wonderful evening bad jokes"
    assert "[UNK]" in tokenizer.convert_ids_to_tokens(tokenizer("日本")["input_ids"])


def test_token_types_are_for_models_that_have_them() -> None:
    assert "token_type_ids" in trained(tiny_bert_config()).get(TEXTS)("a", "b")
    assert "token_type_ids" not in trained(tiny_distilbert_config()).get(TEXTS)("a", "b")


def test_equal_texts_give_equal_vocabularies_in_every_process() -> None:
    script = (
        "from paceline.models.tokenizers import train_wordpiece; from tests.testing.tiny import TEXTS;"
        "import json; print(json.dumps(train_wordpiece([t * 3 for t in TEXTS], 300)))"
    )
    runs = {subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(runs) == 1
    assert len(json.loads(runs.pop())) > 100


def test_the_vocabulary_has_the_size_asked_for_when_the_texts_are_rich_enough() -> None:
    words = [f"{first}{second}" for first in ("over", "under", "in") for second in ("take", "go", "stand", "put")]
    vocabulary = train_wordpiece([" ".join(words * 3)], 50)
    assert sorted(vocabulary.values()) == list(range(50))


def test_every_character_of_a_chinese_text_gets_a_token() -> None:
    vocabulary = train_wordpiece(["今天的电影很好看", "服务太差了"], 200)
    assert set("今天的电影很好看服务太差了") <= set(vocabulary)


def test_texts_without_words_are_an_error() -> None:
    with pytest.raises(ModelError, match="no words"):
        train_wordpiece(["", " \n"], 200)


def test_a_trained_vocabulary_is_kept_and_a_damaged_one_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trained(tiny_bert_config(), tmp_path).get(iter(TEXTS)).get_vocab()
    (kept,) = (tmp_path / "tokenizers").iterdir()
    kept.write_text("{")
    assert trained(tiny_bert_config(), tmp_path).get(TEXTS).get_vocab() == first
    monkeypatch.setattr("paceline.models.tokenizers.train_wordpiece", lambda *_: pytest.fail("trained again"))
    assert trained(tiny_bert_config(), tmp_path).get(TEXTS).get_vocab() == first


@pytest.mark.parametrize("cause", ["a file", "a full disk", "a disk that is only read", "/proc"])
def test_a_cache_that_cannot_be_used_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    cache = Path("/proc/paceline") if cause == "/proc" else tmp_path / "cache"
    if cause == "a file":
        cache.write_text("in the way")
    elif cause == "a full disk":
        monkeypatch.setattr(os, "fsync", raising(errno.ENOSPC))
    elif cause == "a disk that is only read":
        monkeypatch.setattr(Path, "mkdir", raising(errno.EROFS))
    expected = trained(tiny_bert_config()).get(TEXTS).get_vocab()
    source = trained(tiny_bert_config(), cache)
    assert source.get(TEXTS).get_vocab() == expected
    settled = source.settle("data")
    assert settled is not None
    assert settled.get_vocab() == expected
    assert trained(tiny_bert_config(), cache).settle("data") is None, "nothing has been kept"


def test_a_damaged_vocabulary_of_cached_data_is_kept_again(tmp_path: Path) -> None:
    source = trained(tiny_bert_config(), tmp_path)
    source.get(TEXTS)
    (tmp_path / "tokenizers" / "of-data.json").write_text("{")
    source.settle("data")
    assert trained(tiny_bert_config(), tmp_path).settle("data") is not None


@pytest.mark.timeout(30)
@pytest.mark.parametrize("content", [None, b"[" * 100_000, b'{"[PAD]": ' + b"9" * 5000 + b"}"])
def test_a_vocabulary_that_cannot_be_read_is_trained_again(tmp_path: Path, content: bytes | None) -> None:
    expected = trained(tiny_bert_config(), tmp_path).get(TEXTS).get_vocab()
    [path] = (tmp_path / "tokenizers").iterdir()
    path.unlink()
    os.mkfifo(path) if content is None else path.write_bytes(content)
    assert trained(tiny_bert_config(), tmp_path).get(TEXTS).get_vocab() == expected


def raising(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_saved_tokenizer_is_the_same_in_plain_transformers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    ours = trained(tiny_bert_config()).get(TEXTS)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(list(TEXTS), list(TEXTS)) == ours(list(TEXTS), list(TEXTS))
    assert theirs.model_max_length == ours.model_max_length
    assert theirs.pad_token_id == 0


def test_a_pretrained_tokenizer_ignores_the_texts_and_its_key_follows_its_files(tmp_path: Path) -> None:
    part = ModelPart(source=str(write_tiny_model(tmp_path / "model")))
    config = read_config(part)
    source = tokenizer_source(part, config, None)
    assert source.get(["quite other texts"]).get_vocab() == trained(tiny_bert_config()).get(TEXTS).get_vocab()
    assert tokenizer_source(part, config, None).key == source.key
    settings = tmp_path / "model" / "tokenizer.json"
    settings.write_text(settings.read_text().replace('"lowercase": true', '"lowercase": false'))
    assert tokenizer_source(part, config, None).key != source.key


def test_the_key_is_of_what_was_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are replaced after they were loaded: what was encoded belongs to the old ones."""
    part = ModelPart(source=str(write_tiny_model(tmp_path / "model")))
    config, path = read_config(part), tmp_path / "model" / "tokenizer.json"
    old, load = path.read_text(), AutoTokenizer.from_pretrained
    key = tokenizer_source(part, config, None).key

    def load_and_replace(*arguments: object, **options: object) -> object:
        tokenizer = load(*arguments, **options)
        path.write_text(old.replace('"lowercase": true', '"lowercase": false'))
        return tokenizer

    with monkeypatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", load_and_replace)
        assert tokenizer_source(part, config, None).key == key
    assert tokenizer_source(part, config, None).key != key
    path.write_text(old)
    assert tokenizer_source(part, config, None).key == key


def test_keys_are_the_same_in_every_process(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", tiny_bert_config())
    script = (
        "import sys; from paceline.models.config import read_config; from paceline.recipe.parts import ModelPart;"
        "from paceline.models.tokenizers import tokenizer_source; part = ModelPart(source=sys.argv[1]);"
        "print(tokenizer_source(part, read_config(part), None).key)"
    )
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    part = ModelPart(source=str(folder))
    assert done.stdout.strip() == tokenizer_source(part, read_config(part), None).key


def test_keys_of_trained_tokenizers_follow_the_settings() -> None:
    keys = {trained(tiny_bert_config(), size=size).key for size in (200, 200, 300)}
    assert len(keys) == 2


def test_another_models_tokenizer_is_limited_by_this_models_positions(tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other")
    part = ModelPart(config=tiny_bert_config(max_position_embeddings=32), tokenizer=str(other))
    assert tokenizer_source(part, read_config(part), None).get([]).model_max_length == 32


def test_a_model_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    part = ModelPart(source=str(folder))
    with pytest.raises(ModelError, match=r"without a tokenizer\n.*\n.*set model.tokenizer"):
        tokenizer_source(part, read_config(part), None)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot be loaded\n.*\n.*set model.tokenizer"):
        tokenizer_source(part, read_config(part), None)


@pytest.mark.parametrize(("kind", "side"), [("xlnet", "left"), ("bert", "right")])
def test_a_trained_tokenizer_pads_where_the_models_head_does_not_read(kind: str, side: str, tmp_path: Path) -> None:
    part = ModelPart(config={"model_type": kind}, vocabulary_size=100)
    tokenizer = tokenizer_source(part, read_config(part), None).get(["the film was fine"])
    tokenizer.save_pretrained(tmp_path)
    assert (tokenizer.padding_side, AutoTokenizer.from_pretrained(tmp_path).padding_side) == (side, side)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json", "nowhere"])
def test_the_side_on_which_a_tokenizer_cuts_is_read_as_transformers_reads_it(
    tmp_path: Path, side: str, where: str
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("truncation_side", None)
    if where == "tokenizer_config.json":
        settings["truncation_side"] = side
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if where == "tokenizer.json":
        content = json.loads((folder / "tokenizer.json").read_text())
        content["truncation"] = {
            "direction": side.capitalize(), "max_length": 8, "strategy": "LongestFirst", "stride": 0
        }  # fmt: skip
        (folder / "tokenizer.json").write_text(json.dumps(content, indent=2))
    theirs = AutoTokenizer.from_pretrained(folder).truncation_side
    assert theirs == (side if where != "nowhere" else "right")
    assert cuts_on_the_left(ModelPart(source=str(folder))) == (theirs == "left")
    assert cuts_on_the_left(ModelPart(config=tiny_bert_config(), tokenizer=str(folder))) == (theirs == "left")


def test_a_tokenizer_that_is_trained_cuts_on_the_right() -> None:
    assert not cuts_on_the_left(ModelPart(config=tiny_bert_config()))


def test_a_padding_token_without_an_embedding_is_replaced_and_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = len(tokenizer)
    part = ModelPart(source=str(folder))
    assert tokenizer_source(part, read_config(part), None).notices == ()
    tokenizer.add_special_tokens({"pad_token": "<fill>"})
    tokenizer.save_pretrained(folder)
    source = tokenizer_source(part, read_config(part), None)
    assert source.get(()).pad_token_id < rows
    (notice,) = source.notices
    assert f"'<fill>' (id {rows}) has no embedding in the model, which has {rows}" in notice
    assert "'[UNK]'" in notice
