"""``paceline techniques``: what works on which machine, and why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.contract.errors import RecipeError
from paceline.machine.facts import Facts, Gpu
from paceline.recipe.techniques import ENTRIES, GROUPS
from paceline.verbs import techniques as verb

CPU = Facts(
    python="3.11.7",
    platform="Linux",
    cpu_model=None,
    cpu_count=2,
    memory_bytes=None,
    versions={"torch": "2.13.0", "triton": None},
)


def machine(
    name: str, capability: tuple[int, int], *, driver: str = "580.95.05", triton: str | None = "3.6.0"
) -> Facts:
    gpu = Gpu(name=name, compute_capability=capability, driver=driver)
    return replace(
        CPU, gpus=(gpu,), versions={"torch": "2.13.0", "triton": triton, "deepspeed": "0.19.8"}, torch_cuda="13.0"
    )


Listing = Callable[[Facts], dict[str, str]]


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Listing:
    """The printed section of each technique, and of ``this machine``."""

    def listed(facts: Facts) -> dict[str, str]:
        monkeypatch.setattr(verb, "this_machine", lambda: facts)
        found = dict[str, str]()
        for entry in ENTRIES:
            assert verb.techniques(entry.name) == (entry,)
            found["this machine"], found[entry.name] = capsys.readouterr().out.rstrip("\n").split("\n\n")
        return found

    return listed


def test_all_are_listed_under_headings_in_a_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "this_machine", lambda: CPU)
    assert verb.techniques() == ENTRIES
    machine, *groups, last = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert machine.startswith("this machine: torch 2.13.0")
    assert [group.splitlines()[0] for group in groups] == list(GROUPS)
    for heading, group in zip(GROUPS, groups, strict=True):
        lines = group.splitlines()[1:]
        assert [line.split()[0] for line in lines] == [entry.name for entry in GROUPS[heading]]
        for line, entry in zip(lines, GROUPS[heading], strict=True):
            assert entry.summary in line
            assert len(line) <= 130, f"the summary of {entry.name} is long for one line"
            assert line.endswith(" *") is (entry.preserves == "changes the result")
    state = {line.split()[0]: line.split()[1] for group in groups for line in group.splitlines()[1:]}
    assert (state["packing"], state["recompute"], state["compile"], state["precision"]) == (
        "auto",
        "off",
        "off",
        "fp32",
    )
    assert "not here" in groups[0].partition("  capture")[2].splitlines()[0]
    assert "paceline techniques NAME" in last


def test_one_is_found_by_its_setting_and_an_unknown_one_by_its_neighbour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "this_machine", lambda: CPU)
    assert [entry.name for entry in verb.techniques("techniques.packing")] == ["packing"]
    with pytest.raises(RecipeError, match="did you mean 'packing'"):
        verb.techniques("pakcing")


def test_every_technique_says_whether_it_works_here(listing: Listing) -> None:
    found = listing(machine("NVIDIA H200", (9, 0)))
    assert "NVIDIA H200 (compute capability 9.0)" in found["this machine"]
    assert "triton 3.6.0" in found["this machine"]
    for entry in (entry for entry in ENTRIES if entry.name not in ("dp", "deepspeed")):
        assert "\n  here       available" in found[entry.name], found[entry.name]
        assert entry.page in found[entry.name]
    assert "techniques.packing = auto | true | false  (default auto)" in found["packing"]
    assert "one is visible to this process" in found["dp"], "it needs two GPUs"
    assert "auto       bf16: NVIDIA H200 computes in bf16" in found["precision"]


def test_without_a_gpu_the_reason_is_told(listing: Listing) -> None:
    found = listing(CPU)
    why = "no NVIDIA GPU is visible to this process"
    assert why in found["this machine"]
    assert f"here       not available: no GPU can be used: {why}" in found["capture"]
    assert "available: bf16" in found["precision"]
    assert "not fp16: fp16 with loss scaling is for GPUs" in found["precision"]
    assert "here       available" in found["recompute"]
    assert "auto" not in found["recompute"], "recompute is never chosen"


@pytest.mark.parametrize("facts", [CPU, machine("NVIDIA H200", (9, 0))], ids=["cpu", "gpu"])
def test_a_strategy_whose_package_is_missing_is_not_available(listing: Listing, facts: Facts) -> None:
    """One process shares nothing, so that a recipe with it would not notice."""
    missing = replace(facts, versions={name: at for name, at in facts.versions.items() if name != "deepspeed"})
    assert "here       not available: needs deepspeed, which is not installed" in listing(missing)["deepspeed"]
    installed = replace(facts, versions={**facts.versions, "deepspeed": "0.18.2"})
    assert "here       available, as parallel.strategy=deepspeed" in listing(installed)["deepspeed"]


def test_a_gpu_that_cannot_be_used_is_no_gpu(listing: Listing) -> None:
    found = listing(machine("NVIDIA H200", (9, 0), driver="470.10"))
    assert "driver 470.10 is too old" in found["capture"]


def test_an_old_gpu_and_a_missing_compiler_are_named(listing: Listing) -> None:
    found = listing(machine("Tesla V100-SXM2-16GB", (7, 0), triton=None))
    assert "available: fp16" in found["precision"]
    assert "not bf16: needs compute capability 8.0; Tesla V100-SXM2-16GB has 7.0" in found["precision"]
    assert "here       not available: needs triton, which is not installed" in found["compile"]
    assert "here       available" in found["capture"]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("apex", ["o1: techniques.precision=fp16", "optimizer.type=adamw", "parallel.strategy=ddp"]),
        ("Horovod", ["ring all-reduce", "horovodrun -np 2", "--gpus N", "parallel.reduce_dtype=bf16"]),
    ],
)
def test_a_library_is_answered_with_what_it_is_here(
    name: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb.techniques(name) == ()
    shown = capsys.readouterr().out
    for line in lines:
        assert line in shown
    assert "docs/coming-from.md" in shown
