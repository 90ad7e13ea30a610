"""The table of planted faults fits the source as it is now, and the program that plants them can be believed."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from paceline.check.claims import CLAIMS
from tests.mutants import __main__ as program
from tests.mutants import check as checking
from tests.mutants import witness
from tests.mutants.fault import ROOT, SOURCE, Fault, NotPlanted, plant, planted
from tests.mutants.table import FAULTS
from tests.mutants.tiny_recipes import RECIPES

TEXT = "def half(x):\n    if x:\n        return x / 2\n    return 0\n"
HALF = Fault("a-third", "half.py", "return x / 2", "return x / 3", ("unit/test_half.py::test_half",))
SKIPPED = next(fault for fault in FAULTS if fault.name == "skipped-loss-counts")


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_is_one_line_that_is_there_exactly_once(fault: Fault) -> None:
    text = (SOURCE / fault.file).read_text(encoding="utf-8")
    changed = planted(text, fault)
    lines, others = text.splitlines(), changed.splitlines()
    assert len(lines) == len(others), "more than a line is changed"
    assert sum(one != other for one, other in zip(lines, others, strict=True)) == 1
    compile(changed, fault.file, "exec")  # what Python does not read at all is no fault that tests could find


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_names_fast_tests_that_exist(fault: Fault) -> None:
    assert fault.tests, "nothing would be run"
    for test in fault.tests:
        file, _, case = test.partition("::")
        function = case.partition("[")[0]
        assert function in fast_tests(file), f"tests/{file} has no fast test {function}"


@cache
def fast_tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {
        node.name for node in functions if not any(ast.unparse(d) == "pytest.mark.slow" for d in node.decorator_list)
    }


def test_names_are_given_once_and_the_faults_are_many() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 60


def test_a_line_is_replaced_where_it_stands() -> None:
    assert planted(TEXT, HALF) == TEXT.replace("/ 2", "/ 3")


@pytest.mark.parametrize(("line", "times"), [("return x / 4", 0), ("return x", 0), ("pass", 2)])
def test_a_line_that_is_not_there_exactly_once_is_refused(line: str, times: int) -> None:
    text = TEXT + "\ndef one():\n    pass\n\ndef other():\n    pass\n"
    with pytest.raises(NotPlanted, match=rf"a-third: half\.py has this line {times} times"):
        planted(text, replace(HALF, line=line))


def test_nothing_is_planted_but_in_a_copy(tmp_path: Path) -> None:
    before = (SOURCE / SKIPPED.file).read_bytes()
    with pytest.raises(NotPlanted, match="is no file of a copy"):
        plant(SOURCE, SKIPPED)
    assert (SOURCE / SKIPPED.file).read_bytes() == before
    with pytest.raises(NotPlanted, match="is no file of a copy"):
        plant(tmp_path, SKIPPED)


def test_every_named_test_has_to_fail() -> None:
    two = replace(HALF, tests=("a.py::test_one", "a.py::test_two"))
    assert two.survives({"tests/a.py::test_one[2]", "tests/a.py::test_two"}) == []
    assert two.survives({"tests/a.py::test_one", "tests/a.py::test_two_others"}) == ["tests/a.py::test_two"]


def test_a_planted_fault_is_found_in_the_copy_alone() -> None:
    """The one that runs tests; they need no torch."""
    assert program.failures(SKIPPED, SKIPPED.node_ids[:1]) == {SKIPPED.node_ids[0]}
    assert program.failures(None, SKIPPED.node_ids[:1]) == set()


def test_tests_that_cannot_be_run_kill_nothing() -> None:
    with pytest.raises(program.NotTried, match="pytest ended with 4"):
        program.failures(None, ["tests/unit/test_progress.py::test_that_is_not_there"])


def test_a_session_that_would_see_another_source_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_MUTANT", str(tmp_path))
    with pytest.raises(pytest.UsageError, match="not the copy"):
        witness.pytest_sessionstart()
    import paceline

    monkeypatch.setenv("PACELINE_MUTANT", os.fspath(Path(paceline.__file__).parent))
    witness.pytest_sessionstart()


@pytest.mark.parametrize(
    ("broken", "failed", "code", "told"),
    [
        (set(), set(SKIPPED.node_ids), 0, f"{SKIPPED.name} is found\n1 of 1 found"),
        (set(), set(), 1, f"{SKIPPED.name} survives\n    {SKIPPED.node_ids[0]}"),
        ({"tests/x.py::test_x"}, set(), 1, "without a fault these tests fail:\n    tests/x.py::test_x"),
    ],
    ids=["killed", "survived", "broken without it"],
)
def test_the_exit_code_tells(
    broken: set[str],
    failed: set[str],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(program, "failures", lambda fault, _: broken if fault is None else failed)
    assert program.main(["--only", SKIPPED.name]) == code
    assert told in capsys.readouterr().out


ON_A_GPU = next(fault for fault in FAULTS if fault.needs_gpu)


@pytest.mark.parametrize("gpu", [True, False], ids=["a GPU", "none"])
def test_a_fault_whose_tests_need_a_gpu_is_named_where_there_is_none(
    gpu: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tests would be skipped, which is no failure."""
    seen = list[str]()

    def failures(fault: Fault | None, tests: Sequence[str]) -> set[str]:
        seen.extend(tests)
        return set() if fault is None else {*tests}

    monkeypatch.setattr(program, "failures", failures)
    monkeypatch.setattr(program, "has_gpu", lambda: gpu)
    assert program.main(["--only", ON_A_GPU.name, "--only", SKIPPED.name]) == 0
    told = capsys.readouterr().out
    assert (ON_A_GPU.node_ids[0] in seen) == gpu == (f"{ON_A_GPU.name} is found" in told)
    assert (f"{ON_A_GPU.name} needs a GPU, and this machine has none" in told) == (not gpu) == ("1 need" in told)
    assert program.main(["--only", ON_A_GPU.name]) == 0


def test_claims_that_need_a_gpu_or_a_compiler_have_faults_that_stand_ins_show() -> None:
    for claim, test in OF_STAND_INS.items():
        assert sum(f"unit/check/test_gpu_claims.py::{test}" in fault.tests for fault in FAULTS) >= 3, claim


OF_STAND_INS = {
    "compile": "test_compiled_blocks_of_padded_texts_are_those_as_written",
    "capture": "test_replayed_steps_take_what_is_given_now",
}


def test_a_name_that_is_unknown_is_told_with_those_that_are_known() -> None:
    with pytest.raises(SystemExit, match=r"unknown: tpyo\nknown: .*skipped-loss-counts"):
        program.main(["--only", "tpyo"])


SOUGHT = checking.sought()


@pytest.mark.parametrize("row", SOUGHT, ids=[row.fault.name for row in SOUGHT])
def test_a_fault_that_a_check_has_to_find_is_one_line_and_names_a_claim_and_a_recipe(row: checking.Sought) -> None:
    changed = planted((SOURCE / row.fault.file).read_text(encoding="utf-8"), row.fault)
    compile(changed, row.fault.file, "exec")
    assert row.claim in {claim.name for claim in CLAIMS}
    assert row.recipe in RECIPES


def test_checks_are_sought_for_many_faults_of_most_claims() -> None:
    assert len(SOUGHT) >= 50
    on_a_cpu = {claim.name for claim in CLAIMS} - {"compile", "capture", "recompiles", "waits", "memory"}
    assert {row.claim for row in SOUGHT} == on_a_cpu


def test_a_check_that_passes_with_its_fault_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = SOUGHT[0].fault.name

    def found(fault: Fault | None, recipe: str, claims: list[str]) -> dict[str, dict[str, str]]:
        return {claim: {"status": "passed", "told": "equal"} for claim in claims}

    monkeypatch.setattr(checking, "checked", found)
    monkeypatch.setattr(checking, "IMPORTED", ())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert checking.main(["--only", name]) == 1
    assert f"{name} survives: {SOUGHT[0].claim} passed: equal" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="unknown: tpyo"):
        checking.main(["--only", "tpyo"])
