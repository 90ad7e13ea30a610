"""From ``auto`` to explicit settings, the refusals, and the rules of the catalogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.contract.errors import RecipeError
from paceline.machine.facts import Facts, Gpu
from paceline.recipe import Recipe
from paceline.recipe.choose import bucket_decision, choose
from paceline.recipe.entries import Rule, TechniqueEntry
from paceline.recipe.rules import check_rules, decision_of

CPU = Facts(python="3.11.7", platform="Linux", cpu_model=None, cpu_count=2, memory_bytes=None)


def machine_with(name: str, capability: tuple[int, int] | None, **versions: str) -> Facts:
    gpu = Gpu(name=name, compute_capability=capability, driver="580.95.05")
    return replace(CPU, gpus=(gpu,), versions={"torch": "2.13.0", **versions}, torch_cuda="13.0")


HOPPER = machine_with("NVIDIA H200", (9, 0))
WITH_TRITON = machine_with("NVIDIA H200", (9, 0), triton="3.6.0")
VOLTA = machine_with("Tesla V100-SXM2-16GB", (7, 0))
UNKNOWN = machine_with("NVIDIA Mystery", None)


def recipe(*settings: str) -> Recipe:
    plain: dict[str, Any] = {"model": {"source": "some-model"}, "data": {"source": "some.csv"}}
    return Recipe.parse(plain).with_settings(settings)


@pytest.mark.parametrize(
    ("facts", "device", "precision", "reason"),
    [
        (CPU, "cpu", "fp32", "the device is a CPU"),
        (HOPPER, "cuda", "bf16", "NVIDIA H200 computes in bf16"),
        (VOLTA, "cuda", "fp32", "(compute capability 7.0) does not compute in bf16"),
        (UNKNOWN, "cuda", "fp32", "the compute capability of NVIDIA Mystery is not known"),
        (replace(HOPPER, torch_cuda=None), "cpu", "fp32", "the device is a CPU"),
    ],
)
def test_device_and_precision_follow_the_machine(facts: Facts, device: str, precision: str, reason: str) -> None:
    chosen, decisions = choose(recipe(), facts)
    assert (chosen.device, chosen.techniques.precision) == (device, precision)
    why = {decision.setting: decision.reason for decision in decisions}
    assert reason in why["techniques.precision"]
    assert why["device"], "every decision gives a reason"


def test_batch_sizes_are_filled_in() -> None:
    chosen, decisions = choose(recipe("loop.batch_size=24"), CPU)
    assert (chosen.loop.micro_batch_size, chosen.loop.evaluation_batch_size) == (24, 48)
    assert {"loop.micro_batch_size", "loop.evaluation_batch_size"} <= {decision.setting for decision in decisions}
    chosen, _ = choose(recipe("loop.batch_size=24"), HOPPER)
    assert chosen.loop.evaluation_batch_size == 128, "a GPU is kept busy"
    chosen, _ = choose(recipe("loop.batch_size=24", "loop.micro_batch_size=7"), CPU)
    assert chosen.loop.evaluation_batch_size == 14


def test_what_is_set_stays_and_choosing_again_changes_nothing() -> None:
    given = recipe("device=cpu", "techniques.precision=bf16", "loop.micro_batch_size=4", "loop.evaluation_batch_size=5")
    switches = ("channels_last", "fully_connected", "fused_qkv", "fusion", "embedding_gradient", "compile", "capture")
    given = given.with_settings(["data.resident=false", *(f"techniques.{name}=false" for name in switches)])
    assert choose(given, HOPPER) == (given, ())
    chosen, decisions = choose(recipe(), HOPPER)
    assert len(decisions) == 8
    assert choose(chosen, HOPPER) == (chosen, ())


@pytest.mark.parametrize(
    ("facts", "settings", "value", "reason"),
    [
        (CPU, [], "false", "for GPUs"),
        (HOPPER, [], "false", "triton is not installed"),
        (WITH_TRITON, [], "true", "fewer passes"),
        (WITH_TRITON, ["techniques.precision=fp16"], "true", "fewer passes"),
        (WITH_TRITON, ["techniques.precision=fp32"], "false", "bf16 or fp16"),
        (WITH_TRITON, ["techniques.precision=pure_bf16"], "false", "for autocast"),
        (WITH_TRITON, ["model.train=features"], "false", "no step"),
        (machine_with("V100", (7, 0), triton="3.6"), ["techniques.precision=fp16"], "false", "8.0"),
    ],
)
def test_fusion_is_on_where_its_kernels_run(facts: Facts, settings: list[str], value: str, reason: str) -> None:
    chosen, decisions = choose(recipe(*settings), facts)
    (decision,) = (each for each in decisions if each.setting == "techniques.fusion")
    assert (decision.value, chosen.techniques.fusion) == (value, value == "true")
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("facts", "settings", "value"),
    [
        (CPU, [], False),
        (HOPPER, [], False),
        (WITH_TRITON, ["model.train=last:2"], False),
        (WITH_TRITON, ["model.train=head"], False),
        (WITH_TRITON, [], "auto"),
        (WITH_TRITON, ["techniques.precision=fp32"], "auto"),
    ],
)
def test_gradients_of_embeddings_are_ours_where_they_are_trained_on_a_gpu(
    facts: Facts, settings: list[str], value: bool | str
) -> None:
    """Whether the embeddings are compiled is known with the data; until then it stays open."""
    chosen, _ = choose(recipe(*settings), facts)
    assert chosen.techniques.embedding_gradient == value


@pytest.mark.parametrize(
    ("settings", "value", "reason"),
    [
        ([], "true", "replayed steps"),
        (["techniques.recompute=true"], "false", "recompute saves"),
        (["parallel.strategy=fsdp", "parallel.offload=true"], "false", "the host waits"),
        (["model.train=features"], "false", "no step is made"),
    ],
)
def test_steps_are_captured_where_nothing_in_them_asks_the_host(settings: list[str], value: str, reason: str) -> None:
    chosen, decisions = choose(recipe(*settings), WITH_TRITON, world_size=2)
    (decision,) = (each for each in decisions if each.setting == "techniques.capture")
    assert (decision.value, chosen.techniques.capture) == (value, value == "true")
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("facts", "settings", "why"),
    [
        (CPU, [], "device = cuda"),
        (HOPPER, [], "needs triton"),
        (WITH_TRITON, ["techniques.precision=fp32"], "bf16 or fp16"),
        (WITH_TRITON, ["model.train=features"], "model.train"),
        (machine_with("V100", (7, 0), triton="3.6"), ["techniques.precision=fp16"], "8.0"),
    ],
)
def test_fusion_that_was_asked_for_is_refused_where_it_cannot_be(facts: Facts, settings: list[str], why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        choose(recipe("techniques.fusion=true", *settings), facts)
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("facts", "settings", "what", "why", "fix"),
    [
        (CPU, ["device=cuda"], "device = cuda", "no NVIDIA GPU", "--set device=cpu"),
        (CPU, ["techniques.precision=fp16"], "techniques.precision = fp16", "for GPUs", "precision=fp32"),
        (CPU, ["techniques.precision=tf32"], "techniques.precision = tf32", "no effect on a CPU", "precision=fp32"),
        (VOLTA, ["techniques.precision=bf16"], "techniques.precision = bf16", "capability 8.0", "precision=fp16"),
        (VOLTA, ["techniques.precision=pure_bf16"], "precision = pure_bf16", "capability 8.0", "precision=fp16"),
        (VOLTA, ["techniques.precision=tf32"], "techniques.precision = tf32", "has 7.0", "precision=fp16"),
        (CPU, ["optimizer.type=adamw8bit"], "optimizer.type = adamw8bit", "GPUs only", "optimizer.type=adamw"),
        (HOPPER, ["optimizer.type=adamw8bit"], "optimizer.type", "neither is installed", "pip install 'paceline["),
        (
            CPU,
            ["techniques.early_pooling=true", "techniques.packing=false"],
            "techniques.early_pooling = true",
            "needs techniques.packing = auto or true (now techniques.packing = false)",
            "--set techniques.early_pooling=false",
        ),
        (CPU, ["loop.micro_batch_size=64"], "loop.micro_batch_size = 64", "loop.batch_size = 32", "=32"),
        (
            CPU,
            ["techniques.recompute=true", "model.train=head"],
            "techniques.recompute",
            "model.train",
            "=false",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(
    facts: Facts, settings: list[str], what: str, why: str, fix: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        choose(recipe(*settings), facts)
    error = caught.value
    assert what in error.what
    assert why in error.why
    assert fix in error.fix


@pytest.mark.parametrize(
    ("facts", "settings"),
    [
        (HOPPER, ["techniques.precision=fp16"]),
        (VOLTA, ["techniques.precision=fp16"]),
        (UNKNOWN, ["techniques.precision=bf16"]),
        (CPU, ["techniques.precision=bf16"]),
        (machine_with("NVIDIA H200", (9, 0), torchao="0.15"), ["optimizer.type=adamw8bit"]),
        (CPU, ["techniques.recompute=true", "model.train=last:2"]),
    ],
)
def test_what_works_is_not_refused(facts: Facts, settings: list[str]) -> None:
    choose(recipe(*settings), facts)


@pytest.mark.parametrize(
    ("rules", "settings", "message"),
    [
        ({"needs": (Rule("techniques.precision=fp16|bf16"),)}, ["techniques.precision=fp32"], "= fp16 or bf16 (now"),
        ({"needs": (Rule("techniques.precision=fp16|bf16"),)}, ["techniques.precision=bf16"], None),
        ({"excludes": (Rule("techniques.precision=fp16|bf16"),)}, ["techniques.precision=fp32"], None),
        ({"excludes": (Rule("techniques.precision=fp16|bf16"),)}, ["techniques.precision=bf16"], "= fp16 or bf16 (now"),
        ({"excludes": (Rule("techniques.fusion=true"),)}, ["techniques.fusion=true"], "with techniques.fusion = true"),
        ({"excludes": (Rule("techniques.fusion=true"),)}, [], None),
        (
            {"excludes": (Rule("loop.max_steps=null", "it never ends"),)},
            [],
            "with loop.max_steps = null: it never ends",
        ),
        ({"excludes": (Rule("loop.max_steps=null"),)}, ["loop.max_steps=3"], None),
        ({"excludes": (Rule("loop.max_steps=null", only="auto"),)}, [], None),
        ({"needs": (Rule("loop.shuffle=false"),)}, [], "needs loop.shuffle = false (now loop.shuffle = true)"),
        ({"packages": ("triton",)}, [], "pip install triton"),
        ({"packages": ("triton",)}, ["device=cpu"], None),
        ({"capability": (10, 0)}, [], "compute capability 10.0 or above; this one has 9.0"),
        ({"capability": (9, 0)}, [], None),
    ],
)
def test_rules_follow_from_an_entrys_needs_and_excludes(
    rules: dict[str, Any], settings: list[str], message: str | None
) -> None:
    entry = TechniqueEntry("recompute", "Recompute.", "bit-exact", **rules)
    given = recipe("techniques.recompute=true", *settings)
    if message is None:
        check_rules(given, HOPPER, [entry])
    else:
        with pytest.raises(RecipeError, match=r"techniques\.recompute = true") as caught:
            check_rules(given, HOPPER, [entry])
        assert message in str(caught.value)
    check_rules(given.with_settings(["techniques.recompute=false"]), CPU, [entry])


@pytest.mark.parametrize(
    ("rules", "settings", "value", "reason"),
    [
        ({}, [], None, ""),
        ({"takes": "it pays"}, [], "true", "it pays"),
        ({"takes": "it pays"}, ["techniques.compile=true"], None, ""),
        ({"needs": (Rule("loop.shuffle=false", "order matters"),)}, [], "false", "order matters"),
        ({"excludes": (Rule("loop.max_steps=null", "it never ends"),)}, [], "false", "it never ends"),
        ({"excludes": (Rule("loop.max_steps=null", "it never ends", only="asked"),)}, [], None, ""),
        ({"excludes": (Rule("parallel.strategy=fsdp", "shards"),)}, ["parallel.strategy=fsdp"], "false", "shards"),
        ({}, ["parallel.strategy=dp"], "false", "DataParallel copies the model"),
        ({"packages": ("triton",), "takes": "it pays"}, [], "false", "triton is not installed"),
        ({"capability": (10, 0), "takes": "it pays"}, [], "false", "compute capability 10.0 or above"),
    ],
)
def test_what_auto_does_follows_from_an_entry_too(
    rules: dict[str, Any], settings: list[str], value: str | None, reason: str
) -> None:
    entry = TechniqueEntry("compile", "Compile.", "up to rounding", auto="where it pays", **rules)
    decision = decision_of(entry, recipe("device=cuda", *settings), HOPPER)
    assert (decision.value if decision else None) == value
    assert decision is None or reason in decision.reason


def test_an_entry_is_one_line() -> None:
    entry = TechniqueEntry("recompute", "Recompute.", "bit-exact")
    assert entry.module == "paceline.techniques.recompute"
    assert entry.page == "docs/techniques/recompute.md"


@pytest.mark.parametrize(
    ("parallel", "rate", "value"),
    [
        ({"strategy": "ddp"}, 450e9, "192"),
        ({"strategy": "ddp"}, None, "25"),
        ({"strategy": "ddp", "bucket_mib": 60}, 450e9, None),
        ({"strategy": "fsdp"}, 450e9, None),
        ({}, 450e9, None),
    ],
    ids=["NVLink", "something else", "asked for", "shards", "left open"],
)
def test_gradients_are_summed_in_larger_pieces_over_faster_links(
    parallel: dict[str, Any], rate: float | None, value: str | None
) -> None:
    recipe = Recipe.parse({"model": {"config": {"model_type": "bert"}}, "data": {"source": "x"}, "parallel": parallel})
    asked: list[float | None] = []

    def link_rate() -> float | None:
        asked.append(rate)
        return rate

    decision = bucket_decision(recipe, link_rate)
    assert bool(asked) == (value is not None), "links are looked at where nothing follows from it"
    assert (decision.value if decision else None) == value
    if decision is not None:
        settled = recipe.with_settings([f"{decision.setting}={decision.value}"])
        assert settled.parallel.bucket_mib == int(decision.value)
        assert bucket_decision(settled, link_rate) is None


@pytest.mark.parametrize("strategy", ["fsdp", "dp"])
def test_a_size_of_buckets_is_refused_where_there_are_none(strategy: str) -> None:
    with pytest.raises(RecipeError, match="bucket_mib"):
        Recipe.parse(
            {
                "model": {"config": {"model_type": "bert"}},
                "data": {"source": "x"},
                "parallel": {"strategy": strategy, "bucket_mib": 25},
            }
        )
