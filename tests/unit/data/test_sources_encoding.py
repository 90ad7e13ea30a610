"""Files in the encodings and with the delimiters that people have."""

import gzip
from random import Random

import pytest

from paceline.contract.errors import DataError
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


KOREAN = [("이 영화는 정말 재미있어요", "좋음"), ("배송이 너무 늦었습니다. 다시는 안 사요", "나쁨")]
CYRILLIC = [("Очень хороший фильм, рекомендую всем", "да"), ("Скучно и плохо, зря потратил время", "нет")]
TAIWANESE = [("這家店的東西很好吃，服務也很好", "正面"), ("品質太差，不會再買了", "負面")]
GREEK = [("Πολύ καλή ταινία, την συνιστώ σε όλους", "ναι"), ("Βαρετή και κακή, έχασα τον χρόνο μου", "όχι")]
THAI = [("ภาพยนตร์เรื่องนี้สนุกมากและนักแสดงเล่นได้ดีเยี่ยม", "ดี"), ("การบริการแย่มากและเรารออาหารนานเกินไป", "แย่")]
POLISH = [("Film był świetny, a aktorzy zagrali wspaniale", "tak"), ("Obsługa była niemiła, długo czekaliśmy", "nie")]
CZECH = [("Film byl skvělý a herci hráli výborně", "ano"), ("Obsluha byla nepříjemná, dlouho jsme čekali", "ne")]
CROATIAN = [
    ("Film je bio odličan i glumci su igrali sjajno", "da"),
    ("Usluga je bila loša, dugo smo čekali jelo", "ne"),
]
TURKISH = [("Film çok güzeldi ve oyuncular harika oynadı", "iyi"), ("Servis kötüydü, çok bekledik", "kötü")]
HUNGARIAN = [
    ("A film kiváló volt, nagyszerűen játszottak", "jó"),
    ("A kiszolgálás barátságtalan volt, sokáig vártunk", "rossz"),
]
HEBREW = [("הסרט היה מצוין והשחקנים שיחקו נהדר", "כן"), ("השירות היה גרוע וחיכינו הרבה זמן", "לא")]
ARABIC = [("الفيلم كان رائعا والممثلون أدوا بشكل جيد", "نعم"), ("الخدمة كانت سيئة وانتظرنا طويلا", "لا")]
LITHUANIAN = [("Filmas buvo puikus, ačiū, rekomenduoju visiems", "taip"), ("Aptarnavimas prastas, ilgai laukėme", "ne")]
UKRAINIAN = [("Дуже гарний фільм, раджу всім", "так"), ("Нудно й погано, лише змарнував час", "ні")]
GERMAN = [
    ("Der Film war großartig, ich würde ihn überall empfehlen", "schön"),
    ("Die Bedienung hörte nicht zu", "übel"),
]
FRENCH = [("L’œuvre est trop longue, mais ça m’a ému ; déjà vu, bientôt là", "bien")]
QUOTES = [("It’s good, I don’t know why they didn’t like it", "fine"), ("We’re out", "bad")]
PORTUGUESE = [("O serviço não é bom, esperámos pela refeição", "não")]
PLAIN = [("nothing beyond ASCII in this row", "plain")]


@pytest.mark.parametrize(
    ("rows", "encoding", "said"),
    [
        (KOREAN, "cp949", "cp949"),
        (CYRILLIC, "cp1251", "cp1251"),
        (TAIWANESE, "big5", "cp950"),
        (THAI, "cp874", "cp874"),
        (POLISH, "cp1250", "cp1250"),
        (POLISH, "iso8859-2", "iso8859-2"),
        (CZECH, "cp1250", "cp1250"),
        (CROATIAN, "cp1250", "cp1250"),
        (HUNGARIAN, "cp1250", "cp1250"),
        (TURKISH, "cp1254", "cp1254"),
        (CYRILLIC, "koi8-r", "koi8-r"),
        (CYRILLIC, "cp866", "cp866"),
        (GREEK, "cp1253", "cp1253"),
        (HEBREW, "cp1255", "cp1255"),
        (ARABIC, "cp1256", "cp1256"),
        (LITHUANIAN, "cp1257", "cp1257"),
        (UKRAINIAN, "cp1251", "cp1251"),
        (GERMAN, "mac-roman", "mac-roman"),
        (GERMAN, "cp850", "cp850"),
        (JAPANESE, "euc_jp", "euc_jp"),
        (JAPANESE, "iso2022_jp", "iso2022_jp"),
        (KOREAN, "iso2022_kr", "iso2022_kr"),
        (JAPANESE, "utf-32", "utf-32"),
    ],
)
def test_other_languages_are_told_from_their_neighbours(tmp_path, rows, encoding, said):
    path = tmp_path / "a.csv"
    path.write_bytes(csv(rows).encode(encoding))
    table = read(DataPart(source=str(path)))
    assert table.texts == [text for text, _ in rows]
    (told,) = [notice for notice in table.notices if "read as" in notice]
    assert f"read as {said} (--set data.encoding=... to change); line 2 reads" in told
    assert rows[0][0] in told


@pytest.mark.parametrize("rows", [FRENCH, PORTUGUESE, [("Le café n³est très bon qu’à Noël", "où")], WESTERN, QUOTES])
def test_letters_that_stand_alone_are_of_no_east_asian_encoding(tmp_path, rows):
    """Beside an ASCII letter each looks like a character of Shift-JIS or Big5."""
    path = tmp_path / "a.csv"
    path.write_bytes(csv(rows * 2).encode("cp1252"))
    assert read(DataPart(source=str(path), allow_single_class=True)).texts == [text for text, _ in rows * 2]


def test_a_few_characters_of_big5_beside_english_are_no_accents(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(csv([("fine silk", "好"), ("plain cotton", "壞")] * 20).encode("big5"))
    assert set(read(DataPart(source=str(path))).labels) == {"好", "壞"}


def test_a_few_chinese_words_that_could_be_syllables_are_chinese(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(csv([("fine silk", "高档"), ("plain cotton", "低档")] * 20).encode("gbk"))
    assert set(read(DataPart(source=str(path))).labels) == {"高档", "低档"}


@pytest.mark.parametrize(
    ("labels", "encoding"),
    [
        (("好", "坏"), "gbk"),
        (("긍정", "부정"), "cp949"),
        (("хорошо", "плохо"), "cp1251"),
        (("ναι", "όχι"), "cp1253"),
        (("sí", "no"), "cp1252"),
        (("kötü", "iyi"), "cp1254"),
    ],
)
def test_labels_beside_english_texts_tell_their_alphabet(tmp_path, labels, encoding):
    path = tmp_path / "a.csv"
    path.write_bytes(csv([("The film was great and I liked it", labels[0]), ("Dull", labels[1])] * 10).encode(encoding))
    assert set(read(DataPart(source=str(path))).labels) == set(labels)


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_are_refused_with_the_setting(tmp_path, seed):
    path = tmp_path / "a.csv"
    random = Random(seed)
    rows = [bytes(random.choices(range(0x80, 0x100), k=12)) + b",x\n" for _ in range(40)]
    path.write_bytes(b"text,label\n" + b"".join(rows))
    with pytest.raises(DataError, match="not UTF-8") as caught:
        read(DataPart(source=str(path)))
    assert "--set data.encoding=NAME" in caught.value.fix
    assert "latin-1" not in str(caught.value)


def test_colours_of_a_terminal_are_no_escapes_of_an_encoding(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("text,label\n\x1b[31mred\x1b[0m é,a\n$5 (\x1b$B),b\n".encode())
    table = read(DataPart(source=str(path)))
    assert table.labels == ["a", "b"]
    assert not [notice for notice in table.notices if "read as" in notice]


def test_an_accent_at_the_very_end_is_no_cut_utf_8(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("label,text\nx,The waiter was kind\ny,We met in the new café".encode("cp1252"))
    assert read(DataPart(source=str(path))).texts[-1] == "We met in the new café"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("rows", "encoding"), [(CHINESE, "gbk"), (WESTERN, "cp1252"), (CHINESE, "utf-8")])
def test_bytes_after_a_megabyte_of_ascii_decide_as_well(tmp_path, rows, encoding, packed):
    path = tmp_path / ("a.csv.gz" if packed else "a.csv")
    raw = csv(PLAIN * 40_000 + rows).encode(encoding)
    assert len(raw) > 1_500_000
    path.write_bytes(gzip.compress(raw, 1) if packed else raw)
    table = read(DataPart(source=str(path)))
    assert table.texts[-len(rows) :] == [text for text, _ in rows]
    told = [notice for notice in table.notices if "read as" in notice]
    assert all("line 40,002 reads" in notice and rows[0][0][:8] in notice for notice in told)
    assert len(told) == (encoding != "utf-8")


@pytest.mark.parametrize("known", ["é", "好的"])
def test_a_stray_byte_does_not_turn_utf_8_into_windows_1252(tmp_path, known):
    path = tmp_path / "a.csv"
    path.write_bytes(csv([(known, "x"), ("plain", "y")]).encode() + b'"a \x93quote\x94",y\n')
    with pytest.raises(DataError, match=r"a\.csv:4, column 'text': not UTF-8") as caught:
        read(DataPart(source=str(path)))
    assert "the rest of the file is UTF-8" in caught.value.why
    assert "write the row anew" in caught.value.fix


def test_a_damaged_byte_among_gbk_is_reported_where_it_is(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(csv(CHINESE * 20).encode("gbk") + b'"\xff\xff",y\n')
    with pytest.raises(DataError, match=r"a\.csv:62.*: not gb18030") as caught:
        read(DataPart(source=str(path)))
    assert "the rest of the file is gb18030" in caught.value.why


@pytest.mark.parametrize(
    ("rows", "encoding", "said"),
    [(WESTERN, "cp1252", "cp1252"), (CYRILLIC, "cp1251", "cp1251"), (CZECH, "cp1250", "cp1250")],
)
def test_damaged_bytes_leave_an_alphabet_what_it_is(tmp_path, rows, encoding, said):
    path = tmp_path / "a.csv"
    path.write_bytes(csv(rows * 20).encode(encoding) + b'"\x81\x98\x90 \x81",x\n')
    heard = []
    list(read_unlabelled(DataPart(source=str(path), on_bad_row="skip", bad_rows_allowed=0.5), 100, tell=heard.append))
    assert any(f"read as {said} " in notice for notice in heard)
    assert any(f"not {said}" in notice for notice in heard)


def test_a_setting_that_does_not_fit_names_the_one_that_does(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(csv(CHINESE).encode("gbk"))
    with pytest.raises(DataError, match="not UTF-8") as caught:
        read(DataPart(source=str(path), encoding="utf-8"))
    assert caught.value.fix.startswith("--set data.encoding=gb18030, as which it reads")
    assert CHINESE[0][0][:5] in caught.value.fix


@pytest.mark.parametrize("encoding", ["gbk", "utf-16"])
def test_texts_in_folders_are_read_as_set(tmp_path, encoding):
    for number, (text, label) in enumerate(CHINESE):
        (tmp_path / label).mkdir(exist_ok=True)
        (tmp_path / label / f"{number}.txt").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match="not UTF-8") as caught:
        read(DataPart(source=str(tmp_path)))
    named = caught.value.fix.partition(",")[0].removeprefix("--set data.encoding=")
    assert sorted(read(DataPart(source=str(tmp_path), encoding=named)).texts) == sorted(text for text, _ in CHINESE)
