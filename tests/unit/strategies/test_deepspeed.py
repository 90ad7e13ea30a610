"""What is known of a run under DeepSpeed without DeepSpeed: its settings, its refusals, what it is told."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.machine import disk
from paceline.machine.facts import Facts, Gpu
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.parts import ParallelPart
from paceline.recipe.techniques import entry_of
from paceline.seams import Mesh
from paceline.strategies import strategy_for
from paceline.strategies.alone import OneDevice
from paceline.strategies.deepspeed import library
from paceline.strategies.deepspeed.library import BUCKET, configuration, stage_of
from paceline.strategies.deepspeed.strategy import WITHOUT, Through
from paceline.verbs.doctor import INSTALLS, disks
from paceline.verbs.launch.check import check_recipe
from paceline.verbs.launch.ranks import Ranks

ROOT = Path(__file__).resolve().parents[3]
INSTALL = "DS_BUILD_OPS=0 pip install 'paceline[deepspeed]'"
GPU = Gpu(name="NVIDIA H100", compute_capability=(9, 0), driver="580.95.05", memory_bytes=80 * 2**30)
VERSIONS = {"torch": "2.13.0", "triton": "3.6.0", "deepspeed": "0.19.8", "torchao": "0.15.0"}
CPU = Facts(
    python="3.11.7",
    platform="Linux",
    cpu_model=None,
    cpu_count=8,
    memory_bytes=None,
    versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
)
GPUS = replace(CPU, gpus=(GPU,) * 4, versions=VERSIONS, torch_cuda="13.0")


def recipe(*settings: str) -> Recipe:
    plain: dict[str, Any] = {"model": {"source": "some-model"}, "data": {"source": "some.csv"}}
    return Recipe.parse(plain).with_settings(settings)


ON = "parallel.strategy=deepspeed"


@pytest.mark.parametrize(("written", "meant"), [("true", "parameters"), ("false", "none"), ("optimizer", "optimizer")])
def test_offload_of_older_recipes_is_read(written: str, meant: str) -> None:
    given = recipe(f"parallel.offload={written}")
    assert given.parallel.offload == meant
    assert Recipe.parse(yaml.safe_load(given.to_yaml())).resolved() == given.resolved()


@pytest.mark.parametrize(
    ("where", "what", "folder"),
    [("/nvme", "is a folder", "/nvme"), ("./swap", "is a folder", "./swap"), ("nvme", "is a disk", "FOLDER")],
)
def test_a_disk_has_a_setting_of_its_own(where: str, what: str, folder: str) -> None:
    advice = f"--set parallel.offload=optimizer --set parallel.offload_folder={folder}"
    with pytest.raises(RecipeError, match=rf"offload: {what}; .*\n.*{advice}") as told:
        recipe(ON, f"parallel.offload={where}")
    assert told.value.exit_code == 2
    advised = recipe(ON, "parallel.offload=optimizer", f"parallel.offload_folder={folder}")
    part = choose(advised, GPUS, 4)[0].parallel
    assert (part.strategy, part.stage, part.offload_folder) == ("deepspeed", 3, folder), "what is advised is refused"


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("compiler", "on_gpu", "why", "fix"),
    [
        ("not-there", False, "there is no C++ compiler (not-there)", "g++"),
        ("exit 1", False, "no program with libaio.h can be linked here", "apt-get install libaio-dev"),
        ("exit 0", True, "CUDA's headers, and there are none", "CUDA_HOME"),
    ],
)
def test_a_disk_that_cannot_be_reached_is_refused(
    compiler: str, on_gpu: bool, why: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "c++", compiler) if " " in compiler else compiler)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(disk, "CUDA", tmp_path / "none")
    monkeypatch.setattr(disk.shutil, "which", lambda name: None if name in ("nvcc", "not-there") else name)
    with pytest.raises(RecipeError) as told:
        disk.require_disk(str(tmp_path), on_gpu=on_gpu)
    assert why in told.value.why
    assert fix in told.value.fix
    assert told.value.exit_code == 2


def test_a_disk_is_reached_where_a_program_with_libaio_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "c++", f"cat > {tmp_path}/asked; echo $* >> {tmp_path}/asked"))
    disk.require_disk(str(tmp_path), on_gpu=False)
    asked = (tmp_path / "asked").read_text(encoding="utf-8")
    assert "#include <libaio.h>" in asked
    assert "-laio" in asked
    assert {path.name for path in tmp_path.iterdir()} == {"c++", "asked"}, "files are left behind"


def test_the_doctor_says_whether_a_disk_can_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for ends in ("exit 0", "exit 1"):
        monkeypatch.setenv("CXX", script(tmp_path / "c++", ends))
        told += disks(CPU)
    assert [finding.state for finding in told] == ["fine", "note"]
    assert "libaio-dev" in told[1].fix
    assert disks(replace(CPU, versions={})) == []


@pytest.mark.parametrize("folder", ["missing", "c++"])
def test_a_folder_that_cannot_be_written_is_refused_before_ranks_are_started(folder: str, tmp_path: Path) -> None:
    script(tmp_path / "c++", "exit 0")
    settings = (ON, "parallel.offload=optimizer", f"parallel.offload_folder={tmp_path / folder}")
    arguments = ["train", "recipe.yaml"]
    with pytest.raises(RecipeError) as told:
        check_recipe(recipe(*settings), Ranks(count=2), replace(GPUS, gpus=(GPU,) * 2), arguments)
    assert told.value.what == f"parallel.offload_folder = {tmp_path / folder}"
    assert "no file can be written there with O_DIRECT" in told.value.why
    assert "a folder of a local disk" in told.value.fix


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((ON,), "add --set parallel.offload=optimizer"),
        ((ON, "parallel.offload=optimizer", "parallel.stage=2"), "only stage 3 reads states from disks"),
        (("parallel.strategy=fsdp", "parallel.offload=parameters"), "has no effect with strategy: fsdp"),
        (("parallel.strategy=ddp",), "--set parallel.strategy=deepspeed"),
    ],
)
def test_a_disk_needs_stage_3_and_what_is_offloaded(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError) as told:
        choose(recipe(*settings, "parallel.offload_folder=/nvme"), GPUS, 4)
    assert message in str(told.value)


def test_a_folder_chooses_deepspeed_and_stage_3() -> None:
    part = choose(recipe("parallel.offload=parameters", "parallel.offload_folder=/nvme"), GPUS, 4)[0].parallel
    assert (part.strategy, part.stage) == ("deepspeed", 3)
    zero = configuration(part, None, 1000)["zero_optimization"]
    assert zero["offload_optimizer"] | {"pin_memory": None} == {
        "device": "nvme",
        "nvme_path": "/nvme",
        "pin_memory": None,
    }
    assert zero["offload_param"]["device"] == "cpu"


def test_offload_is_one_of_its_words() -> None:
    with pytest.raises(RecipeError, match="'none', 'optimizer' or 'parameters'"):
        recipe("parallel.offload=disk")


@pytest.mark.parametrize(
    ("settings", "strategy", "stage", "reason"),
    [
        ((ON,), "deepspeed", 2, ""),
        (("parallel.stage=1",), "deepspeed", 1, "parallel.stage is set, of deepspeed alone"),
        ((ON, "parallel.stage=3"), "deepspeed", 3, ""),
        ((ON, "parallel.offload=parameters"), "deepspeed", 3, ""),
        ((ON, "parallel.offload=optimizer"), "deepspeed", 2, ""),
        (("parallel.offload=optimizer",), "deepspeed", 2, "parallel.offload is set, of deepspeed"),
        (("parallel.offload=parameters",), "fsdp", None, "parallel.offload is set, of fsdp and deepspeed"),
        (
            ("parallel.offload=parameters", "parallel.stage=3"),
            "deepspeed",
            3,
            "parallel.offload and parallel.stage is set, of deepspeed alone",
        ),
    ],
)
def test_what_is_set_chooses_strategy_and_stage(
    settings: tuple[str, ...], strategy: str, stage: int | None, reason: str
) -> None:
    chosen, decisions = choose(recipe(*settings), GPUS, 4)
    assert (chosen.parallel.strategy, chosen.parallel.stage) == (strategy, stage)
    told = {decision.setting: decision.reason for decision in decisions}
    assert told.get("parallel.strategy", "").startswith(reason)
    assert choose(chosen, GPUS, 4) == (chosen, ()), "choosing again changes it"


def test_auto_leaves_off_what_cannot_be_had_and_says_why() -> None:
    for stage, early in ((2, "auto"), (3, False)):
        chosen, decisions = choose(recipe(ON, f"parallel.stage={stage}"), GPUS, 4)
        told = {decision.setting: decision.reason for decision in decisions}
        assert chosen.techniques.capture is chosen.techniques.compile is chosen.techniques.fusion is False
        assert "moves and frees tensors" in told["techniques.capture"]
        assert chosen.techniques.packing == "auto"
        assert chosen.techniques.early_pooling == early


@pytest.mark.parametrize(
    ("settings", "facts", "message"),
    [
        ((ON, "parallel.stage=2", "parallel.offload=parameters"), GPUS, "only stage 3 has shards of the weights"),
        (("parallel.strategy=fsdp", "parallel.offload=optimizer"), GPUS, "offload=parameters"),
        (("parallel.strategy=fsdp", "parallel.stage=3"), GPUS, "stage: has no effect with strategy: fsdp"),
        (("parallel.strategy=ddp", "parallel.stage=1"), GPUS, "--set parallel.strategy=deepspeed"),
        ((ON, "parallel.shard_size=2"), GPUS, "--set parallel.strategy=fsdp"),
        ((ON, "parallel.stage=4"), GPUS, "less than or equal to 3"),
        ((ON, "parallel.stage=0"), GPUS, "greater than or equal to 1"),
        ((ON, "parallel.offload=optimizer"), CPU, "whose memory the weights are in already"),
        ((ON, "optimizer.type=adamw8bit"), GPUS, "would cross shards"),
        ((ON, "techniques.precision=pure_bf16"), GPUS, "fp32 copy of each weight"),
        ((ON, "techniques.capture=true"), GPUS, "moves and frees tensors between passes"),
        ((ON, "techniques.compile=true"), GPUS, "hooks on modules and gradients"),
        ((ON, "techniques.fusion=true"), GPUS, "hooks on modules and gradients"),
        ((ON, "techniques.channels_last=true"), GPUS, "in its usual order in memory"),
        ((ON, "parallel.stage=3", "techniques.early_pooling=true"), GPUS, "puts a copy in place of its input"),
        ((ON, "model.train=features"), GPUS, "no step is made"),
        ((ON,), replace(CPU, versions={"torch": "2.13.0"}), INSTALL),
        ((ON,), replace(GPUS, versions={"torch": "2.13.0"}), INSTALL),
    ],
)
def test_what_cannot_work_is_refused(settings: tuple[str, ...], facts: Facts, message: str) -> None:
    with pytest.raises(RecipeError) as found:
        choose(recipe(*settings), facts, 4)
    assert message in str(found.value)


@pytest.mark.parametrize(
    ("settings", "stage", "offload"),
    [
        ((ON,), 2, "none"),
        ((ON, "parallel.stage=1"), 1, "none"),
        ((ON, "parallel.offload=optimizer"), 2, "optimizer"),
        ((ON, "parallel.offload=parameters"), 3, "parameters"),
    ],
)
def test_one_process_has_a_use_of_it(settings: tuple[str, ...], stage: int, offload: str) -> None:
    part = choose(recipe(*settings), GPUS)[0].parallel
    assert (part.strategy, part.stage, part.offload) == ("deepspeed", stage, offload)


def test_one_process_that_does_not_ask_for_it_trains_without_it() -> None:
    chosen, decisions = choose(recipe("parallel.stage=3", "parallel.offload=parameters"), CPU)
    assert chosen.parallel == recipe().parallel
    assert {decision.reason for decision in decisions if decision.setting.startswith("parallel")} == {
        "one process has nobody to share with"
    }
    assert isinstance(strategy_for(chosen, Mesh()), OneDevice)


@pytest.mark.parametrize(
    ("settings", "stage", "away"),
    [
        ({"stage": 1}, 1, ()),
        ({}, 2, ()),
        ({"offload": "optimizer"}, 2, ("offload_optimizer",)),
        ({"offload": "parameters"}, 3, ("offload_optimizer", "offload_param")),
        ({"stage": 3, "offload": "optimizer"}, 3, ("offload_optimizer",)),
    ],
)
def test_what_deepspeed_is_told(settings: dict[str, Any], stage: int, away: tuple[str, ...]) -> None:
    part = ParallelPart(strategy="deepspeed", **settings)
    told = configuration(part, 0.5, 1000)
    zero = told["zero_optimization"]
    assert stage_of(part) == zero["stage"] == stage
    assert {key for key in zero if key.startswith("offload")} == {*away}
    assert all(zero[key]["device"] == "cpu" for key in away)
    assert zero["reduce_bucket_size"] == 1000, "a buffer larger than all gradients"
    assert told["gradient_clipping"] == 0.5
    assert "fp16" not in told, "the loss scale is ours"
    json.dumps(told)
    assert configuration(part, None, 2 * BUCKET)["zero_optimization"]["reduce_bucket_size"] == BUCKET
    assert configuration(part, None, 1)["gradient_clipping"] == 0.0


def test_a_package_that_is_not_there_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    before = dict(os.environ)
    with pytest.raises(RecipeError) as found:
        library.library(torch.device("cpu"))
    assert found.value.fix == INSTALL
    assert dict(os.environ) == before


def test_the_command_is_one_everywhere() -> None:
    entry = entry_of("deepspeed")
    assert entry.install == INSTALLS["deepspeed"] == INSTALL
    for page in (entry.page, "recipes/imdb_distilbert_deepspeed.yaml"):
        assert INSTALL in (ROOT / page).read_text(encoding="utf-8"), page
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["deepspeed"]
    assert not any("deepspeed" in requirement for requirement in extras["dev"])


def test_the_job_of_a_ci_server_runs_what_make_has() -> None:
    job = ROOT / ".ci" / "deepspeed"
    assert os.access(job, os.X_OK)
    target = job.read_text(encoding="utf-8").split()[-1]
    assert f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_only_the_models_own_passes_go_through_the_engine() -> None:
    """A trial computes with a copy, which DeepSpeed knows nothing of."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    asked: list[Any] = []

    def plain(model: nn.Module, batch: Any) -> Tensor:
        asked.append(model)
        return torch.zeros(1)

    through = Through(model, plain)
    through(model, np.zeros(1))
    through.engine = nn.Identity()
    through(other, np.zeros(1))
    assert asked == [model, other]
    batch = torch.ones(1)
    assert through(model, batch) is batch, "the model's pass does not go through the engine"
    assert asked == [model, other]


@pytest.mark.parametrize(
    ("given", "read"),
    [("9.0a", "9.0"), ("8.0;9.0a+PTX 10.0f", "8.0;9.0+PTX 10.0"), ("7.5;8.6+PTX", "7.5;8.6+PTX"), (None, None)],
)
def test_the_operator_for_disks_is_built_whatever_gpus_the_machine_names(
    given: str | None, read: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed 0.19 takes what is behind the point for a number: int('0a')."""
    seen = []

    class AsyncIOBuilder:
        def load(self, *, verbose: bool) -> None:
            seen.append(os.environ.get("TORCH_CUDA_ARCH_LIST"))
            os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0+PTX"  # as DeepSpeed's builder leaves it where it fails

    builders = SimpleNamespace(AsyncIOBuilder=AsyncIOBuilder)
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.op_builder"):
        monkeypatch.setitem(sys.modules, name, builders)  # type: ignore[arg-type]
    if given is None:
        monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    else:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    library._built("/somewhere")
    assert seen == [read]
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == given, "what the machine says is as it was"


def test_what_is_advised_against_deepspeed_takes_all_of_its_settings_away() -> None:
    part = {"strategy": "deepspeed", "stage": 3, "offload": "parameters", "offload_folder": "/mnt/nvme"}
    recipe = Recipe.parse({"model": {"source": "bert"}, "data": {"source": "reviews.csv"}, "parallel": part})
    assert recipe.with_settings(WITHOUT.split()[1::2]).parallel == ParallelPart()
