"""``paceline calibrate``: what it measures is what plans then use; what cannot be measured says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.contract.errors import UserError
from paceline.machine.facts import Facts, Gpu, this_machine
from paceline.memory import calibrate as module
from paceline.memory.calibrate import calibrate
from paceline.memory.constants import constants_for, measured_file
from paceline.recipe import Recipe

MIB = 2**20
GPU = Gpu(name="NVIDIA L40S", memory_bytes=48 * 2**30, compute_capability=(8, 9), driver="580.1", uuid="GPU-1")


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "taken_by_others", lambda gpu: 0)


def machine(gpus: int = 1) -> Facts:
    versions = {**this_machine().versions, "torch": "2.11.0+cu130"}
    return replace(this_machine(), gpus=(GPU,) * gpus, versions=versions)


class Programs:
    """A GPU whose driver takes 500 MiB, and NCCL 300 more."""

    def __init__(self) -> None:
        self.recipes: list[Recipe] = []
        self.ranks: list[int] = []

    def __call__(self, name: str, *arguments: str) -> str:
        if name == "paceline.memory.products":
            return 'a warning\n{"workspaces": [33554432, 8388608], "flops_per_second": 3.0e14}\n'
        _, recipe, _, folder, *rest = arguments
        self.recipes.append(Recipe.load(recipe))
        self.ranks.append(int(rest[1]) if rest else 1)
        total = 2000 + 500 + (300 if rest else 0)
        Path(folder).mkdir()
        memory = {"allocated": 1500 * MIB, "reserved": 2000 * MIB, "total": total * MIB}
        (Path(folder) / "summary.json").write_text(json.dumps({"memory": memory}))
        return ""


def test_plans_use_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Facts, "cuda_problem", None)
    before = constants_for(GPU)
    assert "not measured" in before.source
    programs, told = Programs(), list[str]()
    found = calibrate(machine(2), program=programs, progress=told.append)
    assert programs.ranks == [1, 2]
    assert told == ["matrix products", "a run on one GPU", "a run on two GPUs"]
    assert found.constants == constants_for(GPU) != before
    assert (found.constants.context, found.constants.communicator) == (500 * MIB, 300 * MIB)
    assert found.constants.workspaces == (32 * MIB, 8 * MIB)
    assert found.constants.source == "measured by paceline calibrate with torch 2.11.0+cu130, driver 580.1"
    assert json.loads(found.file.read_text())["NVIDIA L40S"]["flops_per_second"] == 3.0e14


def test_one_gpu_leaves_nccl_to_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Facts, "cuda_problem", None)
    known = constants_for(GPU).communicator
    found = calibrate(machine(), program=Programs(), progress=lambda _: None)
    assert found.constants.communicator is None
    assert constants_for(GPU).communicator == known


def test_other_gpus_stay_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Facts, "cuda_problem", None)
    measured_file().write_text(json.dumps({"a GPU": {"source": "here", "context": 5, "workspaces": [1]}}))
    calibrate(machine(), program=Programs(), progress=lambda _: None)
    assert constants_for(Gpu(name="a GPU")).context == 5
    assert constants_for(GPU).context == 500 * MIB


def test_a_gpu_that_somebody_is_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Facts, "cuda_problem", None)
    monkeypatch.setattr(module, "taken_by_others", lambda gpu: 900 * MIB)
    with pytest.raises(UserError, match="900 MiB of NVIDIA L40S are in use"):
        calibrate(machine(), program=Programs(), progress=lambda _: None)
    assert not measured_file().exists()


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Facts, "cuda_problem", "no driver")
    with pytest.raises(UserError, match="no GPU to measure on"):
        calibrate(this_machine(), program=Programs(), progress=lambda _: None)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"x": 3}', '{"x": {"context": "much", "workspaces": [], "source": ""}}']
)
def test_a_file_that_is_none_is_named(content: str) -> None:
    measured_file().write_text(content)
    with pytest.raises(UserError, match=rf"{measured_file().name} cannot be read"):
        constants_for(GPU)


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(UserError, match=r"(?s)paceline\.memory\.nothing failed.*No module named") as caught:
        module._said("paceline.memory.nothing")
    assert caught.value.exit_code == 2


def test_the_run_is_a_recipe_of_today() -> None:
    assert Recipe.parse(module.RUN).techniques.packing == "auto"
