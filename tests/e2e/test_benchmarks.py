"""The benchmark runner: its tables and suites by themselves, and the smallest suite as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

from benchmarks.ladder_parts import joined
from benchmarks.suites import Group, read_book, turns
from benchmarks.tables import render
from benchmarks.widened import twice, widened
from paceline.bench.process import run
from paceline.bench.start import environment, script_command

ROOT = Path(__file__).resolve().parents[2]
CONTENDERS = ROOT / "benchmarks" / "contenders"


def record(contender: str, rate: float | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "work": "text/batch8",
        "contender": contender,
        "cold": False,
        "round": 0,
        "status": "ok",
        "samples_per_second": rate,
        "machine": {"card": None, "driver": None, "cpu": "some", "cpus": 2, "memory_bytes": 2**34, "python": "3.11.7"},
        "versions": {"torch": "2.11.0"},
        "commit": None,
        **fields,
    }


def cells_of(page: str, contender: str) -> dict[str, str]:
    """A row of the page's table by its column titles."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    titles = [cell.strip() for cell in lines[0].split("|")[1:-1]]
    row = next(line for line in lines if line.startswith(f"| {contender} "))
    return dict(zip(titles, (cell.strip() for cell in row.split("|")[1:-1]), strict=True))


def test_the_table_compares_medians_with_the_best_peer() -> None:
    rates = {"paceline": (300, 200, 100), "slow": (50, 50, 50), "fast": (90, 110, 100)}
    page = render("s", [record(name, rate, round=i) for name, all_ in rates.items() for i, rate in enumerate(all_)])
    assert cells_of(page, "paceline")["samples/s"] == "200 (100..300)", "median and spread"
    assert cells_of(page, "paceline")["x best peer"] == "2.00", "the ratio is to the best peer's median"
    assert cells_of(page, "slow")["x best peer"] == "0.50", "peers are compared too"


def test_cold_runs_have_columns_of_their_own() -> None:
    runs = [
        record("paceline", 10.0, cold=True, first_update_seconds=9.0),
        record("paceline", 20.0, first_update_seconds=4.0),
    ]
    row = cells_of(render("s", runs), "paceline")
    assert row["samples/s"] == "20", "a cold run's rate got into the warm ones"
    assert (row["first update, cold, s"], row["first update, warm, s"]) == ("9.0", "4.0"), "start-up was mixed"
    assert row["n warm (cold)"] == "1 (1)", "wrong number of runs"


def test_what_did_not_work_is_told_under_the_table() -> None:
    page = render(
        "s",
        [
            record("broken", status="failed", error="long\nOutOfMemoryError: no room"),
            record("paceline", 1.0, same_batches=False, num_parameters=10),
            record("peer", 1.0, num_parameters=11),
        ],
    )
    assert "broken, warm 0: failed: OutOfMemoryError: no room" in page, "a failure is not told"
    assert "batches were not those of the workload" in page, "other batches are not told"
    assert "models of different size: 10, 11 parameters" in page, "models of different size are not told"


def test_several_processes_are_compared_with_one_of_the_same_contender() -> None:
    def cell(contender: str, processes: int, tokens: float, **fields: Any) -> dict[str, Any]:
        work = "text/batch8" + (f"x{processes}" if processes > 1 else "")
        sharing = {"work": work, "work_of_one": "text/batch8", "processes": processes}
        return record(contender, tokens / 10, **sharing, tokens_per_second=tokens, **fields)

    runs = [cell("paceline", 1, 100), cell("paceline", 4, 380), cell("peer", 4, 90), cell("paceline", 4, 400)]
    one, four = (f"## {part}" for part in render("s", runs).split("## ")[1:])
    assert "x of linear" not in one, "one process was compared with itself"
    assert cells_of(four, "paceline")["x of linear"] == "0.975", "not the medians' ratio over the number of processes"
    assert cells_of(four, "peer")["x of linear"] == "", "a contender was compared with another's single process"


def test_too_few_gpus_are_told_once_and_make_no_row() -> None:
    why = {"status": "skipped", "error": "it takes 4 GPUs, and this machine has 2"}
    skipped = [record("paceline", work="text/batch8x4", round=number, **why) for number in range(2)]
    page = render("s", [record("paceline", 1.0), *skipped])
    assert page.count("text/batch8x4/paceline: skipped: it takes 4 GPUs, and this machine has 2") == 1, "not told once"
    assert "## text/batch8x4" not in page, "a table of nothing"


@pytest.mark.parametrize("suite", read_book().suites)
def test_every_suite_names_what_exists(suite: str) -> None:
    book = read_book()
    found = list(turns(book, suite, rounds=2))
    assert found, "nothing is run"
    for turn in found:
        cell = turn.cell
        if cell.workload:
            recipe = ROOT / "benchmarks" / "recipes" / book.workloads[cell.workload].recipe
            assert recipe.exists(), f"{cell.name}: no recipe {recipe.name}"
        if cell.script:
            assert (ROOT / "benchmarks" / "contenders" / cell.script).exists(), f"{cell.name}: no {cell.script}"
    names = [(turn.cell.name, turn.cold, turn.round) for turn in found]
    assert len(set(names)) == len(names), "two cells of one name: the second would be taken for done"


def test_rounds_take_turns_and_begin_with_another_contender() -> None:
    warm = [t for t in turns(read_book(), "imdb_distilbert", rounds=3, only="batch64") if not t.cold]
    rounds = [[t.cell.contender for t in warm if t.round == number] for number in range(3)]
    assert len(warm) == 9, "a contender is missing in a round"
    assert len({first for first, *_ in rounds}) == 3, "the same contender goes first each time"
    assert len({frozenset(names) for names in rounds}) == 1, "not everybody is in each round"


def test_a_batch_is_that_of_all_processes_or_of_each() -> None:
    weak = [turn.cell for turn in turns(read_book(), "ddp_weak", rounds=0) if turn.cell.workload]
    assert [cell.work.rpartition("/")[2] for cell in weak] == ["batch64", "batch64x2", "batch64x4", "batch64x8"]
    assert [cell.settings["batch_size"] for cell in weak] == [64, 128, 256, 512], "not a batch a GPU"
    fixed = [turn.cell for turn in turns(read_book(), "ddp_fixed", rounds=0) if turn.cell.workload]
    assert [cell.work.rpartition("/")[2] for cell in fixed] == ["batch128", "batch128on4"]
    assert [cell.settings["batch_size"] for cell in fixed] == [128, 128], "not the global batch"
    assert {cell.work_of_one for cell in (*weak, *fixed)} == {"imdb_distilbert/batch64", "imdb_distilbert/batch128"}


SETS_OFF = """
import torch, workload
found = []
for multiple in (8, 64):
    workload.allow_planned_attention(multiple)
    found.append(torch.backends.cuda.cudnn_sdp_enabled())
print(found)
"""


def test_attention_that_is_planned_for_each_width_is_for_peers_with_few_widths() -> None:
    environment = {**os.environ, "PYTHONPATH": str(CONTENDERS)}
    done = subprocess.run([sys.executable, "-c", SETS_OFF], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True]"
    for script in sorted(CONTENDERS.glob("*.py")):
        text = script.read_text()
        if "padding(" in text and script.stem != "workload":
            assert "    allow_planned_attention(" in text, script.name


def part(folder: Path, *cells: tuple[str, float], steps: int = 20) -> Path:
    folder.mkdir()
    extent = {"steps": steps, "train_rows": 80, "heldout_rows": 40, "warm_up": 2}
    recipe = {"name": "reviews", "loop": {"batch_size": 4}}
    source = {"train_rows": 80, "heldout_rows": 40, "labels": {"bad": 0, "good": 1}, "max_length": 16}
    plan = {
        "paceline": "0",
        "asked": {"recipe": recipe, "steps": steps},
        "source": {**source, "modality": "text", "split": "test"},
        "extent": extent,
        "repeats": 1,
        "fitted": False,
        "machine": {"cpu_count": 2},
    }
    (folder / "bench.json").write_text(json.dumps(plan))
    record = {
        "repeat": 0,
        "seed": 0,
        "contender": "plain_loop",
        "status": "ok",
        "cold": True,
        "quality": 0.5,
        "losses": [0.7] * steps,
        "whole_seconds": 9.0,
        "stages": {},
        "command": ["/usr/bin/python3", "-P", f"{folder}/contenders/plain_loop.py", "cells/plain-0/job.json"],
    }
    records = [{**record, "rung": name, "samples_per_second": rate} for name, rate in cells]
    (folder / "cells.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_parts_of_a_ladder_become_one_in_its_order_beside_its_first_rung(tmp_path: Path) -> None:
    halves = [part(tmp_path / "b", ("trainer", 30.0)), part(tmp_path / "a", ("plain", 10.0))]
    found = joined(halves, tmp_path / "out")
    assert [(row.rung.name, row.verdict, row.is_best) for row in found.rows] == [
        ("plain", "first", False),
        ("trainer", "same", True),
    ]
    kept = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    assert [record["part"] for record in kept] == [0, 1]
    assert kept[0]["command"] == ["python3", "-P", "contenders/plain_loop.py", "cells/plain-0/job.json"]


def test_parts_of_other_work_or_with_the_same_cell_are_refused(tmp_path: Path) -> None:
    first = part(tmp_path / "a", ("plain", 10.0))
    with pytest.raises(SystemExit, match=r"b: not of the same extent as .*a"):
        joined([first, part(tmp_path / "b", ("trainer", 30.0), steps=30)], tmp_path / "out")
    with pytest.raises(SystemExit, match="c: plain-0 is a cell of another part, too"):
        joined([first, part(tmp_path / "c", ("plain", 30.0))], tmp_path / "out")
    with pytest.raises(SystemExit, match="d: no folder of paceline bench"):
        joined([first, tmp_path / "d"], tmp_path / "out")


def test_a_part_is_not_written_over(tmp_path: Path) -> None:
    parts = [part(tmp_path / "a", ("plain", 10.0)), part(tmp_path / "b", ("trainer", 30.0))]
    before = (parts[0] / "cells.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="a: a part, whose cells would be written over"):
        joined(parts, tmp_path / "a")
    assert (parts[0] / "cells.jsonl").read_bytes() == before


def test_a_widened_model_computes_the_same_and_its_copies_learn_different_things() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = BertConfig(vocab_size=40, max_position_embeddings=12, initializer_range=0.3, **sizes)
    small = BertModel(config, add_pooling_layer=False).eval()
    wide = widened(small).eval()
    ids = torch.randint(1, 40, (3, 12))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [1]])).long()
    given = {"input_ids": ids, "attention_mask": mask}
    found = wide(**given).last_hidden_state
    torch.testing.assert_close(found, twice(small(**given).last_hidden_state), atol=1e-5, rtol=1e-5)
    found[..., ::3].square().sum().backward()
    gradient = wide.transformer.layer[0].ffn.lin1.weight.grad
    assert gradient is not None
    assert not torch.allclose(gradient[::2], gradient[1::2], rtol=1e-2)


def test_a_batch_that_cannot_be_shared_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="6 samples are no whole share for each of 4 processes"):
        Group(contenders=("paceline",), batch_sizes=(6,), processes=(1, 4))


def test_a_contender_on_one_process_sees_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, seen in ((None, "0"), ("", ""), ("2,3", "2")):
        if given is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert environment()["CUDA_VISIBLE_DEVICES"] == seen, "the Trainer would spread one process over all GPUs"
        assert environment(processes=2).get("CUDA_VISIBLE_DEVICES") == given, "ranks do not see their GPUs"


def is_running(pid: int) -> bool:
    """Whether a process is there, and more than the entry that its parent has yet to read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
@pytest.mark.timeout(60)
def test_a_timeout_ends_ranks_in_sessions_of_their_own(tmp_path: Path) -> None:
    rank = "import time; time.sleep(600)"
    launcher = (
        "import json, subprocess, sys\n"
        f"command = [sys.executable, '-c', {rank!r}]\n"
        "rank = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "print(json.dumps({'event': 'rank', 'pid': rank.pid}), flush=True)\n"
        "rank.wait()"
    )
    command = [sys.executable, "-c", launcher]
    outcome = run(command, environment=environment(), log=tmp_path / "log", limit_seconds=5)
    told = outcome.first("event", "rank")
    assert outcome.status == "timeout", outcome
    assert told is not None, "the launcher was cut off before it told of its rank"
    ends = time.monotonic() + 10
    while is_running(told.fields["pid"]) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not is_running(told.fields["pid"]), "a rank lived on, and would disturb the next cell"


WATCHES = """
import sys
from pathlib import Path

from paceline.bench.process import run
from paceline.bench.start import environment

sleeps = f"import os, time; open({sys.argv[1]!r}, 'w').write(str(os.getpid())); time.sleep(600)"
log = Path(sys.argv[1]).with_name("log")
run([sys.executable, "-c", sleeps], environment=environment(), log=log, limit_seconds=600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux binds a process to its parent")
@pytest.mark.timeout(60)
def test_what_is_measured_does_not_outlive_who_measures_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    watching = subprocess.Popen([sys.executable, "-c", WATCHES, str(told)])
    ends = time.monotonic() + 30
    while not (told.exists() and told.read_text()) and time.monotonic() < ends:
        time.sleep(0.02)
    measured = int(told.read_text())
    watching.kill()
    watching.wait()
    ends = time.monotonic() + 10
    while is_running(measured) and time.monotonic() < ends:
        time.sleep(0.02)
    alive = is_running(measured)
    if alive:
        os.kill(measured, signal.SIGKILL)
    assert not alive, "it would disturb what is measured next"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_under_torchrun_the_last_line_is_a_ranks_error(tmp_path: Path) -> None:
    settings = json.dumps({"batch_size": 8, "warm_up": 1, "measured": 1, "workers": 0, "precision": "fp32", "pad": 8})
    command = script_command(CONTENDERS / "ddp_loop.py", str(tmp_path / "nowhere"), settings, processes=2)
    outcome = run(
        command, environment=environment(sources=(CONTENDERS,), processes=2), log=tmp_path / "log", limit_seconds=150
    )
    assert outcome.status == "failed", outcome
    last = outcome.error.splitlines()[-1]
    assert "FileNotFoundError" in last, f"the note under the table would be: {last}"


def speed(folder: Path, *options: str) -> str:
    """The runner in a process of its own; what it printed."""
    command = [sys.executable, "benchmarks/speed.py", "tiny", "--out", str(folder), *options]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=variables, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def records_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tiny.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tiny_suite_runs_goes_on_and_writes_its_table(tmp_path: Path) -> None:
    speed(tmp_path, "--rounds", "0")
    cold = records_in(tmp_path)
    bad = {f"{r['work']}/{r['contender']}": r.get("error", "")[-500:] for r in cold if r["status"] == "failed"}
    assert not bad, "contenders failed"
    ours = [r for r in cold if r["contender"] == "paceline"]
    assert len(ours) == 3, "paceline did not run on text, on text by two processes, and on images"
    assert all(r["same_batches"] for r in ours), "paceline trained on other batches than the workload's"
    for work in {r["work"] for r in cold}:
        sizes = {r["num_parameters"] for r in cold if r["work"] == work and r["status"] == "ok"}
        assert len(sizes) == 1, f"{work}: contenders have models of different size: {sizes}"
    alike = ("paceline", "hf_same_order")  # where the latter is installed
    texts = [r for r in cold if "text" in r["work"] and r["contender"] in alike and r["status"] == "ok"]
    assert len(texts) >= 2, "nothing to compare"
    same = {r["tokens"] for r in texts}
    assert len(same) == 1, f"not the same tokens in the window, by one process or two: {same}"
    two = [r for r in cold if r["processes"] == 2 and r["status"] == "ok"]
    assert "ddp_loop" in {r["contender"] for r in two}, "no peer ran on two processes"
    counted = {r["contender"]: (r["steps"], r["samples"]) for r in two}
    assert set(counted.values()) == {(3, 24)}, f"not 3 steps with the samples of both ranks: {counted}"
    page = (tmp_path / "tiny.md").read_text().partition("## tiny_text/batch8on2")[2]
    assert float(cells_of(page, "paceline")["x of linear"]) > 0, "two processes are not compared with one"
    page = speed(tmp_path, "--rounds", "1", "--only", "tiny_text/batch8/paceline")
    assert len(records_in(tmp_path)) == len(cold) + 1, "what was done is run again, or what was asked for is not run"
    assert page.strip() == (tmp_path / "tiny.md").read_text().strip(), "the printed page is not the written one"
    assert "1 (1)" in cells_of(page, "paceline").values(), "the warm run is not in the table"
    before = len(records_in(tmp_path))
    speed(tmp_path, "--rounds", "1", "--deadline", "0")
    assert len(records_in(tmp_path)) == before, "a cell was started after the deadline"
