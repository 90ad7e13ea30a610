import json
import math
import os
import re
from html.parser import HTMLParser

import pytest

from paceline.contract.errors import RunFolderError
from paceline.contract.records import Cut, DataRecord, Notice, RunRecord, TextLengths
from paceline.observe.metrics_file import MetricsFile, record_to_json
from paceline.report.build import build_report

EVIL = (
    "</style></pre></title><script>alert(1)</script><img src=x onerror=alert(1)>\"'>{{ 777 * 777 }}\x1b[31m\u202e\x00"
)


class Page(HTMLParser):
    """Tags, attributes and visible text of a report."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_data(self, data):
        self.text += data


def write(folder, records, recipe="name: reviews\n", manifest=None):
    file = MetricsFile(folder / "metrics.jsonl")
    for record in records:
        file.observe(record)
        if isinstance(record, RunRecord):
            (folder / "summary.json").write_bytes(record_to_json(record))
    file.close()
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8", errors="backslashreplace")
    (folder / "manifest.json").write_text(json.dumps(manifest or {"versions": {"torch": "2.13.0"}, "seeds": [0, 1]}))


def built(folder):
    path = build_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def assert_inert(html):
    page = Page(html)
    assert not {"script", "img", "iframe", "link", "object", "embed", "form", "a", "base"} & set(page.tags)
    assert [a for a in page.attributes if a[1].startswith("on") or a[1] in ("src", "href", "action", "srcset")] == []
    assert not re.search(r"url\(|@import|https?:", html)
    policy = next(value for _, name, value in page.attributes if name == "content")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_a_whole_run_is_told(records, tmp_path):
    write(tmp_path, records.run())
    (tmp_path / "checkpoints" / "step-20").mkdir(parents=True)
    html = built(tmp_path)
    assert_inert(html)
    text = re.sub(r"\s+", " ", Page(html).text)
    for fact in (
        "reviews finished",
        "20 of 20 steps",
        "592 k of 67 M parameters trained",
        "0.9000test accuracy",
        "train 6.00 s 60.0%",
        "techniques.precision bf16",
        "this GPU computes in [bold]bf16[/bold]",
        "warning guessed",
        "step-20",
        "name: reviews",
        "versions.torch2.13.0",
        "seeds0, 1",
    ):
        assert fact in text, fact
    for title in ("Loss", "accuracy", "Learning rate", "Gradient norm", "Samples a second"):
        assert f'<span class="name">{title}</span>' in html
    row = re.search(r"<tr><th><bdi title=\"no\">.*?</tr>", html, re.S)[0]
    assert re.findall(r">([\d,.%]+)", row) == ["9", "1", "10", "90.0%"], "counts, samples and share of the label 'no'"


def test_every_second_is_in_one_bar_in_the_order_of_a_run(records, tmp_path):
    seconds = {"train": 4.0, "other": 0.5, "compile": 1.0, "start": 0.5, "capture": 2.0, "import": 2.0, "total": 10.0}
    path = {"layout": "padded: DeBERTa has an attention of its own", "capture": "on"}
    summary = records.summary(
        seconds=seconds, overlapped_seconds={"data": 3.0}, first_update_seconds=6.5, execution=path, folder=EVIL
    )
    write(tmp_path, [records.started(), summary])
    html = built(tmp_path)
    assert_inert(html)
    bar = re.search(r'<div class="bar".*?</div>', html, re.S)[0]
    named = re.findall(r'title="(\w+): ', bar)
    assert named == ["start", "import", "compile", "capture", "train", "other"]
    colours = re.findall(r'class="p(\d+)"', bar)
    assert len(set(colours)) == len(colours), "two phases share a colour"
    assert all(f".p{colour} {{" in html for colour in colours), "a phase has no colour"
    text = re.sub(r"\s+", " ", Page(html).text)
    assert "Beside these, on other threads: data 3.00 s." in text
    assert "6.50 sto the first update" in text
    assert "layoutpadded: DeBERTa has an attention of its own" in text


def test_nothing_from_a_user_is_obeyed(records, tmp_path):
    run = [
        records.started(name=EVIL, folder=EVIL, device=EVIL, label_names=(EVIL, "b"), group_names=(EVIL, "head")),
        *(records.step(number) for number in range(1, 4)),
        records.evaluation(3, split=EVIL, metrics={EVIL: 0.5}, train_metrics={EVIL: 0.5}),
        records.checkpoint(3),
        Notice(message=EVIL + "\n" + EVIL, level=EVIL),
        records.summary(name=EVIL, status=EVIL, final={EVIL: {EVIL: 0.5}}, seconds={EVIL: 1.0, "total": 1.0}),
    ]
    write(tmp_path, run, recipe=EVIL, manifest={EVIL: {EVIL: [EVIL]}})
    html = built(tmp_path)
    assert_inert(html)
    assert not re.search(r"[\x00\x1b\u202e]", html)
    assert "603729" not in html, "text was taken for a template"
    assert html.count("<style") == html.count("</style>") == 1
    assert "\\x1b[31m\\u202e\\x00" in html


@pytest.mark.parametrize("num_records", [0, 1, 2, 3, 12, 14])
def test_a_run_that_is_not_finished_has_a_report_of_what_there_is(records, tmp_path, num_records):
    write(tmp_path, list(records.run())[:num_records])
    html = built(tmp_path)
    assert_inert(html)
    assert "not finished" in html
    assert ("No step has been recorded yet" in html) == (num_records < 2)
    assert ("Newest metrics" in html) == (num_records >= 12)


def test_a_summary_alone_is_enough(records, tmp_path):
    (tmp_path / "summary.json").write_bytes(record_to_json(records.summary()))
    assert "0.9000" in built(tmp_path)


def test_values_that_are_not_finite_are_gaps(records, tmp_path):
    steps = [records.step(n, loss=math.nan, gradient_norm=math.inf, seconds=0.0) for n in range(1, 200)]
    final = {"test": {"loss": math.nan}}
    write(tmp_path, [records.started(), *steps, records.summary(steps=199, final=final, samples_per_second=math.nan)])
    html = built(tmp_path)
    assert '<span class="name">Loss</span>' not in html
    assert '<span class="name">Learning rate</span>' in html
    assert "NaN" in html


def test_a_long_run_of_many_classes_stays_small(records, tmp_path):
    classes = tuple(f"class number {index}" for index in range(100))
    confusion = tuple(tuple(50 if i == j else 3 for j in range(100)) for i in range(100))
    metrics = {f"metric {index}": 0.5 for index in range(15)}
    start = records.started(label_names=classes, total_steps=20_000, steps_per_epoch=100, group_names=tuple("abcdef"))

    def run():
        yield start
        for n in range(1, 20_001):
            yield records.step(
                n, loss=(n * 7919 % 1000) / 1000, gradient_norm=n * 31 % 77, learning_rates=(n * 1e-9,) * 6
            )
            if n % 100 == 0:
                yield records.evaluation(n, metrics=metrics, confusion=None)
                yield records.checkpoint(n)
        yield records.evaluation(20_000, split="test", metrics=metrics, confusion=confusion)

    write(tmp_path, run())
    html = built(tmp_path)
    assert len(html) < 500_000
    assert "and 9,860 more" in html, "the confusions that are not listed"


def test_the_confusions_of_the_test_split_come_first(records, tmp_path):
    test = records.evaluation(5, split="test", confusion=((7, 0), (0, 7)))
    write(tmp_path, [records.started(), test, records.evaluation(20)])
    assert "Split test, step 5" in built(tmp_path)


def test_the_headline_is_the_metric_that_the_recipe_watches(records, tmp_path):
    summary = records.summary(final={"test": {"loss": 0.1, "accuracy": 0.2, "f1": 0.3}})
    write(tmp_path, [records.started(), summary], recipe="loop: {best_metric: f1}\n")
    assert "test f1" in built(tmp_path)
    write(tmp_path, [], recipe="loop: {best_metric: auto}\n")
    assert "test accuracy" in built(tmp_path)


def test_rebuilding_replaces_the_report(records, tmp_path):
    write(tmp_path, list(records.run())[:3])
    assert "not finished" in built(tmp_path)
    write(tmp_path, records.run())
    assert "not finished" not in built(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest.json",
        "metrics.jsonl",
        "recipe.yaml",
        "report.html",
        "summary.json",
    ]


def test_another_folder_is_refused_and_left_alone(tmp_path):
    with pytest.raises(RunFolderError, match="not a run folder"):
        build_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_not_reported_elsewhere(tmp_path, monkeypatch):
    """report has no --out."""
    write(tmp_path, [Notice(message="hello")])
    monkeypatch.setattr("paceline.run_folder.checks.os.access", lambda place, mode: False)
    with pytest.raises(RunFolderError, match="cannot be written") as error:
        build_report(tmp_path)
    assert "--out" not in error.value.fix
    assert f"cp -r {tmp_path} COPY" in error.value.fix


@pytest.mark.parametrize("name", ["manifest.json", "summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_in_a_files_place_is_told(tmp_path, name, make):
    write(tmp_path, [Notice(message="hello")])
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(RunFolderError, match=f"{name}: is no regular file"):
        build_report(tmp_path)


def test_files_that_are_nested_too_deeply_are_told(tmp_path):
    write(tmp_path, [Notice(message="hello")])
    (tmp_path / "summary.json").write_text("[" * 100_000)
    with pytest.raises(RunFolderError, match=r"summary.json: damaged"):
        build_report(tmp_path)
    (tmp_path / "summary.json").unlink()
    (tmp_path / "metrics.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(RunFolderError, match=r"metrics.jsonl:1: not a record"):
        build_report(tmp_path)


def test_secrets_of_an_older_recipe_are_not_shown(tmp_path):
    secret = "S3cr3tvaluexS3cr3tvaluex"
    write(tmp_path, [], recipe=f"name: reviews\ndata:\n  source: https://user:{secret}@host/rows.csv\n")
    page = build_report(tmp_path).read_text()
    assert secret not in page
    assert "https://[redacted]@host/rows.csv" in page


def test_the_training_samples_are_told(records, tmp_path):
    cut = Cut(max_length=64, texts=0.975, tokens=0.81)
    lengths = TextLengths(
        max_length=64, median=9, p95=9, longest=9, histogram=(1,), histogram_end=9, cut=cut, others=()
    )
    data = DataRecord(labels={"<no>": 3, "yes": 1}, lengths=lengths)
    write(tmp_path, [records.started(data=data)])
    for run in (None, records.summary(data=data)):
        if run:
            write(tmp_path, [run])
        html = built(tmp_path)
        assert_inert(html)
        text = Page(html).text
        assert "<no> 3, yes 1" in text
        assert "97.5% of texts, 81.0% of all tokens" in text


def test_checkpoints_that_were_removed_since_are_counted_and_not_listed(records, tmp_path):
    write(tmp_path, [records.started(), *(records.checkpoint(n) for n in (1, 2, 3, 4)), records.summary()])
    for number in (3, 4):
        (tmp_path / "checkpoints" / f"step-{number}").mkdir(parents=True)
    html = built(tmp_path)
    assert re.findall(r"<code>(step-\d)</code>", html) == ["step-4", "step-3"]
    assert html.count('<td class="text">best') == 1, "the newest of the best ones"
    assert "2 others were written and removed again" in Page(html).text
