"""Bad rows stop the run, or are dropped with a count, a cap and a file that shows them."""

import json

import pytest

from paceline.contract.errors import DataError
from paceline.data.bad_rows import BadRows
from paceline.data.sources import read
from paceline.recipe.parts import DataPart


def error(line, problem="the text is empty"):
    return DataError(problem, file="a.csv", line=line, column="text")


def test_stop_raises_the_first():
    with pytest.raises(DataError, match=r"a.csv:3, column 'text': the text is empty"):
        BadRows("stop", 1.0).report(error(3), ",pos")


def test_nothing_dropped_is_no_notice_and_no_file(tmp_path):
    assert BadRows("skip", 0.0, tmp_path / "q.jsonl").settle(10) == ()
    assert not (tmp_path / "q.jsonl").exists()


def test_skip_counts_by_problem_and_keeps_excerpts(tmp_path):
    bad = BadRows("skip", 0.5, tmp_path / "q.jsonl")
    for line in (3, 5):
        bad.report(error(line), ",pos" + "x" * 1000)
    bad.report(error(7, "the row is too short"), "alone\n\x1b[31m")
    (notice,) = bad.settle(kept=7)
    assert notice.startswith("dropped 3 of 10 rows (30.00%): 2 × the text is empty, 1 × the row is too short")
    records = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert [(record["file"], record["line"]) for record in records] == [("a.csv", 3), ("a.csv", 5), ("a.csv", 7)]
    assert records[0]["problem"] == "column 'text': the text is empty"
    assert len(records[0]["row"]) == 200
    assert b"\x1b" not in (tmp_path / "q.jsonl").read_bytes(), "escapes reach the terminal of who prints the file"


def test_above_the_cap_the_run_stops_and_still_shows_the_rows(tmp_path):
    bad = BadRows("skip", 0.1, tmp_path / "q.jsonl")
    for line in (2, 4, 6, 8):
        bad.report(error(line), "row")
    with pytest.raises(DataError, match=r"4 of 20 rows \(20.0%\) cannot be used") as caught:
        bad.settle(kept=16)
    assert all(f"a.csv:{line}" in caught.value.why for line in (2, 4, 6))
    assert "a.csv:8" not in caught.value.why
    assert caught.value.fix.endswith("--set data.bad_rows_allowed=0.21")
    assert len((tmp_path / "q.jsonl").read_text().splitlines()) == 4


def test_read_drops_every_kind_of_bad_row(tmp_path):
    good = [f"good text {n},{'pos' if n % 2 else 'neg'},train" for n in range(20)]
    bad = [
        b",pos,train",  # 22: empty text
        b"no label,,train",
        b"too short,pos",
        b"too long,pos,train,more",
        b"latin \xe9,pos,train",
        b"nul \x00,pos,train",
        b"strange split,pos,holdout",
        b"unseen class,maybe,test",
    ]
    file = tmp_path / "rows.csv"
    file.write_bytes("\n".join(["text,label,split", *good, ""]).encode() + b"\n".join(bad) + b"\nlast,pos,test\n")
    part = DataPart(source=str(file), on_bad_row="skip", bad_rows_allowed=0.4)
    table = read(part, quarantine=tmp_path / "q.jsonl")
    assert len(table) == len(table.texts) == len(table.labels) == len(table.splits) == 21
    assert table.texts[-1] == "last"
    assert table.origins.of(20) == f"{file}:30", "line numbers went astray behind dropped rows"
    records = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert sorted(record["line"] for record in records) == list(range(22, 30))
    assert "dropped 8 of 29 rows" in table.notices[-1]


def test_read_stops_above_the_cap(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text,label\na,x\nb,y\n,x\n")
    with pytest.raises(DataError, match=r"1 of 3 rows \(33.3%\)"):
        read(DataPart(source=str(file), on_bad_row="skip", bad_rows_allowed=0.1))


def test_all_rows_bad_is_over_the_cap_too(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("{\n}\n")
    with pytest.raises(DataError, match=r"2 of 2 rows \(100.0%\)"):
        read(DataPart(source=str(file), on_bad_row="skip", bad_rows_allowed=0.5))


def test_labels_that_do_not_fit_the_column_are_dropped(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"text": f"t{n}", "label": n % 2} for n in range(9)] + [{"text": "odd", "label": "one"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = read(DataPart(source=str(file), on_bad_row="skip", bad_rows_allowed=0.1))
    assert len(table) == 9
    assert set(table.labels) == {"0", "1"}
    assert "1 × mixed label types" in table.notices[-1]


@pytest.mark.parametrize("content", ['text,label\nfine,x\n"open,y\nlost,x\n', 'text,label\n"a" b,x\nc,y\n'])
def test_what_hides_other_rows_is_never_skipped(tmp_path, content):
    file = tmp_path / "rows.csv"
    file.write_text(content)
    with pytest.raises(DataError, match="quote"):
        read(DataPart(source=str(file), on_bad_row="skip", bad_rows_allowed=1.0))
