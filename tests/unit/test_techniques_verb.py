"""``paceline techniques``: what works on which machine, and why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.machine.facts import Facts, Gpu
from paceline.recipe.techniques import CATALOGUE, STRATEGIES
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
    return replace(CPU, gpus=(gpu,), versions={"torch": "2.13.0", "triton": triton}, torch_cuda="13.0")


Listing = Callable[[Facts], dict[str, str]]


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Listing:
    """The printed section of each technique, and of ``this machine``."""

    def listed(facts: Facts) -> dict[str, str]:
        monkeypatch.setattr(verb, "this_machine", lambda: facts)
        assert verb.techniques() == (*CATALOGUE, *STRATEGIES)
        sections = capsys.readouterr().out.rstrip("\n").split("\n\n")
        return {section.partition(":")[0]: section for section in sections}

    return listed


def test_every_technique_says_whether_it_works_here(listing: Listing) -> None:
    found = listing(machine("NVIDIA H200", (9, 0)))
    assert list(found) == ["this machine", *(entry.name for entry in (*CATALOGUE, *STRATEGIES))]
    assert "NVIDIA H200 (compute capability 9.0)" in found["this machine"]
    assert "triton 3.6.0" in found["this machine"]
    for entry in (*CATALOGUE, *(entry for entry in STRATEGIES if entry.name != "dp")):
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


def test_a_gpu_that_cannot_be_used_is_no_gpu(listing: Listing) -> None:
    found = listing(machine("NVIDIA H200", (9, 0), driver="470.10"))
    assert "driver 470.10 is too old" in found["capture"]


def test_an_old_gpu_and_a_missing_compiler_are_named(listing: Listing) -> None:
    found = listing(machine("Tesla V100-SXM2-16GB", (7, 0), triton=None))
    assert "available: fp16" in found["precision"]
    assert "not bf16: needs compute capability 8.0; Tesla V100-SXM2-16GB has 7.0" in found["precision"]
    assert "here       not available: needs triton, which is not installed" in found["compile"]
    assert "here       available" in found["capture"]
