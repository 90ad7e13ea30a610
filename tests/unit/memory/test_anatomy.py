"""From a trace to what a GPU shows: parts that add up, workspaces, names and kinds. Traces here are made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.contract.records import MemoryPlan
from paceline.machine.facts import Gpu
from paceline.memory.anatomy import constants_for, kind_of, plan_of
from paceline.memory.expandable import DEFAULT, ExpandableAllocator
from paceline.memory.ledger import Allocation
from paceline.memory.subject import Subject
from paceline.memory.trace import Trace

GPU = Gpu(name="NVIDIA H200", memory_bytes=143771 * 2**20, compute_capability=(9, 0))
WORKSPACES = constants_for(GPU).workspaces[0]
DATASET = cast(Any, SimpleNamespace(notices=("a class of a single row",)))
SUBJECT = Subject(cast(Any, None), (), None, DATASET, ("texts of 8 tokens",))
KI, MI = 2**10, 2**20


def made(num_bytes: int, phase: str = "forward", operator: str = "", name: str = "", **more: Any) -> Any:
    computes = phase in ("forward", "backward", "update", "evaluation")
    operator = operator or ("aten.mm.default" if computes else "aten.empty.memory_format")
    place = more.get("pool", DEFAULT), name, more.get("stream", 0), more.get("beside", False)
    return Allocation(num_bytes, operator, phase, *place)


def plan(allocations: Sequence[Allocation], events: Sequence[int | None], **more: Any) -> MemoryPlan:
    rest = {"execution": {}, "decisions": (), "samples": 4, "slots": 32, "attention": ()}
    trace = Trace(allocations=allocations, events=events, num_parameters=10, num_trained=5, **{**rest, **more})
    return plan_of(trace, SUBJECT, GPU)


def at_random(seed: int) -> tuple[list[Allocation], list[int | None]]:
    draw = random.Random(seed)
    allocations, events, alive = list[Allocation](), list[int | None](), list[int]()
    for phase in ("model", "preparation", "optimizer", "batch", "forward", "backward", "update", "evaluation"):
        for _ in range(draw.randrange(1, 40)):
            if alive and draw.random() < 0.45:
                events.append(~alive.pop(draw.randrange(len(alive))))
            elif draw.random() < 0.05:
                events.append(None)
            else:
                name = draw.choice(["", "", "", "parameters", "gradients", "workspaces"])
                pool = draw.choice([DEFAULT, DEFAULT, "graphs"])
                stream = draw.choice([0, 0, "gathers"])
                more = {"pool": pool, "stream": stream, "beside": draw.random() < 0.3}
                allocations.append(made(draw.randrange(1, 30 * MI), phase, name=name, **more))
                events.append(len(allocations) - 1)
                alive.append(len(allocations) - 1)
    return allocations, events


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_to_what_is_allocated(seed: int) -> None:
    found = plan(*at_random(seed))
    assert sum(found.parts.values()) == found.allocated
    assert sum(found.activations.values()) == found.parts.get("activations", 0)
    assert found.allocated <= found.reserved
    assert found.phases[found.moment] == found.allocated == max(found.phases.values())
    assert all(size > 0 for size in (*found.parts.values(), *found.activations.values()))
    for sizes in (found.parts, found.activations):
        assert list(sizes.values()) == sorted(sizes.values(), reverse=True), "largest first"


def test_memory_of_one_stream_is_not_anothers() -> None:
    one, other = (
        plan([made(30 * MI, "model"), made(30 * MI, "model", stream=s)], [0, ~0, 1, ~1]) for s in (0, "gathers")
    )
    assert one.allocated == other.allocated
    assert other.reserved == 2 * one.reserved


@pytest.mark.parametrize("seed", range(5))
def test_the_peak_is_that_of_the_allocator_alone(seed: int) -> None:
    allocations, events = at_random(seed)
    allocator, blocks, computing = ExpandableAllocator(), dict[int, Any](), set[Any]()
    for event in events:
        if event is None:
            allocator.empty_cache()
            continue
        this = allocations[max(event, ~event)]
        if this.operator == "aten.mm.default" and (this.pool, this.beside) not in computing:
            computing.add((this.pool, this.beside))
            allocator.allocate(constants_for(GPU).workspaces[this.beside], this.pool, this.stream)
        if event >= 0:
            blocks[event] = allocator.allocate(this.num_bytes, this.pool, this.stream)
        else:
            allocator.free(blocks.pop(~event))
    found = plan(allocations, events)
    assert (found.allocated, found.reserved) == (allocator.peak_allocated, allocator.peak_reserved)


def test_each_threads_workspace_is_there_from_its_first_product_on_and_once() -> None:
    model = [made(MI, "model", name="parameters")]
    assert plan(model, [0]).parts == {"parameters": MI}
    steps = [*model, made(KI), made(KI), made(KI, "backward", beside=True), made(KI, "update")]
    assert plan(steps[:3], [0, 1, 2, ~2, ~1]).parts["workspaces"] == WORKSPACES
    found = plan(steps, [0, 1, 2, 3, 4, ~4, ~3, ~2, ~1])
    assert found.parts["workspaces"] == sum(constants_for(GPU).workspaces)
    assert found.phases["model"] == MI, "not before"
    assert found.context == constants_for(GPU).context, "which is beside the allocator's"
    assert found.total == found.reserved + found.context


def test_an_operators_own_workspace_is_added_to_them() -> None:
    found = plan([made(MI), made(3 * MI, "backward", name="workspaces")], [0, 1, ~1, ~0])
    assert found.moment == "backward"
    assert found.parts["workspaces"] == WORKSPACES + 3 * MI
    assert found.parts["activations"] == MI


def test_what_is_given_back_lowers_what_is_reserved_after_it() -> None:
    big = [made(100 * MI), made(50 * MI), made(50 * MI, pool="graphs")]
    kept = plan(big, [0, ~0, 1, 2])
    emptied = plan(big, [0, ~0, None, 1, 2])
    assert kept.reserved - emptied.reserved == 40 * MI, "the pages that the 50 MiB do not need"
    assert kept.allocated == emptied.allocated


def test_sizes_are_rounded_up_and_the_rest_is_a_part() -> None:
    found = plan([made(1), made(513)], [0, 1])
    assert found.parts["activations"] == 514
    assert found.parts["rounding"] == 512 - 1 + 1024 - 513 + WORKSPACES_ROUNDED - WORKSPACES


WORKSPACES_ROUNDED = -(-WORKSPACES // 512) * 512


@pytest.mark.parametrize(
    ("phase", "named", "freed", "part"),
    [
        ("model", "parameters", False, "parameters"),
        ("model", "", False, "buffers"),
        ("model", "", True, "passing"),
        ("preparation", "", False, "data"),
        ("preparation", "", True, "passing"),
        ("optimizer", "", False, "optimizer states"),
        ("optimizer", "", True, "passing"),
        ("optimizer", "gradients", False, "gradients"),
        ("batch", "", False, "batch"),
        ("batch", "", True, "batch"),
        ("forward", "", True, "activations"),
        ("forward", "", False, "activations"),
        ("backward", "", True, "passing"),
        ("backward", "gradients", False, "gradients"),
        ("update", "", True, "passing"),
        ("update", "", False, "optimizer states"),
        ("evaluation", "", True, "activations"),
    ],
)
def test_what_an_allocation_counts_as(phase: str, named: str, freed: bool, part: str) -> None:
    found = plan([made(5 * MI, phase, name=named)], [0, ~0] if freed else [0])
    assert found.parts[part] == 5 * MI, found.parts
    assert set(found.parts) - {part} <= {"workspaces", "rounding"}, found.parts
    assert found.moment == phase


KINDS = {
    "aten._scaled_dot_product_flash_attention.default": "attention",
    "aten._scaled_dot_product_efficient_attention.default": "attention",
    "aten._scaled_dot_product_cudnn_attention.default": "attention",
    "paceline.flash_varlen_joined.default": "attention",
    "paceline.short_attention.default": "attention",
    "aten._softmax.default": "attention",
    "aten.bmm.default": "attention",
    "aten.native_layer_norm.default": "norms",
    "aten.native_batch_norm.default": "norms",
    "aten.cudnn_batch_norm.default": "norms",
    "paceline.residual_norm.default": "norms",
    "aten.gelu.default": "activation functions",
    "aten.relu.default": "activation functions",
    "aten.silu.default": "activation functions",
    "paceline.bias_gelu.default": "activation functions",
    "aten.native_dropout.default": "dropout",
    "aten.embedding.default": "embeddings",
    "aten.convolution.default": "convolutions",
    "aten.cudnn_convolution.default": "convolutions",
    "aten.max_pool2d_with_indices.default": "pooling",
    "aten._adaptive_avg_pool2d.default": "pooling",
    "aten.mm.default": "linear layers",
    "aten.addmm.default": "linear layers",
    "aten.linear.default": "linear layers",
    "aten.add.Tensor": "sums",
    "aten.mul.Tensor": "sums",
    "aten.div.Scalar": "sums",
    "aten._to_copy.default": "number formats and copies",
    "aten.clone.default": "number formats and copies",
    "aten.cat.default": "number formats and copies",
    "aten.index_select.default": "number formats and copies",
    "aten.full.default": "other",
    "aten.where.self": "other",
    "": "other",
}


@pytest.mark.parametrize(("operator", "kind"), KINDS.items())
def test_the_kind_of_layer_of_an_operator(operator: str, kind: str) -> None:
    assert kind_of(operator) == kind


def test_casts_of_compiled_code_are_no_convolutions() -> None:
    assert kind_of("prims.convert_element_type.default") == "number formats and copies"


def test_activations_by_kind_are_those_alive_at_the_peak() -> None:
    steps = [made(MI, operator="aten.gelu.default"), made(2 * MI), made(3 * MI, operator="aten.add.Tensor")]
    found = plan([*steps, made(7 * MI, "update")], [0, 1, ~1, 2, 3])
    assert found.moment == "update"
    assert found.activations == {"sums": 3 * MI, "activation functions": MI}


def test_a_plan_says_what_it_takes_for_granted() -> None:
    texts, attention, constants = plan([made(1)], [0], attention=("flash", "math")).assumed
    assert texts == "texts of 8 tokens"
    assert attention == "attention by flash and math"
    assert constants.startswith("context and workspaces: measured on an H200")
    assert plan([made(1)], [0], execution={"attention": "short"}).assumed[1] == "attention by short"
    assert plan([made(1)], [0], execution={"attention": "flash"}, attention=("cudnn", "flash")).assumed[1] == (
        "attention by flash and cudnn"
    )
    assert len(plan([made(1)], [0]).assumed) == 2, "no attention, nothing of it"
    assert plan([made(1)], [0]).notices == ("a class of a single row",), "as they are told of the data"


def test_constants_of_a_gpu_that_was_not_measured_are_its_generations() -> None:
    def named(name: str, have: tuple[int, int] | None) -> str:
        return constants_for(Gpu(name=name, memory_bytes=2**34, compute_capability=have)).source

    measured = named("NVIDIA H200", (9, 0))
    assert measured.startswith("measured on an H200")
    later = f"not measured on this GPU: those {measured}"
    assert later == named("NVIDIA H100 80GB HBM3", (9, 0)) == named("NVIDIA B200", (10, 0))
    older = named("Tesla V100-SXM2-32GB", (7, 0))
    assert older == named("a GPU of 24 GiB", None) == named("NVIDIA A100-SXM4-80GB", (8, 0))
    assert older.startswith("not measured")
