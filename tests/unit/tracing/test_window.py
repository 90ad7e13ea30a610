"""Windows that cannot be read say what is wrong with them and what to do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.contract.errors import UserError
from paceline.tracing import budget, read_window, windows_in
from paceline.tracing.chrome import read_trace
from tests.unit.tracing.simulated import Workload, facts_of, simulated, write, write_rank

SMALL = Workload(num_steps=2, layers=1, buckets=1, world_size=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "run" / "trace" / "steps-91-92", SMALL)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as found:
        read_window(folder)
    assert found.value.fix, "it says what to do"
    assert found.value.exit_code == 2
    return str(found.value)


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))


def test_all_ranks_are_read(folder: Path) -> None:
    window = read_window(folder)
    assert [rank.facts.rank for rank in window.ranks] == [0, 1]
    assert [step.step for step in window.facts.steps] == [91, 92]
    assert [span.step for span in window.ranks[1].trace.spans if span.name == "step"] == [91, 92]


def test_windows_are_listed_by_their_steps(tmp_path: Path) -> None:
    for steps in ("100-109", "20-29", "3-3"):
        (tmp_path / "trace" / f"steps-{steps}").mkdir(parents=True)
    assert [path.name for path in windows_in(tmp_path)] == ["steps-3-3", "steps-20-29", "steps-100-109"]
    assert windows_in(tmp_path / "none") == []


def test_a_folder_without_a_window(tmp_path: Path, folder: Path) -> None:
    assert "there is no rank0.window.json" in refusal(tmp_path)
    assert "there is no such folder" in refusal(tmp_path / "nowhere")


def test_a_rank_is_missing(folder: Path) -> None:
    (folder / "rank1.window.json").unlink()
    assert "rank 1 is missing" in refusal(folder)


def test_a_trace_is_missing(folder: Path) -> None:
    (folder / "rank1.trace.json.gz").unlink()
    assert "rank1.trace.json.gz: missing" in refusal(folder)


def test_files_of_two_windows(folder: Path) -> None:
    change(folder / "rank1.window.json", first_step=81)
    assert "of rank 1, steps 81 to 92" in refusal(folder)


@pytest.mark.parametrize("number", [2, None, "1"])
def test_another_version(folder: Path, number: Any) -> None:
    change(folder / "rank0.window.json", format=number)
    assert f"format {number!r}, written by paceline 0.1.0; known: 1" in refusal(folder)


def test_what_a_later_version_adds_is_passed_over(folder: Path) -> None:
    change(folder / "rank0.window.json", weather="fine")
    assert read_window(folder).facts.world_size == 2


def test_facts_that_are_none(folder: Path) -> None:
    path = folder / "rank0.window.json"
    change(path, world_size="many")
    assert "world_size" in refusal(folder)
    path.write_text("[]")
    assert "rank0.window.json: damaged" in refusal(folder)
    path.write_text('{"format": 1, ')
    assert "damaged or cut off" in refusal(folder)


def test_nsys_keeps_its_own(folder: Path) -> None:
    change(folder / "rank0.window.json", kind="nsys")
    assert "--kind kineto" in refusal(folder)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.999])
def test_a_trace_cut_off_while_it_was_written_or_copied(folder: Path, part: float) -> None:
    path = folder / "rank0.trace.json.gz"
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    assert "cut off" in refusal(folder)


def test_text_cut_off_before_it_was_packed(folder: Path) -> None:
    path = folder / "rank0.trace.json.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    for length in (1, 60, len(text) // 2, len(text) - 1):
        rewrite(path, text[:length])
        assert "damaged or cut off" in refusal(folder), length


@pytest.mark.parametrize("text", ["", "[]", "{}x", "no JSON }", '{"traceEvents": 5}', '{"traceEvents": [}'])
def test_text_that_is_no_trace(folder: Path, text: str) -> None:
    rewrite(folder / "rank0.trace.json.gz", text)
    assert "rank0.trace.json.gz" in refusal(folder)


def test_not_gzip(folder: Path) -> None:
    (folder / "rank0.trace.json.gz").write_text("{}")
    assert "not gzip" in refusal(folder)


@pytest.mark.parametrize(
    "odd",
    [
        {"ph": "X", "cat": "kernel", "name": "k"},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": "now", "dur": 1, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": None},
        {"ph": "X", "cat": "user_annotation", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": ["k"], "ts": 1, "dur": 1, "args": {}},
    ],
)
def test_events_that_are_none(folder: Path, odd: dict[str, Any]) -> None:
    write_rank(folder, 0, [odd], facts_of(SMALL, 0))
    assert "not what torch.profiler writes" in refusal(folder)


def test_no_span_no_step_no_kernel(folder: Path) -> None:
    events = simulated(SMALL)[0].events
    spans = [event for event in events if event["cat"] == "user_annotation"]
    write_rank(folder, 0, [event for event in events if event not in spans], facts_of(SMALL, 0))
    assert "no span of paceline's" in refusal(folder)
    write_rank(folder, 0, [event for event in events if event["name"] != "paceline: step 92"], facts_of(SMALL, 0))
    assert "has no step 92" in refusal(folder)
    write_rank(folder, 0, spans, facts_of(SMALL, 0))
    assert "has no kernels" in refusal(folder)


def test_what_is_not_ours_is_passed_over(folder: Path) -> None:
    expected = budget(read_window(folder))
    for rank in simulated(SMALL):
        first = rank.events[0]["ts"]
        others = [
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
            {"ph": "s", "cat": "ac2g", "id": 3, "ts": first},
            {"ph": "X", "cat": "python_function", "name": "run", "ts": first, "dur": 9},
            {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step", "ts": first, "dur": 9, "tid": 100},
            {"ph": "X", "cat": "gpu_user_annotation", "name": "paceline: step 91", "ts": first, "dur": 9, "tid": 7},
            # another thread's spans, such as those of a user's own loader
            {"ph": "X", "cat": "user_annotation", "name": "paceline: data wait", "ts": first, "dur": 1e6, "tid": 9},
            7,
        ]
        write_rank(folder, rank.rank, [*others, *rank.events], facts_of(SMALL, rank.rank))
    assert budget(read_window(folder)) == expected


def test_the_text_may_be_laid_out_in_any_way(folder: Path) -> None:
    expected = budget(read_window(folder))
    for rank in (0, 1):
        path = folder / f"rank{rank}.trace.json.gz"
        whole = json.loads(gzip.decompress(path.read_bytes()))
        # a nested list before the events, names with quotes and brackets in them, everything on lines of its own
        whole = {
            "deviceProperties": [{"name": 'an "H200" ]}'}],
            "note": '"traceEvents": [',
            **whole,
            "after": {"a": []},
        }
        rewrite(path, "\n" + json.dumps(whole, indent=3) + "\n")
    assert budget(read_window(folder)) == expected


def test_a_name_with_control_characters_and_broken_utf8(folder: Path) -> None:
    path = folder / "rank0.trace.json.gz"
    content = gzip.decompress(path.read_bytes()).replace(b"_adam_kernel", b"_adam\t_\xff\x1bkernel")
    path.write_bytes(gzip.compress(content))
    assert any("\x1b" in top.name for top in budget(read_window(folder)).top)


def test_times_of_years_ago_keep_their_nanoseconds(folder: Path) -> None:
    trace = read_trace(folder / "rank0.trace.json.gz", operators=False)
    lengths = trace.work.end - trace.work.begin
    assert lengths.min() == pytest.approx(20e-6, abs=2e-9)
