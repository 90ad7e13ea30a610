"""``parallel``: what can be written, what ``auto`` makes of it, and what is refused before anything is started."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from paceline.contract.errors import RecipeError
from paceline.machine.facts import Facts, Gpu
from paceline.recipe import Recipe
from paceline.recipe.choose import STATES_SHARE, choose, choose_strategy, with_smallest_gpu
from paceline.recipe.recipe import is_execution

CPU = Facts(python="3.11.7", platform="Linux", cpu_model=None, cpu_count=2, memory_bytes=None)
GIB = 2**30


def gpus(number: int, memory_gib: int | None = 80) -> Facts:
    memory = None if memory_gib is None else memory_gib * GIB
    gpu = Gpu(name="NVIDIA H100", compute_capability=(9, 0), driver="580.95.05", memory_bytes=memory)
    versions = {"torch": "2.11.0", "triton": "3.6.0", "torchao": "0.15.0"}
    return replace(CPU, gpus=(gpu,) * number, versions=versions, torch_cuda="13.0")


def recipe(*settings: str) -> Recipe:
    plain: dict[str, Any] = {"model": {"source": "some-model"}, "data": {"source": "some.csv"}}
    return Recipe.parse(plain).with_settings(settings)


def test_a_run_goes_on_with_other_settings_and_they_run_again_as_written() -> None:
    for name in ("strategy", "backend", "reduce_dtype", "shard_size", "offload", "tensor"):
        assert is_execution(f"parallel.{name}"), f"parallel.{name} would be refused on resume"
    given = recipe("parallel.strategy=fsdp", "parallel.shard_size=2", "parallel.reduce_dtype=bf16")
    assert Recipe.parse(yaml.safe_load(given.to_yaml())).resolved() == given.resolved()


@pytest.mark.parametrize("settings", [(), ("parallel.strategy=ddp",), ("parallel.strategy=fsdp",)])
@pytest.mark.parametrize("facts", [CPU, gpus(1)])
def test_one_process_shares_nothing(settings: tuple[str, ...], facts: Facts) -> None:
    shards = ("parallel.backend=gloo", "parallel.reduce_dtype=bf16", "parallel.shard_size=2", "parallel.offload=true")
    more = shards if settings == ("parallel.strategy=fsdp",) else ()
    chosen, decisions = choose(recipe(*settings, *more), facts)
    assert chosen.parallel == recipe().parallel
    taken = {decision.setting: decision.reason for decision in decisions if decision.setting.startswith("parallel")}
    assert taken == {
        setting.partition("=")[0]: "one process has nobody to share with" for setting in (*settings, *more)
    }
    assert choose(chosen, facts) == (chosen, ())


@pytest.mark.parametrize(
    ("settings", "facts", "strategy"),
    [
        ((), CPU, "ddp"),
        (("parallel.shard_size=2",), CPU, "fsdp"),
        (("parallel.strategy=fsdp",), CPU, "fsdp"),
        (("parallel.offload=true",), gpus(4), "fsdp"),
        ((), gpus(4), "auto"),
        (("model.train=features",), CPU, "auto"),
    ],
)
def test_several_processes_share_as_set_or_as_is_plain(settings: tuple[str, ...], facts: Facts, strategy: str) -> None:
    chosen, decisions = choose(recipe(*settings), facts, 4)
    assert chosen.parallel.strategy == strategy
    assert choose(chosen, facts, world_size=4) == (chosen, ())
    if strategy == "fsdp" and facts is not CPU:
        reasons = {decision.setting: decision.reason for decision in decisions}
        assert "the host waits" in reasons["techniques.capture"], "shards in main memory"
        assert chosen.techniques.capture is chosen.techniques.channels_last is False
        assert chosen.techniques.packing == "auto"


@pytest.mark.parametrize(
    ("settings", "facts", "num_parameters", "num_trained", "strategy", "reason"),
    [
        ((), gpus(4), 3 * 10**9, 3 * 10**9, "ddp", "take 44.7 GiB, at most 70% of the smallest GPU's 80 GiB"),
        ((), gpus(4), 4 * 10**9, 4 * 10**9, "fsdp", "take 59.6 GiB, more than 70% of the smallest GPU's 80 GiB"),
        ((), gpus(4), 4 * 10**9, 10**6, "ddp", "take 14.9 GiB"),
        (("optimizer.type=sgd",), gpus(4), 4 * 10**9, 4 * 10**9, "ddp", "take 44.7 GiB"),
        (("techniques.precision=pure_bf16",), gpus(4), 4 * 10**9, 4 * 10**9, "ddp", "take 29.8 GiB"),
        ((), gpus(4, None), 10**11, 10**11, "ddp", "the memory of the GPUs is not known"),
    ],
)
def test_a_model_that_does_not_fit_a_gpu_is_sharded(
    settings: tuple[str, ...], facts: Facts, num_parameters: int, num_trained: int, strategy: str, reason: str
) -> None:
    sizes = {"num_parameters": num_parameters, "num_trained": num_trained}
    first, before = choose(recipe(*settings), facts, 4)
    chosen, decisions = choose_strategy(first, before, facts, 4, **sizes)
    found = {decision.setting: decision for decision in decisions}
    assert len(found) == len(decisions), "a setting is decided twice"
    assert found["parallel.strategy"].value == chosen.parallel.strategy == strategy
    assert reason in found["parallel.strategy"].reason
    assert chosen.techniques.capture is True, "steps are captured under either"
    assert choose_strategy(chosen, decisions, facts, 4, **sizes) == (chosen, decisions)
    assert choose(chosen, facts, 4)[0] == chosen


def test_machines_with_other_gpus_choose_alike() -> None:
    sizes = {"num_parameters": 3 * 10**9, "num_trained": 3 * 10**9}
    both = (gpus(2, 80), gpus(1, 24))
    alone, together = [], []
    for machine in both:
        first, before = choose(recipe(), machine, 3)
        alone.append(choose_strategy(first, before, machine, 3, **sizes))
        seen = with_smallest_gpu(machine, [80 * GIB, None, 24 * GIB])
        together.append(choose_strategy(first, before, seen, 3, **sizes))
    assert [chosen.parallel.strategy for chosen, _ in alone] == ["ddp", "fsdp"], "there is nothing to agree on"
    assert together[0] == together[1]
    (decision,) = (each for each in together[0][1] if each.setting == "parallel.strategy")
    assert decision.value == "fsdp"
    assert decision.reason.endswith("more than 70% of the smallest GPU's 24 GiB")
    assert with_smallest_gpu(gpus(1, None), [None, None]) == gpus(1, None)


def test_sixteen_bytes_a_parameter_with_adamw() -> None:
    """The bound itself, to the parameter."""
    first, before = choose(recipe(), gpus(2, 16), 2)
    most = int(STATES_SHARE * 16 * GIB / 16)
    for number, strategy in ((most, "ddp"), (most + 1, "fsdp")):
        chosen, _ = choose_strategy(first, before, gpus(2, 16), 2, num_parameters=number, num_trained=number)
        assert chosen.parallel.strategy == strategy


@pytest.mark.parametrize(
    ("settings", "facts", "world_size", "message"),
    [
        (("parallel.strategy=ddp", "parallel.shard_size=2"), CPU, 4, "shard_size: has no effect with strategy: ddp"),
        (("parallel.strategy=dp", "parallel.offload=true"), CPU, 1, "offload: has no effect with strategy: dp"),
        (("parallel.strategy=dp", "parallel.reduce_dtype=bf16"), CPU, 1, "--set parallel.strategy=ddp"),
        (("parallel.shard_size=1",), CPU, 4, "greater than or equal to 2"),
        (("parallel.shard_size=3",), CPU, 4, "there are 4 processes, which are no whole number of groups of 3"),
        (("parallel.shard_size=8",), CPU, 4, "no whole number of groups of 8"),
        (("parallel.strategy=zero",), CPU, 4, "parallel.strategy = 'zero'"),
        (("parallel.offload=true",), CPU, 4, "whose memory the weights are in already"),
        (("parallel.backend=nccl",), CPU, 2, "moves data between GPUs, and this run is on the cpu"),
        (("loop.batch_size=3",), CPU, 4, "loop.batch_size = 3: 4 processes"),
        (("loop.batch_size=3",), gpus(4), 4, "--set loop.batch_size=4, or start 3 processes or fewer"),
        (("loop.batch_size=1",), CPU, 2, "--set loop.batch_size=2, or start 1 process"),
        (
            ("parallel.offload=true", "techniques.capture=true"),
            gpus(4),
            4,
            "parallel.offload other than none",
        ),
        (("parallel.strategy=fsdp", "techniques.channels_last=true"), gpus(4), 4, "techniques.channels_last"),
        (("parallel.strategy=fsdp", "optimizer.type=adamw8bit"), gpus(4), 4, "optimizer.type = adamw8bit"),
        (("parallel.strategy=fsdp", "model.train=features"), CPU, 4, "model.train = features"),
        (("parallel.strategy=ddp", "model.train=features"), CPU, 4, "model.train = features"),
        (("parallel.strategy=dp",), CPU, 1, "needs device = cuda (now device = cpu)"),
        (("parallel.strategy=dp",), gpus(1), 1, "one is visible to this process"),
        (("parallel.strategy=dp",), gpus(4), 4, "it is one process with several GPUs, and there are 4 processes"),
        *(
            (("parallel.strategy=dp", f"techniques.{name}=true"), gpus(2), 1, f"cannot work with techniques.{name}")
            for name in (
                *("packing", "fully_connected", "fused_qkv", "fusion"),
                *("recompute", "compile", "capture"),
            )
        ),
        (
            ("parallel.strategy=dp", "techniques.embedding_gradient=true"),
            gpus(2),
            1,
            "cannot work with parallel.strategy = dp: DataParallel copies the model",
        ),
    ],
)
def test_what_cannot_work_is_refused(settings: tuple[str, ...], facts: Facts, world_size: int, message: str) -> None:
    with pytest.raises(RecipeError) as found:
        choose(recipe(*settings), facts, world_size)
    assert message in str(found.value)


def test_what_was_asked_for_is_not_taken_back_for_a_model_that_is_too_large() -> None:
    first, before = choose(recipe("techniques.channels_last=true"), gpus(4), 4)
    with pytest.raises(RecipeError, match=r"parallel\.strategy = fsdp\n.*cannot work with techniques\.channels_last"):
        choose_strategy(first, before, gpus(4), 4, num_parameters=10**10, num_trained=10**10)


def test_dp_is_eager_and_padded() -> None:
    chosen, decisions = choose(recipe("parallel.strategy=dp"), gpus(2))
    reasons = {decision.setting: decision.reason for decision in decisions if decision.value == "false"}
    for name in ("packing", "fused_qkv", "fusion", "compile", "capture"):
        assert getattr(chosen.techniques, name) is False
        assert reasons[f"techniques.{name}"]
    assert choose(chosen, gpus(2)) == (chosen, ())


# -- tensor ------------------------------------------------------------------------------------------------------------


def test_one_process_shares_no_block() -> None:
    chosen, decisions = choose(recipe("parallel.tensor=2"), CPU)
    assert chosen.parallel.tensor == 1
    assert ("parallel.tensor", "1") in {(decision.setting, decision.value) for decision in decisions}


def test_ranks_that_share_blocks_are_beside_ddp_and_auto_leaves_off_what_needs_whole_blocks() -> None:
    # at 80 GiB auto would have shards of this one's model
    chosen, decisions = choose(recipe("parallel.tensor=2", "techniques.precision=bf16"), gpus(4), 4)
    assert (chosen.parallel.strategy, chosen.parallel.tensor) == ("ddp", 2)
    why = {decision.setting: decision.reason for decision in decisions}
    for name in ("early_pooling", "fused_qkv", "fusion", "compile", "capture"):
        assert getattr(chosen.techniques, name) is False, name
        assert "block" in why[f"techniques.{name}"] or "attention layer" in why[f"techniques.{name}"]
    assert chosen.techniques.packing == "auto"
    assert choose(chosen, gpus(4), 4) == (chosen, ())


@pytest.mark.parametrize(
    ("settings", "world_size", "words"),
    [
        ((), 3, "3 processes, which are no whole number of groups of 2.*parallel.tensor=3, or start 2 processes"),
        (("parallel.strategy=fsdp",), 4, "cannot work with parallel.strategy = fsdp"),
        (
            ("parallel.strategy=deepspeed",),
            4,
            r"cannot work with parallel\.tensor other than 1.*parallel.strategy=auto",
        ),
        (
            ("parallel.pipeline=2",),
            4,
            "parallel.pipeline = 2.*cannot work with parallel.tensor other than 1.*know one cut of a tensor.*"
            "--set parallel.pipeline=1",
        ),
        (("techniques.compile=true",), 2, "cannot work with techniques.compile = true: processes meet inside"),
        (("techniques.fused_qkv=true",), 2, "cannot work with techniques.fused_qkv = true"),
        (("model.train=features",), 2, "no step is made"),
        (("loop.batch_size=2",), 8, "8 processes in groups of 2.*loop.batch_size=4, or start 4 processes or fewer"),
    ],
)
def test_what_cannot_be_beside_shared_blocks_is_refused(settings: Any, world_size: int, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        choose(recipe("parallel.tensor=2", *settings), CPU, world_size)
    assert re.search(words, str(caught.value), re.DOTALL), caught.value


def test_a_batch_is_split_over_groups_not_processes() -> None:
    chosen, _ = choose(recipe("parallel.tensor=2", "loop.batch_size=2"), CPU, 4)
    assert chosen.loop.batch_size == 2
