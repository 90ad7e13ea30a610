"""The facts of a machine, and what the doctor makes of them."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.machine import facts as facts_module
from paceline.machine.facts import Facts, Gpu, ask, cpu_quota, parse_gpus, this_machine, visible
from paceline.verbs import doctor as doctor_module
from paceline.verbs.doctor import doctor, gpus, links, machine, rooms, shown, torch_works

H200 = Gpu(
    name="NVIDIA H200", memory_bytes=143771 * 2**20, compute_capability=(9, 0), driver="580.95.05", uuid="GPU-aa11"
)
BARE = Facts(python="3.11.7", platform="Linux", cpu_model=None, cpu_count=2, memory_bytes=None)
WITH_GPU = replace(BARE, gpus=(H200,), versions={"torch": "2.13.0+cu130"}, torch_cuda="13.0")

ANSWER = """NVIDIA H200, 143771 MiB, 9.0, 580.95.05, GPU-aa11
Tesla V100-SXM2-16GB, 16384 MiB, 7.0, 580.95.05, GPU-bb22
Odd GPU, [N/A], [N/A], [N/A], [N/A]
"""


def test_gpus_are_read_from_nvidia_smi_and_what_it_does_not_say_is_none() -> None:
    found = parse_gpus(ANSWER)
    assert found[0] == H200
    assert found[1].compute_capability == (7, 0)
    assert found[2] == Gpu(name="Odd GPU")
    assert parse_gpus("No devices were found\n") == ()


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        (None, ["NVIDIA H200", "Tesla V100-SXM2-16GB", "Odd GPU"]),
        ("", []),
        ("-1", []),
        ("1", ["Tesla V100-SXM2-16GB"]),
        ("1, 0", ["Tesla V100-SXM2-16GB", "NVIDIA H200"]),
        ("0,9,1", ["NVIDIA H200"]),
        ("GPU-bb", ["Tesla V100-SXM2-16GB"]),
        ("GPU-none", []),
    ],
)
def test_visible_gpus_follow_the_setting_as_cuda_reads_it(setting: str | None, names: list[str]) -> None:
    assert [gpu.name for gpu in visible(parse_gpus(ANSWER), setting)] == names


def test_a_slice_of_a_gpu_has_unknown_memory() -> None:
    (gpu,) = visible((H200, H200), "MIG-1234")
    assert gpu.memory_bytes is None
    assert gpu.compute_capability == (9, 0), "a slice computes as its GPU does"


@pytest.mark.parametrize(
    ("limit", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("-1 100000", None), (None, None), ("", None)]
)
def test_the_control_groups_quota(limit: str | None, quota: float | None) -> None:
    assert cpu_quota(limit) == quota


def test_this_machine_is_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = this_machine()
    assert found.in_slurm
    assert 1 <= found.cpu_count <= (os.cpu_count() or 1)
    assert found.versions["numpy"]
    assert "missing-package" not in found.versions
    assert json.loads(json.dumps(found.plain()))["python"] == found.python


def test_a_hanging_a_failing_and_a_missing_nvidia_smi_give_no_answer(tmp_path: Path) -> None:
    assert ask([str(tmp_path / "nvidia-smi")]) is None
    assert ask([sys.executable, "-c", "print('half'); raise SystemExit(9)"]) is None
    assert ask([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.2) is None
    assert ask([sys.executable, "-c", "print('whole')"]) == "whole\n"


def test_gpus_come_from_the_nvidia_smi_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '%s' '{ANSWER}'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.name for gpu in this_machine().gpus] == ["Tesla V100-SXM2-16GB"]


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        (WITH_GPU, None),
        (BARE, "no NVIDIA GPU"),
        (replace(WITH_GPU, versions={"torch": None}), "torch is not installed"),
        (replace(WITH_GPU, versions={"torch": "2.13.0+cpu"}, torch_cuda=None), "build without CUDA"),
        (replace(WITH_GPU, gpus=(replace(H200, driver="535.129.03"),)), "driver 535.129.03 is too old"),
        (replace(WITH_GPU, gpus=(replace(H200, driver="535.129.03"),), torch_cuda="12.8"), None),
        (replace(WITH_GPU, gpus=(replace(H200, driver=None),)), None),
    ],
)
def test_why_a_gpu_cannot_be_used(facts: Facts, problem: str | None) -> None:
    found = facts.cuda_problem
    assert found is None if problem is None else problem in (found or ""), f"got {found!r}"


def test_torchs_cuda_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert facts_module._torch_cuda() == "13.0"


def test_the_doctor_prints_the_machine_and_returns_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    found = doctor()
    text = capsys.readouterr().out
    assert f"python {found.python}" in " ".join(text.split())
    assert "loads" in text, "torch was tried"
    assert "GiB free" in text


def test_the_doctor_names_what_is_missing_and_its_command() -> None:
    findings = [
        *machine(replace(BARE, python="3.10.2")),
        *gpus(replace(WITH_GPU, versions={"torch": "2.13.0+cpu"}, torch_cuda=None)),
    ]
    text = shown(findings)
    assert "3.10.2: paceline is tested with 3.11 to 3.13" in text
    assert "fix: make a new environment: python3.13 -m venv" in text
    assert "NVIDIA H200, 140 GiB, compute capability 9.0, 990 TFLOP/s bf16, 4.80 TB/s at best" in text
    assert "fix: pip install --force-reinstall torch" in text
    assert text.endswith("2 to mend (marked !)\n")


def test_the_doctor_says_that_torch_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # makes 'import torch' fail
    (finding,) = torch_works(replace(BARE, versions={"torch": "2.13.0"}))
    assert finding.state == "missing"
    assert "ModuleNotFoundError" in finding.text or "ImportError" in finding.text


def test_the_doctor_draws_the_links_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = "\t\x1b[4mGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n\nLegend:\n  X = Self\n"
    monkeypatch.setattr(doctor_module, "ask", lambda command: drawn)
    (finding,) = links(replace(WITH_GPU, gpus=(H200, H200)))
    assert "NV18" in finding.text
    assert "\x1b" not in finding.text
    assert "Legend" not in finding.text
    assert links(WITH_GPU) == [], "one GPU has no links"


def test_the_doctor_warns_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "not" / "yet" / "there"))
    assert {finding.topic for finding in rooms()} == {"runs disk", "cache disk", "models disk"}
    monkeypatch.setattr(doctor_module, "LITTLE_ROOM_BYTES", 2**80)
    assert all(finding.state == "missing" and finding.fix for finding in rooms())
