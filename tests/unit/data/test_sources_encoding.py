"""Files in the encodings and with the delimiters that people have."""

import gzip

import pytest

from paceline.data.sources.fingerprint import source_fingerprint
from paceline.data.sources.reader import read, read_unlabelled
from paceline.recipe.parts import DataPart

CHINESE = [("这家店的东西很好吃，服务也好", "正面"), ("质量太差，不会再买了", "负面"), ("一般般吧", "正面")]
JAPANESE = [("とても良い商品です", "良い"), ("すぐに壊れました。残念", "悪い")]
WESTERN = [("Le café était très bon – \u201cmerci\u201d", "bien"), ("Mauvaise soirée à Noël", "mal")]


def csv(rows, mark=","):
    return f"text{mark}label\n" + "".join(f'"{text}"{mark}{label}\n' for text, label in rows)


@pytest.mark.parametrize(
    ("rows", "encoding", "said"),
    [
        (CHINESE, "gbk", "gb18030"),
        (CHINESE, "gb18030", "gb18030"),
        (CHINESE, "utf-16", "utf-16"),
        (WESTERN, "utf-16-le", "utf-16-le"),
        (WESTERN, "utf-16-be", "utf-16-be"),
        (JAPANESE, "cp932", "cp932"),
        (WESTERN, "cp1252", "cp1252"),
        (CHINESE, "utf-8", None),
        (CHINESE, "utf-8-sig", None),
        (JAPANESE, "utf-8", None),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_encoding_is_told_by_the_bytes(tmp_path, rows, encoding, said, packed):
    raw = csv(rows).encode(encoding)
    path = tmp_path / ("a.csv.gz" if packed else "a.csv")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    table = read(DataPart(source=str(path)))
    assert table.texts == [text for text, _ in rows]
    told = [notice for notice in table.notices if "read as" in notice]
    assert [said in notice and rows[0][0][:3] in notice for notice in told] == ([True] if said else [])
    heard = []
    (piece,) = read_unlabelled(DataPart(source=str(path)), 10, tell=heard.append)
    assert piece.texts == table.texts
    assert any("read as" in notice for notice in heard) == bool(said)


@pytest.mark.parametrize("mark", [";", "\t", "|", ","])
def test_other_delimiters_need_no_setting(tmp_path, mark):
    path = tmp_path / "a.csv"
    path.write_text(f'"text"{mark}"label"\n"one, two;\nthree|\tfour"{mark}x\n"five"{mark}y\n')
    assert read(DataPart(source=str(path))).texts == ["one, two;\nthree|\tfour", "five"]


def test_a_setting_overrules_the_bytes_and_is_part_of_the_cache_key(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("text#label\né#x\nb#y\n".encode("cp1252"))
    part = DataPart(source=str(path), encoding="cp1250", delimiter="#")
    assert read(part).texts == ["é", "b"]
    plain = source_fingerprint(DataPart(source=str(path), delimiter="#"))
    assert len({source_fingerprint(part), plain, source_fingerprint(DataPart(source=str(path)))}) == 3


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="did you mean gb18030"):
        DataPart(encoding="gb18300")
    with pytest.raises(ValueError, match="one character"):
        DataPart(delimiter=";;")


@pytest.mark.parametrize("text", ["文本", "内容", "评论", "评价"])
@pytest.mark.parametrize("label", ["标签", "类别", "情感", "分类"])
def test_chinese_headers_are_known(tmp_path, text, label):
    path = tmp_path / "评论.csv"
    rows = "".join(f"标题;{text};{label}\n" for text, label in CHINESE)
    path.write_bytes(f"标题;{text};{label}\n{rows}".encode("gbk"))
    table = read(DataPart(source=str(path)))
    assert table.texts == [content for content, _ in CHINESE]
    assert table.columns == {"text": text, "label": label}
