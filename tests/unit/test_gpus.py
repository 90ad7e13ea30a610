"""The table of GPUs, what a person may call them, and the machine that a plan is made for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from paceline.contract.errors import UserError
from paceline.machine.facts import PACKAGES, Facts, Gpu, parse_gpus
from paceline.machine.gpus import MODELS, Model, facts_with, gpu_for, model_named, peak_rates
from paceline.recipe import Recipe
from paceline.recipe.choose import choose

LAPTOP = Facts(
    python="3.11.7",
    platform="Linux",
    cpu_model=None,
    cpu_count=2,
    memory_bytes=8 * 2**30,
    versions={"torch": "2.13.0+cpu", "triton": None, "numpy": "2.1.0"},
    in_slurm=True,
)
LANES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
"""fp32 units of a multiprocessor by capability, as NVIDIA's architecture papers count them; later ones have 128."""


def recipe(*settings: str) -> Recipe:
    plain: dict[str, Any] = {"model": {"source": "some-model"}, "data": {"source": "some.csv"}}
    return Recipe.parse(plain).with_settings(settings)


def each_model() -> Any:
    return pytest.mark.parametrize("model", MODELS, ids=lambda model: model.short)


# -- the table ---------------------------------------------------------------------------------------------------------


@each_model()
def test_every_gpu_is_found_by_both_of_its_names(model: Model) -> None:
    assert gpu_for(model.short) == model.gpu
    assert gpu_for(model.name) == model.gpu
    assert model_named(model.name) is model
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", model.short), "a short name is for typing"


def test_no_two_gpus_share_a_name() -> None:
    models = MODELS
    plain = [{re.sub(r"[^a-z0-9]|nvidia|tesla|geforce|rtx", "", n.lower()) for n in (m.short, m.name)} for m in models]
    for names in ([model.short for model in models], [model.name for model in models], [n for s in plain for n in s]):
        assert len(set(names)) == len(names), f"twice: {sorted(name for name in names if names.count(name) > 1)}"


@each_model()
def test_the_figures_of_a_gpu_agree_with_one_another(model: Model) -> None:
    rates = model.rates
    if rates is None:
        return
    assert (rates.bf16_flops is None) == (model.compute_capability < (8, 0)), "bf16 came with compute capability 8.0"
    assert rates.bf16_flops in (None, rates.fp16_flops), "tensor cores are as fast in bf16 as in fp16"
    seconds = model.memory_mebibytes * 2**20 / rates.memory_bytes_per_second
    assert 0.01 < seconds < 0.1, f"all memory is read in {seconds:.3f} s: a unit is wrong"
    if rates.fp32_flops is not None and model.multiprocessors is not None:
        lanes = LANES.get(model.compute_capability, 128)
        hertz = rates.fp32_flops / (2 * lanes * model.multiprocessors)
        assert 1.3e9 < hertz < 2.7e9, f"{hertz / 1e9:.2f} GHz: rate and multiprocessors do not belong together"


@pytest.mark.parametrize(
    ("short", "mebibytes", "capability", "multiprocessors"),
    [
        ("h200", 143771, (9, 0), 132),
        ("h100-80gb", 81559, (9, 0), 132),
        ("h100-pcie", 81559, (9, 0), 114),
        ("a100-40gb", 40960, (8, 0), 108),
        ("a10g", 23028, (8, 6), 80),
        ("v100-32gb", 32768, (7, 0), 80),
        ("t4", 15360, (7, 5), 40),
        ("rtx-5090", 32607, (12, 0), 170),
    ],
)
def test_figures_that_were_looked_up_twice(
    short: str, mebibytes: int, capability: tuple[int, int], multiprocessors: int
) -> None:
    (model,) = (model for model in MODELS if model.short == short)
    assert (model.memory_mebibytes, model.compute_capability, model.multiprocessors) == (
        mebibytes,
        capability,
        multiprocessors,
    )


def test_a_gpu_is_as_the_driver_would_describe_it() -> None:
    (seen,) = parse_gpus("NVIDIA H200, 143771 MiB, 9.0, 580.95.05, GPU-aa11\n")
    assert gpu_for("h200") == replace(seen, driver=None, uuid=None)


def test_peak_rates_are_known_for_known_gpus_only() -> None:
    rates = peak_rates("NVIDIA H200")
    assert rates is not None
    assert rates.bf16_flops == pytest.approx(989.5e12), "half of the data sheet's 1,979 TFLOPS with sparsity"
    assert (rates.fp32_flops, rates.memory_bytes_per_second) == (pytest.approx(67e12), pytest.approx(4.8e12))
    volta = peak_rates("Tesla V100-SXM2-32GB")
    assert volta is not None
    assert volta.bf16_flops is None, "Volta has no bf16"
    assert peak_rates("A100-SXM4-40GB") == peak_rates("NVIDIA A100-SXM4-40GB"), "older drivers leave the brand out"
    for unknown in ("NVIDIA GeForce RTX 9999", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100", "h200", ""):
        assert peak_rates(unknown) is None, f"{unknown!r} was taken for a GPU of the table"


# -- what a person may type --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H200", "NVIDIA H200"),
        (" h200\n", "NVIDIA H200"),
        ("h200 nvl", "NVIDIA H200 NVL"),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB"),
        ("a100_80gb", "NVIDIA A100-SXM4-80GB"),
        ("A10080GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB PCIe"),
        ("nvidia-a100-pcie-40gb", "NVIDIA A100-PCIE-40GB"),
        ("v100-32gb", "Tesla V100-SXM2-32GB"),
        ("Tesla_V100_SXM2_16GB", "Tesla V100-SXM2-16GB"),
        ("a10", "NVIDIA A10"),
        ("l4", "NVIDIA L4"),
        ("L40", "NVIDIA L40"),
        ("GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("3060", "NVIDIA GeForce RTX 3060"),
        ("RTX A6000", "NVIDIA RTX A6000"),
        ("rtx 6000", "NVIDIA RTX 6000 Ada Generation"),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("gh", "NVIDIA GH200 480GB"),
    ],
)
def test_a_gpu_is_read_however_it_is_spelled(text: str, name: str) -> None:
    assert gpu_for(text).name == name


@pytest.mark.parametrize(
    ("text", "name", "num_bytes"),
    [
        ("24GiB", "a GPU of 24 GiB", 24 * 2**30),
        ("24 gib", "a GPU of 24 GiB", 24 * 2**30),
        ("24 GB", "a GPU of 24 GB", 24 * 10**9),
        ("40960MiB", "a GPU of 40960 MiB", 40 * 2**30),
        ("500 mb", "a GPU of 500 MB", 5 * 10**8),
        ("22.5GiB", "a GPU of 22.5 GiB", 22 * 2**30 + 2**29),
    ],
)
def test_an_amount_of_memory_is_a_gpu_of_which_nothing_else_is_known(text: str, name: str, num_bytes: int) -> None:
    assert gpu_for(text) == Gpu(name=name, memory_bytes=num_bytes)


@each_model()
def test_a_gpu_has_the_gigabytes_that_it_is_sold_with(model: Model) -> None:
    sold = re.search(r"[0-9]+gb", model.short)
    if sold:
        asked = gpu_for(sold[0]).memory_bytes or 0
        assert asked <= model.memory_mebibytes * 2**20, "what fits an amount in GB must fit a GPU sold with it"


PLAN = "paceline plan RECIPE --gpu"


@pytest.mark.parametrize(
    ("text", "what", "why", "fix"),
    [
        (
            "a100",
            "--gpu 'a100'",
            "it may be a100-40gb, a100-40gb-pcie, a100-80gb or a100-80gb-pcie",
            f"{PLAN} a100-40gb",
        ),
        (
            "NVIDIA V100",
            "--gpu 'NVIDIA V100'",
            "it may be v100-16gb, v100-16gb-pcie, v100-32gb or v100-32gb-pcie",
            f"{PLAN} v100-16gb",
        ),
        ("h100", "--gpu 'h100'", "it may be h100-80gb, h100-pcie or h100-nvl", f"{PLAN} h100-80gb"),
        ("rtxx-4090", "--gpu 'rtxx-4090': unknown GPU", "near it: rtx-4090", f"{PLAN} rtx-4090"),
        ("rtx 4090 d", "--gpu 'rtx 4090 d': unknown GPU", "near it: rtx-4090", f"{PLAN} rtx-4090"),
        (
            "H100-SXM5",
            "--gpu 'H100-SXM5': unknown GPU",
            "near it: h100-80gb, h100-pcie or h100-nvl",
            f"{PLAN} h100-80gb",
        ),
        (
            "24",
            "--gpu '24'",
            "it names no GPU, and an amount of memory needs its unit",
            f"{PLAN} 24GiB",
        ),
        ("10g", "--gpu '10g'", "it names no GPU, and an amount of memory needs its unit", f"{PLAN} 10GiB"),
        ("40", "--gpu '40'", "it names no GPU, and an amount of memory needs its unit", f"{PLAN} 40GiB"),
        ("40960", "--gpu '40960'", "it names no GPU, and an amount of memory needs its unit", f"{PLAN} 40960MiB"),
        ("512M", "--gpu '512M'", "it names no GPU, and an amount of memory needs its unit", f"{PLAN} 512MiB"),
        ("0GiB", "--gpu 0 GiB", "every GPU has memory", f"{PLAN} 24GiB"),
    ],
)
def test_what_cannot_be_read_is_answered_with_the_command_that_works(text: str, what: str, why: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        gpu_for(text)
    error = caught.value
    assert (error.what, error.why, error.fix, error.exit_code) == (what, why, fix, 2)
    assert gpu_for(error.fix.removeprefix(f"{PLAN} ")), "the command that is offered works"


@pytest.mark.parametrize(
    "text", ["", "  ", "-", "rtx", "cpu", "mi300x", "-24GiB", "1e9GiB", "٢٤GiB", "x" * 10_000, "\x1b[2J"]
)
def test_what_names_nothing_is_answered_with_every_name(text: str) -> None:
    with pytest.raises(UserError) as caught:
        gpu_for(text)
    assert "unknown GPU" in caught.value.what
    assert len(caught.value.what) < 120, "what was typed is shown, not all of it"
    assert "\x1b" not in str(caught.value)
    assert caught.value.why == f"known: {', '.join(model.short for model in MODELS)}"
    assert caught.value.fix == f"its memory instead: {PLAN} 24GiB"


def test_a_slice_of_a_gpu_is_not_taken_for_the_gpu() -> None:
    with pytest.raises(UserError, match="unknown GPU"):
        gpu_for("NVIDIA A100-SXM4-40GB MIG 1g.5gb")


# -- the machine that a plan is made for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("techniques.precision=fp16",),
        ("techniques.recompute=true", "loop.batch_size=96", "loop.micro_batch_size=8"),
        ("model.train=features",),
        ("optimizer.type=adamw8bit",),
        ("techniques.compile=true",),
        ("techniques.fusion=true", "techniques.precision=bf16"),
    ],
)
def test_a_laptop_plans_what_the_machine_with_the_gpu_would_choose(settings: tuple[str, ...]) -> None:
    machine = Facts(
        python="3.12.4",
        platform="Linux",
        cpu_model="Xeon",
        cpu_count=96,
        memory_bytes=2**40,
        gpus=parse_gpus("NVIDIA H200, 143771 MiB, 9.0, 580.95.05, GPU-aa11\n" * 2),
        versions={"torch": "2.13.0+cu130", "triton": "3.6.0", "bitsandbytes": "0.49"},
        torch_cuda="13.0",
    )
    planned = facts_with([gpu_for("h200")] * 2, LAPTOP)
    assert choose(recipe(*settings), planned, 2) == choose(recipe(*settings), machine, 2)
    assert choose(recipe(*settings), planned) == choose(recipe(*settings), machine)


@pytest.mark.parametrize(
    ("gpu", "precision", "fusion", "reason"),
    [
        ("rtx-4090", "bf16", True, "NVIDIA GeForce RTX 4090 computes in bf16"),
        ("v100-32gb", "fp32", False, "Tesla V100-SXM2-32GB (compute capability 7.0) does not compute in bf16"),
        ("24GiB", "fp32", False, "the compute capability of a GPU of 24 GiB is not known"),
    ],
)
def test_the_choice_follows_the_planned_gpu(gpu: str, precision: str, fusion: bool, reason: str) -> None:
    chosen, decisions = choose(recipe(), facts_with([gpu_for(gpu)], LAPTOP))
    assert (chosen.device, chosen.techniques.precision, chosen.techniques.fusion) == ("cuda", precision, fusion)
    assert chosen.techniques.compile == "auto", "with triton it is left to the model and the data"
    assert reason in {decision.reason for decision in decisions}


def test_assumptions_are_made_of_what_is_missing_only() -> None:
    planned = facts_with([gpu_for("l4")], LAPTOP)
    assert planned.cuda_problem is None
    assert planned.versions == {**dict.fromkeys(PACKAGES, "assumed"), "torch": "2.13.0", "numpy": "2.1.0"}
    assert replace(planned, gpus=(), versions={}, torch_cuda=None) == replace(LAPTOP, versions={}), "the rest is ours"
    assert LAPTOP.versions["triton"] is None, "the facts that were given are as they were"
    assert not LAPTOP.gpus
    own = replace(LAPTOP, versions={"torch": "2.11.0+cu126", "triton": "3.6.0"})
    assert facts_with([gpu_for("l4")], own).versions["triton"] == "3.6.0"
    assert facts_with([gpu_for("l4")], replace(LAPTOP, versions={})).cuda_problem is None, "a login node without torch"


def test_an_old_driver_here_does_not_forbid_a_plan_for_elsewhere() -> None:
    here = parse_gpus("NVIDIA H200, 143771 MiB, 9.0, 470.1, GPU-aa11\n")
    assert facts_with(here, LAPTOP).cuda_problem is None


def test_volta_needs_an_older_cuda() -> None:
    cudas = {name: facts_with([gpu_for(name)], LAPTOP).torch_cuda for name in ("v100-16gb", "t4", "b200", "24GiB")}
    assert cudas == {"v100-16gb": "12.6", "t4": "13.0", "b200": "13.0", "24GiB": "13.0"}


def test_two_gpus_serve_one_process() -> None:
    split = recipe("parallel.strategy=dp")
    chosen, _ = choose(split, facts_with([gpu_for("t4")] * 2, LAPTOP))
    assert chosen.parallel.strategy == "dp"
    with pytest.raises(UserError, match="one is visible"):
        choose(split, facts_with([gpu_for("t4")], LAPTOP))
