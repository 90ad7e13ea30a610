import json
import math
from pathlib import Path

import pytest

from paceline.contract.errors import DiskFullError, RunFolderError
from paceline.contract.records import Notice, RunRecord
from paceline.observe.metrics_file import MetricsFile, read_metrics, record_from_plain, record_to_json


def write(path, records):
    file = MetricsFile(path)
    for record in records:
        file.observe(record)
    file.close()


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def test_records_come_back_as_they_were(records, tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    run = list(records.run(recipe={}))
    write(path, run)
    assert read_metrics(path) == run[:-1], "everything but the summary, which has a file of its own"


def test_each_line_is_valid_json_with_a_kind(records, tmp_path):
    path = tmp_path / "metrics.jsonl"
    bad = records.step(1, loss=math.nan, gradient_norm=math.inf, learning_rates=(-math.inf,))
    write(path, [records.started(), bad, records.evaluation(metrics={"auroc": math.nan})])
    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["start", "step", "evaluation"]
    assert (lines[1]["loss"], lines[1]["gradient_norm"], lines[1]["learning_rates"]) == (
        "NaN",
        "Infinity",
        ["-Infinity"],
    )
    _, step, evaluation = read_metrics(path)
    assert math.isnan(step.loss)
    assert step.gradient_norm == math.inf
    assert math.isnan(evaluation.metrics["auroc"])


def test_a_summary_is_valid_json(records):
    text = record_to_json(records.summary(final={"test": {"loss": math.nan}}))
    assert json.loads(text, parse_constant=refuse)["final"] == {"test": {"loss": "NaN"}}


def test_a_summary_has_the_keys_of_earlier_releases_too(records):
    written = json.loads(record_to_json(records.summary(execution={"layout": "packed"}, memory=records.memory())))
    assert written["path"] == written["execution"] == {"layout": "packed"}
    plan = written["memory"]["plan"]
    assert plan["card"] == plan["gpu"] == "NVIDIA H200"
    assert plan["path"] == plan["execution"] == {"layout": "packed"}


@pytest.mark.parametrize("keys", [("path", "card"), ("execution", "gpu")])
def test_a_summary_is_read_by_todays_keys_and_by_those_of_earlier_releases(records, keys):
    summary = records.summary(execution={"layout": "packed"}, memory=records.memory())
    written = json.loads(record_to_json(summary))
    execution, gpu = keys
    for told in (written, written["memory"]["plan"]):
        for key in {"path", "card", "execution", "gpu"} - {execution, gpu}:
            told.pop(key, None)
    assert record_from_plain(RunRecord, written) == summary


def test_a_record_is_on_disk_before_the_next(records, tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.observe(records.step(1))
    assert read_metrics(path) == [records.step(1)]
    file.close()


def test_text_that_is_not_unicode_is_kept_visible(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [Notice(message="file \udcff\x1b.csv\n评论")])
    assert read_metrics(path) == [Notice(message="file \\udcff\x1b.csv\n评论")]
    assert len(path.read_bytes().splitlines()) == 1


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_cut_last_line_is_left_out_and_overwritten(records, tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write(path, [records.step(1), records.step(2)])
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_metrics(path) == [records.step(1)]
    write(path, [records.step(3)])
    assert read_metrics(path) == [records.step(1), records.step(3)]


def test_a_cut_line_longer_than_a_read_is_overwritten(records, tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [records.step(1)])
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    write(path, [records.step(2)])
    assert read_metrics(path) == [records.step(1), records.step(2)]


def test_a_file_that_is_one_cut_line_starts_afresh(records, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "st')
    write(path, [records.step(1)])
    assert read_metrics(path) == [records.step(1)]


@pytest.mark.parametrize("line", [b"{nonsense", b'{"kind": "other"}', b'{"kind": "step"}', b"[1]", b"\xff\xfe"])
def test_a_damaged_line_is_named(records, tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(record_to_json(records.step(1)) + b"\n" + line + b"\n")
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl:2: "):
        read_metrics(path)


def test_a_missing_file_is_said_so(tmp_path):
    with pytest.raises(RunFolderError, match="missing"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_fields_of_other_versions_are_ignored(records, tmp_path):
    path = tmp_path / "metrics.jsonl"
    fields = json.loads(record_to_json(records.step(1))) | {"phase_of_the_moon": 3}
    path.write_text(json.dumps(fields) + "\n")
    assert read_metrics(path) == [records.step(1)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_said_so_once(records):
    file = MetricsFile(Path("/dev/full"))
    with pytest.raises(DiskFullError, match="bytes needed"):
        file.observe(records.step(1))
    file.close()
