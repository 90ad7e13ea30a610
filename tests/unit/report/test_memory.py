"""The report's section about memory: what was predicted beside what was measured."""

import re

import pytest

from paceline.report.build import build_report
from paceline.report.memory import memory
from tests.unit.report.test_report import EVIL, Page, assert_inert, write

MIB = 2**20


def reported(folder, records, found):
    write(folder, [records.started(), records.summary(memory=found)])
    html = build_report(folder).read_text(encoding="utf-8")
    assert_inert(html)
    section = re.search(r"<h2>Memory</h2>.*?</section>", html, re.S)
    return html, section and section[0], re.sub(r"\s+", " ", Page(section[0]).text) if section else ""


def test_both_are_shown_with_their_differences(records, tmp_path):
    html, section, text = reported(tmp_path, records, records.memory())
    for fact in (
        "Peak: backward. Largest micro-batch: 32 samples, 16,384 positions.",
        "predicted 7.26 GiB parameters 512 MiB gradients 512 MiB optimizer states 1 GiB activations 3.91 GiB",
        "rounding 2 MiB reserved, unused 150 MiB context 1.21 GiB",
        "measured 7.62 GiB allocated 5.86 GiB reserved, unused 500 MiB context and other programs 1.27 GiB",
        "allocated5.91 GiB5.86 GiB+0.8%",
        "on the GPU7.26 GiB7.62 GiB-4.7%",
        "7.26 GiB of the 140 GiB of NVIDIA H200, 5%",
        "highest in each phase: forward 5.76 GiB, backward 5.91 GiB; attention by flash.",
    ):
        assert fact in text, f"{fact}\n{text}"
    assert section.count("<figure") == 2
    assert "Activations at the peak, by kind of layer" in section
    colours = set(re.findall(r'class="p(\d+)"', section))
    assert all(f".p{colour} {{" in html for colour in colours), "a piece has no colour"


def test_each_bar_is_as_long_as_what_is_taken_from_the_gpu(records):
    found = records.memory()
    predicted, measured = memory(found).bars
    assert sum(piece.value for piece in predicted.pieces) == found.plan.total
    assert sum(piece.value for piece in measured.pieces) == found.total


def test_without_a_plan_the_measurement_stands_alone(records, tmp_path):
    _, section, text = reported(tmp_path, records, records.memory(plan=None, problem="no step was made"))
    assert "Not predicted: no step was made." in text
    assert "measured 7.62 GiB" in text
    assert section.count("<figure") == 1
    _, section, text = reported(tmp_path, records, records.memory(plan=None))
    assert "redicted" not in text, "nobody asked for a plan"


def test_a_run_on_a_cpu_has_no_such_section(records, tmp_path):
    assert reported(tmp_path, records, None)[1] is None


def test_nothing_in_a_plan_is_obeyed(records, tmp_path):
    plan = records.plan(
        gpu=EVIL, moment=EVIL, assumed=(EVIL,), parts={EVIL: 5}, activations={EVIL: 5}, phases={EVIL: 5}, execution={}
    )
    html, section, _ = reported(tmp_path, records, records.memory(plan=plan))
    assert not re.search(r"[\x00\x1b\u202e]", html)
    assert section.count("&lt;script") >= 6
    assert_inert(reported(tmp_path, records, records.memory(plan=None, problem=EVIL))[0])


@pytest.mark.parametrize(
    "measured", [{"allocated": 0, "reserved": 0, "total": 0}, {"reserved": 7000 * MIB, "total": 1}]
)
def test_figures_that_cannot_be_are_no_reason_to_fail(records, tmp_path, measured):
    plan = records.plan(parts={}, activations={}, phases={}, capacity=None, slots=32, samples=1)
    _, _, text = reported(tmp_path, records, records.memory(plan=plan, **measured))
    assert "nan" not in text.lower()
