"""Workbooks: every cell as a CSV export has it, and what is no table is refused by its cell."""

import base64
import datetime
import struct
import sys
import zipfile
import zlib

import openpyxl
import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read, read_unlabelled, source_fingerprint
from paceline.recipe.parts import DataPart

ROWS = [
    ("文本", "标签"),
    ("这家店很好", "正面"),
    ("two\nlines, too", "负面"),
    (None, None),
    (12.5, "正面"),
    ("=1", "负面"),
]


def workbook(path, *sheets):
    book = openpyxl.Workbook()
    book.remove(book.active)
    for title, rows in sheets:
        sheet = book.create_sheet(title)
        for row in rows:
            sheet.append(row)
    book.save(path)
    return book


def test_the_first_sheet_is_read_as_text(tmp_path):
    path = tmp_path / "a.xlsx"
    workbook(path, ("rows", [*ROWS[:-1], ("x", True)]))
    table = read(DataPart(source=str(path)))
    assert table.texts == ["这家店很好", "two\nlines, too", "12.5", "x"]
    assert table.labels == ["正面", "负面", "正面", "TRUE"]
    assert table.origins.lines.tolist() == [2, 3, 5, 6]
    assert not [notice for notice in table.notices if "sheet" in notice]


def test_of_several_sheets_the_one_that_was_read_is_named(tmp_path):
    path = tmp_path / "a.xlsx"
    book = workbook(path, ("hidden", [("a", "b")]), ("train", ROWS[:3]), ("more", ROWS))
    book["hidden"].sheet_state = "hidden"
    book.save(path)
    table = read(DataPart(source=str(path)))
    assert len(table) == 2
    (told,) = [notice for notice in table.notices if "sheet" in notice]
    assert "read is the sheet 'train'; not read: 'hidden', 'more'" in told


def test_rows_to_predict_for_keep_their_cells(tmp_path):
    path = tmp_path / "a.xlsx"
    workbook(path, ("rows", [("text", "day", "id"), ("nice", datetime.datetime(2024, 5, 1), 7), ("bad", None, 8)]))
    (table,) = read_unlabelled(DataPart(source=str(path)), 10, tell=lambda notice: None)
    assert table.rows == [{"text": "nice", "day": "2024-05-01", "id": "7"}, {"text": "bad", "day": "", "id": "8"}]


@pytest.mark.parametrize(
    ("rows", "words", "fix"),
    [
        ([], "the sheet is empty", "header"),
        ([("text", None, "label"), ("a", "b", "c")], "column 2 has no name", "name the column"),
        ([("text", "label", "text"), ("a", "b", "c")], "names a column twice", "of its own"),
        ([("text", "label"), ("a", "x"), ("b", "y", "!")], r"a\.xlsx:3: a cell beside the named columns", "delete"),
        ([("text", "label"), ("a", "x"), ("b", None)], r"a\.xlsx:3, column 'label': the label is empty", "fill it in"),
        ([("text", "label")], "only a header", "add rows"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, rows, words, fix):
    path = tmp_path / "a.xlsx"
    workbook(path, ("rows", rows))
    with pytest.raises(DataError, match=words) as caught:
        read(DataPart(source=str(path)))
    assert fix in caught.value.fix


def test_bad_rows_are_skipped_where_that_is_asked_for(tmp_path):
    path = tmp_path / "a.xlsx"
    workbook(path, ("rows", [("text", "label"), ("a", "x"), ("b", "y", "!"), ("c", "y")]))
    table = read(DataPart(source=str(path), on_bad_row="skip", bad_rows_allowed=0.5))
    assert table.texts == ["a", "c"]
    assert any("dropped 1 of 3 rows" in notice for notice in table.notices)


def test_damaged_and_protected_files_are_told_apart(tmp_path):
    path = tmp_path / "a.xlsx"
    workbook(path, ("rows", ROWS[:3]))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"not a whole \.xlsx file"):
        read(DataPart(source=str(path)))
    path.write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(1000))
    with pytest.raises(DataError, match=r"not a \.xlsx file that can be read") as caught:
        read(DataPart(source=str(path)))
    assert "password" in caught.value.why
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "no workbook")
    with pytest.raises(DataError, match=r"not a whole \.xlsx file"):
        read(DataPart(source=str(path)))


def test_damage_inside_the_sheet_is_no_end_of_it(tmp_path):
    path = tmp_path / "a.xlsx"
    workbook(path, ("rows", [("text", "label"), *[(f"text {number}", "xy"[number % 2]) for number in range(3000)]]))
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    sheet = next(name for name in parts if name.endswith("sheet1.xml"))
    parts[sheet] = parts[sheet][: len(parts[sheet]) * 2 // 3]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    with pytest.raises(DataError, match=r"a\.xlsx: not a whole \.xlsx file"):
        read(DataPart(source=str(path)))


def test_without_calamine_the_command_is_given(tmp_path, monkeypatch):
    path = tmp_path / "a.xlsx"
    workbook(path, ("rows", ROWS[:3]))
    monkeypatch.setitem(sys.modules, "python_calamine", None)
    with pytest.raises(DataError, match="need python-calamine") as caught:
        read(DataPart(source=str(path)))
    assert caught.value.fix == 'pip install "paceline[excel]"'


def test_the_fingerprint_is_of_the_file(tmp_path):
    path = tmp_path / "a.xlsx"
    workbook(path, ("rows", ROWS[:3]))
    first = source_fingerprint(DataPart(source=str(path)))
    workbook(path, ("rows", ROWS[:2]))
    assert first != source_fingerprint(DataPart(source=str(path)))


def test_a_workbook_that_expands_to_gigabytes_is_refused_before_it_is_read(tmp_path):
    """And a part whose name leads out of the folder is written nowhere."""
    path, bomb = tmp_path / "a.xlsx", tmp_path / "in" / "bomb.xlsx"
    bomb.parent.mkdir()
    workbook(path, ("rows", [("text", "label"), ("x", "y"), ("z", "w")]))
    with zipfile.ZipFile(path) as honest, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        for name in honest.namelist():
            made.writestr(name, honest.read(name))
        made.writestr("../../slipped.txt", "out")
    assert len(read(DataPart(source=str(bomb)))) == 2
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        made.writestr("xl/worksheets/sheet9.xml", bytes(300 * 2**20))
    with pytest.raises(DataError, match=r"bomb.xlsx: its [\d,]+ bytes expand to 314,\d+,\d+"):
        read(DataPart(source=str(bomb)))
    assert not list(tmp_path.rglob("slipped.txt"))
    assert not (tmp_path.parent / "slipped.txt").exists()


def rewritten(path, changed, sheet="sheet1.xml"):
    """Write a workbook again, with ``changed`` applied to a sheet's text."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    part = next(name for name in parts if name.endswith(sheet))
    parts[part] = changed(parts[part].decode()).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("error", ["#N/A", "#REF!", "#DIV/0!", "#NAME?"])
@pytest.mark.parametrize("column", ["text", "label"])
def test_an_error_of_a_formula_is_neither_text_nor_class(tmp_path, error, column):
    row = {"text": ("text", error, "y"), "label": ("label", "b", error)}[column]
    workbook(tmp_path / "a.xlsx", ("rows", [("text", "label"), ("a", "x"), row[1:], ("c", "y")]))
    with pytest.raises(DataError, match=rf"a\.xlsx:3, column '{column}': an error of the spreadsheet") as caught:
        read(DataPart(source=str(tmp_path / "a.xlsx")))
    assert error in str(caught.value)
    table = read(DataPart(source=str(tmp_path / "a.xlsx"), on_bad_row="skip", bad_rows_allowed=0.5))
    assert table.texts == ["a", "c"]


def test_an_error_in_a_column_that_is_not_read_is_no_matter(tmp_path):
    workbook(tmp_path / "a.xlsx", ("rows", [("text", "rate"), ("a", "#DIV/0!"), ("b", 1)]))
    (table,) = read_unlabelled(DataPart(source=str(tmp_path / "a.xlsx")), 10, tell=lambda notice: None)
    assert table.rows == [{"text": "a", "rate": "#DIV/0!"}, {"text": "b", "rate": "1"}]


def test_escapes_of_characters_are_these_characters(tmp_path):
    cells = ["one_x000D_\ntwo", "a_x0009_b", "_x005F_x000D_", "_xD83D__xDE00_ yes", "_x12_ no escape", "snake_x_case"]
    workbook(
        tmp_path / "a.xlsx", ("rows", [("text", "label"), *[(cell, "xy"[at % 2]) for at, cell in enumerate(cells)]])
    )
    expected = ["one\r\ntwo", "a\tb", "_x000D_", "\U0001f600 yes", "_x12_ no escape", "snake_x_case"]
    assert read(DataPart(source=str(tmp_path / "a.xlsx"))).texts == expected


@pytest.mark.parametrize(("cell", "problem"), [("a_x0000_b", "a NUL"), ("a_xD83D_b", "half a surrogate pair")])
def test_escapes_of_what_is_no_character_are_refused(tmp_path, cell, problem):
    workbook(tmp_path / "a.xlsx", ("rows", [("text", "label"), ("a", "x"), (cell, "y")]))
    with pytest.raises(DataError, match=rf"a\.xlsx:3, column 'text': {problem}"):
        read(DataPart(source=str(tmp_path / "a.xlsx")))


def test_an_empty_first_sheet_gives_way_to_one_with_rows(tmp_path):
    workbook(tmp_path / "a.xlsx", ("Sheet1", []), ("Sheet2", [(None, None)]), ("rows", [*ROWS[:3]]), ("more", ROWS))
    table = read(DataPart(source=str(tmp_path / "a.xlsx")))
    assert len(table) == 2
    (notice,) = [notice for notice in table.notices if "sheet" in notice]
    assert "read is the sheet 'rows'; not read: 'Sheet1' (empty), 'Sheet2' (empty), 'more'" in notice


def test_a_formula_without_its_value_is_named_by_its_cell(tmp_path):
    path = tmp_path / "a.xlsx"
    workbook(path, ("rows", [("text", "label"), ("a", "x"), ("b", '=IF(A3="b","y","x")'), ("c", "y")]))
    with pytest.raises(DataError, match=r"a\.xlsx:3, column 'label': a formula without its value, B3") as caught:
        read(DataPart(source=str(path)))
    assert "open the file in a spreadsheet and save it" in caught.value.fix


def test_a_formula_with_its_value_is_that(tmp_path):
    path = tmp_path / "a.xlsx"
    workbook(path, ("rows", [("text", "note", "label"), ("a", "=1+1", "x"), ("b", '=""', "=A2"), ("c", "=NA()", "y")]))

    def calculated(sheet):
        sheet = sheet.replace('r="B2"><f>1+1</f><v />', 'r="B2"><f>1+1</f><v>2</v>')
        sheet = sheet.replace('r="B3"><f>""</f><v />', 'r="B3" t="str"><f>""</f><v></v>')
        sheet = sheet.replace('r="C3"><f>A2</f><v />', 'r="C3" t="str"><f>A2</f><v>z</v>')
        return sheet.replace('r="B4"><f>NA()</f><v />', 'r="B4" t="e"><f>NA()</f><v>#N/A</v>')

    rewritten(path, calculated)
    (table,) = read_unlabelled(DataPart(source=str(path)), 10, tell=lambda notice: None)
    assert [row["note"] for row in table.rows] == ["2", "", "#N/A"]
    assert read(DataPart(source=str(path))).labels == ["x", "z", "y"]


def test_a_title_above_a_known_header_is_passed_over_with_a_notice(tmp_path):
    rows = [("text", "label"), ("a", "x"), ("b", "y")]
    workbook(tmp_path / "a.xlsx", ("rows", [("Reviews of 2026",), (None,), *rows]))
    table = read(DataPart(source=str(tmp_path / "a.xlsx")))
    assert table.texts == ["a", "b"]
    assert table.origins.lines.tolist() == [4, 5]
    assert any("row 3 names the columns" in notice and "Reviews of 2026" in notice for notice in table.notices)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("Reviews of 2026",), ("Frage", "Klasse"), ("a", "x"), ("b", "y")], "the first line is no header"),
        ([("I liked it", "x"), ("what a shop", "y"), ("never again", "x")], "the first row seems to be data"),
        ([("text", "score", None), (None, "a", "b"), ("nice", 1, 2)], "merged cell"),
        ([("text", None, "label"), ("nice", 1, "x")], "merged cell"),
        ([("text", "label"), ("a", "x"), ("text", "label"), ("b", "y")], r"a\.xlsx:3: the header stands again"),
    ],
)
def test_rows_that_are_no_header_or_a_second_one_are_refused(tmp_path, rows, words):
    workbook(tmp_path / "a.xlsx", ("rows", rows))
    with pytest.raises(DataError, match=words):
        read(DataPart(source=str(tmp_path / "a.xlsx")))


def test_the_index_that_pandas_writes_is_no_matter(tmp_path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"text": ["a", "b"], "label": ["x", "y"]}).to_excel(tmp_path / "a.xlsx")
    assert read(DataPart(source=str(tmp_path / "a.xlsx"))).texts == ["a", "b"]


def test_dates_booleans_and_numbers_are_classes_as_a_csv_export_writes_them(tmp_path):
    labels = [datetime.datetime(2026, 1, 2), True, 7, 7.5, datetime.datetime(2026, 1, 2), True]
    workbook(
        tmp_path / "a.xlsx", ("rows", [("text", "label"), *[(f"t{at}", label) for at, label in enumerate(labels)]])
    )
    assert read(DataPart(source=str(tmp_path / "a.xlsx"))).labels[:4] == ["2026-01-02", "TRUE", "7", "7.5"]


def test_a_column_of_formulas_without_values_is_named_in_a_row_of_nothing_else(tmp_path):
    workbook(tmp_path / "a.xlsx", ("rows", [("text", "label"), ("a", "x"), (None, "=A2")]))
    with pytest.raises(DataError, match=r"a\.xlsx:3, column '(text|label)'"):
        read(DataPart(source=str(tmp_path / "a.xlsx")))


def test_whole_numbers_are_written_without_a_point(tmp_path):
    cells = [7.0, -3, 0.1 + 0.2, 1e20, 1.5e-7, 2**53 - 1, -0.5]
    workbook(tmp_path / "a.xlsx", ("rows", [("text", "id"), *[(f"t{cell}", cell) for cell in cells]]))
    (table,) = read_unlabelled(DataPart(source=str(tmp_path / "a.xlsx")), 10, tell=lambda notice: None)
    expected = ["7", "-3", "0.3", "1e+20", "1.5e-07", "9007199254740991", "-0.5"]
    assert [row["id"] for row in table.rows] == expected


def test_a_table_that_begins_below_and_right_of_empty_cells_is_read(tmp_path):
    book = openpyxl.Workbook()
    sheet = book.active
    for place, value in {"C3": "text", "D3": "label", "C5": "a", "D5": "x", "C6": "b", "D6": "y"}.items():
        sheet[place] = value
    book.save(tmp_path / "a.xlsx")
    table = read(DataPart(source=str(tmp_path / "a.xlsx")))
    assert (table.texts, table.labels, table.origins.lines.tolist()) == (["a", "b"], ["x", "y"], [5, 6])


CELLS = [("text", "label"), ("这家店很好", 7), ("b", 7.5), ("c", True), ("d", "x"), (None, None), ("e", "y")]
AS_TEXT = (["这家店很好", "b", "c", "d", "e"], ["7", "7.5", "TRUE", "x", "y"])


def write_ods(path, rows):
    """Write the least that is an OpenDocument spreadsheet."""

    def cell(value):
        if value is None:
            return "<table:table-cell/>"
        kind = {bool: "boolean", int: "float", float: "float", str: "string"}[type(value)]
        attribute = {"boolean": f'office:boolean-value="{str(value).lower()}"', "float": f'office:value="{value}"'}
        text = f"<text:p>{value}</text:p>" if kind == "string" else ""
        return f'<table:table-cell office:value-type="{kind}" {attribute.get(kind, "")}>{text}</table:table-cell>'

    spaces = " ".join(
        f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"' for name in ("office", "table", "text")
    )
    body = "".join(f"<table:table-row>{''.join(map(cell, row))}</table:table-row>" for row in rows)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.spreadsheet")
        archive.writestr(
            "META-INF/manifest.xml", '<m:manifest xmlns:m="urn:oasis:names:tc:opendocument:xmlns:manifest:1.0"/>'
        )
        archive.writestr(
            "content.xml",
            f"<office:document-content {spaces}><office:body><office:spreadsheet>"
            f'<table:table table:name="rows">{body}</table:table>'
            "</office:spreadsheet></office:body></office:document-content>",
        )


def write_xlsb(path, rows):
    """Write the least that is a binary workbook (MS-XLSB): records of a kind, a length and data."""

    def number(value):
        return bytes([value]) if value < 128 else bytes([value & 127 | 128, value >> 7])

    def record(kind, data=b""):
        return number(kind) + number(len(data)) + data

    def wide(text):
        return struct.pack("<I", len(text)) + text.encode("utf-16-le")

    def cell(column, value):
        place = struct.pack("<II", column, 0)
        if isinstance(value, bool):
            return record(4, place + bytes([value]))
        return record(6, place + wide(value)) if isinstance(value, str) else record(5, place + struct.pack("<d", value))

    sheet = record(129) + record(148, struct.pack("<IIII", 0, len(rows) - 1, 0, 1)) + record(145)
    for line, row in enumerate(rows):
        sheet += record(0, struct.pack("<IIHBBI", line, 0, 300, 0, 0, 0) + bytes(1))
        sheet += b"".join(cell(column, value) for column, value in enumerate(row) if value is not None)
    sheet += record(146) + record(130)
    named = record(156, struct.pack("<II", 0, 1) + wide("rId1") + wide("rows"))
    book = record(131) + record(153, bytes(12)) + record(143) + named + record(144) + record(132)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("xl/workbook.bin", book)
        archive.writestr("xl/worksheets/sheet1.bin", sheet)
        archive.writestr(
            "xl/_rels/workbook.bin.rels",
            '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
            '<Relationship Id="rId1" Target="worksheets/sheet1.bin"/></Relationships>',
        )


XLS = (
    r"c-rk)O=uHA6#izjn`~o$l9~#w5JSMKwLOTJUfNYbd$Lq7{$fp<JxJ43V!&2VtF_=o6g-"
    r"IHrBDxEs$Qy64|?+;MD!pEg+`B_1O*Rm*Eerxv8@pr&`M>$<-M7C^UciLnK!dPuZz*y@kdQ1EJG&(Sa7NkTx1g@RbC+is&^cj^-"
    r"`0>@v){*Wzs?h4NTX(3duE;>s^9|hx!ZBz(<nfIF0VXoSj%j>|q~LLi*4_THr2OYSGAE)wAwny`J?0W<F!Ri!Ik!cMx}097WOUZf"
    r"RFhd{|3zT`gq4kGahUw(LLyUdkxGctf~c1H1F5QrR_D5!b6R0b0;5J7?!*xeoUb28Ic30|RZD%q(KG*c15XB!I8pu6~~I?W=1SAp"
    r"7^F_Rw$aCN1J}`%O&;M&O*}O)`dRY|>?oj{M-"
    r"+GjnL?W7%X23ieRJ0J5pHoi!ldU!OX5>%`UG^G7Ir(j<K(8ImCqJ1mcTJ{}@Vj)xlFHr1pvsN;N;H&28{nY;hx&Hi+c)ytL<9@l+"
    r"vY?gk)!6n&(8rQ<>56o?0y`A-"
    r"C?sX&Qn^?yvvMFuuX;7Jcqs+O&waqlnPR3hn%cA^N%8z|M@FYI=$=XKw$*$75*yKBF97%eRWvIQpM$sx-#hu#{Pc1JM>X4aX-"
    r"T2FaV`>rQyQ7|tb(oi1j1Xn*mgMXR#TRAxg88z?3tE`{i6XA}S{c5^{D9)Svp>Dg<p;{}1I(9mZ)hf!Tz@26FT>WEZ7A<`W(SowM"
    r"j5`r{E+g7LW*WBS=7*})niJ!N{8`JgyF-"
    r"74<9~!`0(N5A490u?|}P(z%O+2g)gN3>&%lZ_`ga1TO7n7T?P86+>0Egc??$+KO0~OuP?E}Hs1e2i9<Ac9{otOAN>`_FMXtm#rLz"
    r"~hLJzFg(@9?p%Op;^7uahmg(TN"
)
"""A workbook of Excel 97 that xlwt wrote, with a date in the last row."""


@pytest.mark.parametrize(("suffix", "write"), [(".ods", write_ods), (".xlsb", write_xlsb), (".xlsx", write_xlsb)])
def test_other_workbooks_are_read_as_xlsx_is(tmp_path, suffix, write):
    path = tmp_path / f"a{suffix}"
    write(path, CELLS)
    table = read(DataPart(source=str(path)))
    assert (table.texts, table.labels) == AS_TEXT
    assert table.origins.lines.tolist() == [2, 3, 4, 5, 7]
    write(path, [*CELLS, ("f", "#N/A")])
    with pytest.raises(DataError, match=rf"a\{suffix}:8, column 'label': an error of the spreadsheet"):
        read(DataPart(source=str(path)))


def test_a_workbook_of_excel_97_is_read(tmp_path):
    path = tmp_path / "a.xls"
    path.write_bytes(zlib.decompress(base64.b85decode("".join(XLS))))
    table = read(DataPart(source=str(path)))
    assert (table.texts, table.labels) == (AS_TEXT[0], ["7", "7.5", "TRUE", "x", "2026-01-02"])


def test_a_workbook_with_macros_is_read(tmp_path):
    workbook(tmp_path / "a.xlsm", ("rows", ROWS[:3]))
    assert len(read(DataPart(source=str(tmp_path / "a.xlsm")))) == 2


def test_a_page_by_the_name_of_a_workbook_is_refused(tmp_path):
    (tmp_path / "a.xls").write_text("<html><table><tr><td>text</td></tr></table></html>")
    with pytest.raises(DataError, match=r"not a whole \.xls file") as caught:
        read(DataPart(source=str(tmp_path / "a.xls")))
    assert "save it again" in caught.value.fix
