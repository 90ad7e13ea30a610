"""Delimited files as other programs write them: read as they are meant, or refused; no row is lost in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read, read_unlabelled
from paceline.data.sources.locate import fitting
from paceline.data.table import Table
from paceline.recipe.parts import DataPart

ROWS = [(f"the shop was {('slow', 'fast')[at % 2]} today {at}", ("bad", "good")[at % 2]) for at in range(40)]
BODY = "".join(f"{text},{label}\n" for text, label in ROWS)


def load(folder: Path, content: str | bytes, name: str = "a.csv", **settings: Any) -> Table:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read(DataPart(source=str(path), **settings))


def pairs(table: Table) -> list[tuple[str, object]]:
    assert table.texts is not None
    assert table.labels is not None
    return list(zip(table.texts, table.labels, strict=True))


def refusal(folder: Path, content: str, name: str = "a.csv", **settings: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        load(folder, content, name, **settings)
    return caught.value


@pytest.mark.parametrize(
    "content",
    [
        "sep=;\ntext;label\n" + BODY.replace(",", ";"),
        '\ufeff"SEP=|"\r\ntext|label\r\n' + BODY.replace(",", "|").replace("\n", "\r\n"),
        "sep=\t\ntext\tlabel\n" + BODY.replace(",", "\t"),
        "sep=,\n" + "text,label\n" + BODY,
        "  \n\t\ntext,label\n" + BODY,
        ",\ntext,label\n" + BODY,
        "#text,label\n" + BODY,
    ],
)
def test_lines_above_the_header_that_say_nothing_else_are_passed_over(content: str, tmp_path: Path) -> None:
    table = load(tmp_path, content, text="auto" if "#" not in content else "#text")
    assert pairs(table) == ROWS
    assert not [notice for notice in table.notices if "guessed" not in notice]
    assert int(table.origins.lines[0]) == content.count("\n") - len(ROWS) + 1


@pytest.mark.parametrize(
    ("above", "line"),
    [
        ("# exported by me\n", 2),
        ("# exported by me, today\n# at home\n", 3),
        ("My shop,\n,\n", 3),
        ("My shop\n\nAll reviews of 2026\n", 4),
    ],
)
def test_titles_and_comments_above_a_header_that_is_known_are_passed_over_with_a_notice(
    above: str, line: int, tmp_path: Path
) -> None:
    table = load(tmp_path, above + "text,label\n" + BODY)
    assert pairs(table) == ROWS
    assert any(f"line {line} names the columns" in notice and "not read" in notice for notice in table.notices)
    renamed = load(tmp_path, above + "Frage,Klasse\n" + BODY, text="Frage", label="Klasse")
    assert pairs(renamed) == ROWS


def test_a_title_above_a_header_that_is_not_known_is_refused_with_a_command_that_removes_it(tmp_path: Path) -> None:
    error = refusal(tmp_path, "My shop\nFrage,Klasse\n" + BODY)
    assert "the first line is no header" in str(error)
    assert f"tail -n +2 < {tmp_path / 'a.csv'} > fixed.csv" in error.fix


def test_a_header_may_span_lines(tmp_path: Path) -> None:
    table = load(tmp_path, '"Kommentar\n(frei)",label\n' + BODY, text="Kommentar\n(frei)")
    assert pairs(table) == ROWS


@pytest.mark.parametrize("header", ["", "1,2\n", "0.5,x\n", "I really liked this one,x\n", "我很喜欢这家店。,x\n"])
def test_a_row_in_the_headers_place_is_not_lost(header: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, header + BODY)
    assert "the first row seems to be data" in str(error)
    assert "add a line before it" in error.fix


@pytest.mark.parametrize("settings", [{"label": "bad"}, {"text": ROWS[0][0], "label": "bad"}])
def test_a_row_in_the_headers_place_is_not_lost_where_columns_are_named_by_it(
    settings: dict[str, str], tmp_path: Path
) -> None:
    error = refusal(tmp_path, BODY, **settings)
    assert "'bad' stands in a row below it, too" in error.why


def test_the_first_of_texts_without_a_header_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("I love it!\nwhat a shop\nnever again\n")
    with pytest.raises(DataError, match="seems to be data"):
        list(read_unlabelled(DataPart(source=str(tmp_path / "a.csv")), 10, tell=print))
    part = DataPart(source=str(tmp_path / "a.csv"), text="I love it!")
    assert sum(map(len, read_unlabelled(part, 10, tell=print))) == 2, "the user says that it is a header"


def test_numbers_that_pandas_wrote_as_header_are_names_where_the_recipe_says_so(tmp_path: Path) -> None:
    table = load(tmp_path, "0,1\n" + BODY.replace("good", "1").replace("bad", "0"), text="0", label="1")
    assert len(table) == len(ROWS)


def test_an_index_column_without_a_name_is_no_matter(tmp_path: Path) -> None:
    content = ",text,label\n" + "".join(f"{at},{line}" for at, line in enumerate(BODY.splitlines(keepends=True)))
    assert pairs(load(tmp_path, content)) == ROWS


def test_delimiters_at_the_end_of_each_row_are_no_cells(tmp_path: Path) -> None:
    assert pairs(load(tmp_path, "text,label\n" + BODY.replace("\n", ",\n"))) == ROWS
    assert pairs(load(tmp_path, "text,label,,\n" + BODY.replace("\n", ",,\n"))) == ROWS
    error = refusal(tmp_path, "text,label\n" + BODY + "hello, you,\n")
    assert "too long" in str(error), "of a single row it may be an empty label"


class TestSecondHeader:
    def test_stops_the_run_or_is_left_out_and_counted(self, tmp_path: Path) -> None:
        content = ("text,label\n" + BODY) * 3
        error = refusal(tmp_path, content)
        assert "the header stands again among the rows" in str(error)
        assert str(error).startswith(f"{tmp_path / 'a.csv'}:42: ")
        table = load(tmp_path, content, on_bad_row="skip", bad_rows_allowed=0.1)
        assert pairs(table) == ROWS * 3
        assert "dropped 2 of 122 rows (1.64%): 2 × the header stands again among the rows" in table.notices

    @pytest.mark.parametrize("header", ["Text,LABEL", "\ufefftext,label", ' text ,"label"', "#text,label"])
    def test_is_known_in_another_spelling(self, header: str, tmp_path: Path) -> None:
        content = f"text,label\n{BODY}{header}\n{BODY}"
        assert "stands again" in str(refusal(tmp_path, content))
        assert pairs(load(tmp_path, content, on_bad_row="skip", bad_rows_allowed=0.1)) == ROWS * 2

    def test_gives_the_rows_below_it_its_own_order(self, tmp_path: Path) -> None:
        swapped = "".join(f"{label},{text}\n" for text, label in ROWS)
        table = load(tmp_path, f"text,label\n{BODY}label,text\n{swapped}", on_bad_row="skip", bad_rows_allowed=0.1)
        assert pairs(table) == ROWS * 2

    @pytest.mark.parametrize(
        ("first", "second"), [("text,label,id", "text,label,shop"), ("text,label", "id,text,label")]
    )
    def test_with_other_columns_always_stops_the_run(self, first: str, second: str, tmp_path: Path) -> None:
        rows = BODY.replace("\n", ",1\n") if first.count(",") > 1 else BODY
        error = refusal(tmp_path, f"{first}\n{rows}{second}\n{rows}", on_bad_row="skip", bad_rows_allowed=0.5)
        assert "names other columns" in str(error)

    def test_words_that_are_one_columns_name_are_data(self, tmp_path: Path) -> None:
        content = f"text,label\n{BODY}text,good\nbad label,label\nworse label,label\n"
        assert len(load(tmp_path, content)) == len(ROWS) + 3

    def test_is_known_in_one_column(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("review\nnice\nreview\nbad\n")
        part = DataPart(source=str(tmp_path / "a.csv"))
        with pytest.raises(DataError, match=r"a.csv:3: the header stands again"):
            list(read_unlabelled(part, 10, tell=print))


class TestQuotes:
    """The rows 4 to 9 of these files are one where quotes are quotes."""

    def lines(self, mark: str, *, closed: bool = True) -> str:
        lines = [f"{text}{mark}{label}" for text, label in ROWS]
        lines[3] = f'"what a shop{mark}bad'
        lines[8] = f'such a kind shop"{mark}good' if closed else f'such a "kind" shop{mark}good'
        return f"text{mark}label\n" + "\n".join(lines) + "\n"

    @pytest.mark.parametrize("closed", [True, False])
    def test_of_a_tsv_are_characters_where_nothing_else_is_possible(self, closed: bool, tmp_path: Path) -> None:
        table = load(tmp_path, self.lines("\t", closed=closed), "a.tsv")
        assert len(table) == len(ROWS)
        assert pairs(table)[3] == ('"what a shop', "bad")
        assert any("quotes do not match, and are read as characters" in notice for notice in table.notices)

    def test_of_a_tsv_are_quotes_where_they_may_be(self, tmp_path: Path) -> None:
        quoted = "".join(f'"{text}"\t{label}\n' for text, label in ROWS)
        assert pairs(load(tmp_path, "text\tlabel\n" + quoted, "a.tsv")) == ROWS
        error = refusal(tmp_path, "text\tlabel\n" + quoted + '"so" they said\tgood\n', "a.tsv")
        assert "quotes do not match" in str(error)
        assert "--set data.quote=none" in error.fix
        doubled = '"he said ""no"" to us"\tbad\n"so" they said\tgood\n'
        assert "quotes do not match" in str(refusal(tmp_path, "text\tlabel\n" + doubled, "a.tsv"))

    def test_of_a_csv_that_swallow_rows_are_refused(self, tmp_path: Path) -> None:
        error = refusal(tmp_path, self.lines(","))
        assert str(error).startswith(f"{tmp_path / 'a.csv'}:5: a quote swallows rows")
        assert "lines 5 to 10" in error.why
        assert "--set data.quote=none" in error.fix
        assert len(load(tmp_path, self.lines(","), quote="none")) == len(ROWS)
        assert len(load(tmp_path, self.lines(","), quote='"')) == len(ROWS) - 5, "the user says that it is a text"

    def test_that_swallow_rows_with_targets_are_refused(self, tmp_path: Path) -> None:
        lines = [f"{text},{at / 7:.3f}" for at, (text, _) in enumerate(ROWS)]
        lines[3], lines[8] = '"what a shop,1.234', 'such a kind shop",2.345'
        assert "swallows rows" in str(refusal(tmp_path, "text,score\n" + "\n".join(lines)))

    @pytest.mark.parametrize(
        "content",
        [
            "label,text\n" + "".join(f'{label},"{text}\nsecond, line"\n' for text, label in ROWS),
            "text,label\n" + "".join(f'"{text}\n\nthird, line",{label}\n' for text, label in ROWS),
            "text,label\n" + "".join(f'"{text}, ""so"" to say\n- one\n- two",{label}\n' for text, label in ROWS),
            "id,label,text\n" + "".join(f'{n},{label},"{text}\n2, 3 and 4"\n' for n, (text, label) in enumerate(ROWS)),
        ],
    )
    def test_around_line_breaks_are_quotes(self, content: str, tmp_path: Path) -> None:
        table = load(tmp_path, content)
        assert len(table) == len(ROWS)
        assert not [notice for notice in table.notices if "guessed" not in notice]

    @pytest.mark.parametrize(
        "content",
        [
            "text, label\n" + "".join(f'"{text}, yes", "{label}"\n' for text, label in ROWS),
            "label, text\n" + "".join(f'{label}, "{text}, yes"\n' for text, label in ROWS),
            "label;text\n" + "".join(f'{label};   "{text}, yes"\n' for text, label in ROWS),
        ],
    )
    def test_may_stand_behind_blanks(self, content: str, tmp_path: Path) -> None:
        table = load(tmp_path, content)
        assert pairs(table) == [(f"{text}, yes", label) for text, label in ROWS]
        assert any("blanks between" in notice for notice in table.notices)

    def test_within_a_cell_do_not_stand_behind_blanks(self, tmp_path: Path) -> None:
        content = "label,text\n" + "".join(f'{label}," so, ""{text}"""\n' for text, label in ROWS)
        table = load(tmp_path, content + 'good, said "so"\nbad, "no" he said\n')
        assert pairs(table)[0] == (f' so, "{ROWS[0][0]}"', "bad")
        assert pairs(table)[-2:] == [(' said "so"', "good"), (' "no" he said', "bad")]

    @pytest.mark.parametrize(
        ("cell", "fix"),
        [
            ("“so, they said”", "sed 's/[“”„]/\"/g' < "),
            ("'so, they said'", '--set "data.quote=\'"'),
            (r'"so, \"they\" said"', r"""sed 's/\\"/""/g' < """),
        ],
    )
    def test_of_another_kind_are_named(self, cell: str, fix: str, tmp_path: Path) -> None:
        assert fix in refusal(tmp_path, f"text,label\n{BODY}{cell},good\n").fix

    def test_of_another_kind_can_be_set(self, tmp_path: Path) -> None:
        content = "text,label\n" + "".join(f"'{text}, yes','{label}'\n" for text, label in ROWS)
        assert pairs(load(tmp_path, content, quote="'")) == [(f"{text}, yes", label) for text, label in ROWS]

    def test_of_a_run_hold_for_files_that_they_fit(self, tmp_path: Path) -> None:
        (tmp_path / "a.tsv").write_text(self.lines("\t"))
        (tmp_path / "b.csv").write_text('text,label\n"a, b",good\nc,bad\n')
        assert fitting(DataPart(source=str(tmp_path / "a.tsv"), quote="none"))["quote"] == "none"
        assert fitting(DataPart(source=str(tmp_path / "b.csv"), quote="none"))["quote"] == "auto"
        assert fitting(DataPart(source=str(tmp_path / "b.csv"), quote='"'))["quote"] == '"'
        assert fitting(DataPart(source=str(tmp_path / "b.csv"), quote="'"))["quote"] == "auto"


class TestDelimiters:
    @pytest.mark.parametrize(
        ("content", "command"),
        [
            ("text;label\n" + BODY, "sed '1s/[;]/,/g'"),
            ("text,label\n" + BODY.replace(",", ";"), "sed '1s/[,]/;/g'"),
            ("text,label\n" + BODY.replace(",", "\t"), r"sed '1s/[,]/\t/g'"),
            ("text,score\n" + "".join(f"{text};{at},5\n" for at, (text, _) in enumerate(ROWS)), "sed '1s/[,]/;/g'"),
        ],
    )
    def test_of_the_header_are_those_of_the_rows(self, content: str, command: str, tmp_path: Path) -> None:
        error = refusal(tmp_path, content)
        assert "the header is separated by" in str(error)
        assert command in error.fix

    def test_within_labels_are_no_delimiters(self, tmp_path: Path) -> None:
        table = load(tmp_path, "text,label\n" + BODY.replace("\n", ";x\n"), label_separator=";")
        assert len(table) == len(ROWS)


def test_the_mark_of_a_file_that_was_joined_is_no_text(tmp_path: Path) -> None:
    table = load(tmp_path, f'text,label\n{BODY}\ufeff"so, they said",good\n\ufeffnever again,bad\n')
    assert pairs(table)[-2:] == [("so, they said", "good"), ("never again", "bad")]
    wide = f"text,label\n{BODY}".encode("utf-16") + "never again,bad\n".encode("utf-16")
    assert pairs(load(tmp_path, wide))[-1] == ("never again", "bad")
    lines = b'\xef\xbb\xbf{"text": "a", "label": "x"}\n\xef\xbb\xbf{"text": "b", "label": "y"}\n'
    assert pairs(load(tmp_path, lines, "a.jsonl")) == [("a", "x"), ("b", "y")]
