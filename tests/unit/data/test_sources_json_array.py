"""One JSON value a file: an array of objects is read, all else is refused with what was found."""

import gzip
import json

import pytest

from paceline.data.sources import read
from paceline.errors import DataError
from paceline.recipe.parts import DataPart

ROWS = [{"text": "这家店很好", "label": "好"}, {"text": "bad", "label": "差"}]


@pytest.mark.parametrize("value", [ROWS, {"data": ROWS}, {"train": ROWS}, {"version": "1.1", "count": 2, "rows": ROWS}])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "gbk"])
def test_an_array_of_objects(tmp_path, value, indent, encoding):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(value, ensure_ascii=False, indent=indent), encoding=encoding)
    table = read(DataPart(source=str(path)))
    assert table.texts == [row["text"] for row in ROWS]
    assert table.origins.lines.tolist() == [1, 2]
    assert any("gb18030" in notice for notice in table.notices) == (encoding == "gbk")


def test_compressed_and_longer_than_any_line_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.data.sources.lines.MAX_LINE_BYTES", 1000)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS * 100).encode()))
    assert len(read(DataPart(source=str(path)))) == 200


@pytest.mark.parametrize(
    ("content", "words", "fix"),
    [
        ('{"text": ["a", "b"], "label": [1, 0]}', r"'text': an array of strings \(2\), 'label': an array of num", "["),
        ('{"train": [{"text": "a"}], "test": [{"text": "b"}]}', r"'train': an array of objects \(1\)", "jq -c"),
        ('{"text": "a", "label": 1}', "it holds 'text': a string, 'label': a number", "write an array"),
        ("[]", "the file is empty", "write an array"),
        ("", "the file is empty", "write an array"),
        ("{}", "it holds nothing", "write an array"),
        ("3", "found a number where an array of rows is needed", "write an array"),
        ('[{"text": "a", "label": 1}, 7]', r"a\.json:2: the element is no object", "write {"),
        ('[["a", 1]]', r"a\.json:1: the element is no object", "write {"),
        ('{"text": "a"}\n{"text": "b"}\n', r"a\.json:2: several JSON values", "a.jsonl"),
        ('[{"text": "a"},\n {"text": "b"', r"a\.json:2: the file is not JSON", "cut off"),
        ('[{"text": "a", "text": "b"}]', "a key is given twice", "once"),
        ('[{"text": "a\0b", "label": 1}]', "a NUL character", "tr -d"),
        ("[" * 100_000, "the file is not JSON", "write an array"),
        ('[{"text": "a"}]', r"a\.json.*no label column found", "data.label"),
    ],
)
def test_all_else_is_refused_with_what_was_found(tmp_path, content, words, fix):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        read(DataPart(source=str(path)))
    assert fix in caught.value.fix


def test_bytes_that_do_not_decode_name_their_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes('[{"text": "好的",\n'.encode() + b'"label": "\xff"}]')
    with pytest.raises(DataError, match=r"a\.json:2: not UTF-8"):
        read(DataPart(source=str(path)))


def test_a_cut_gzip_file(tmp_path):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS).encode())[:-9])
    with pytest.raises(DataError, match="cut off"):
        read(DataPart(source=str(path)))
