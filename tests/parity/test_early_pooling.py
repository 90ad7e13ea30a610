"""A last block of one position a text gives the logits and every gradient of a whole one; others are found out."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.compare import rounding
from paceline.contract.errors import ModelError, RecipeError
from paceline.models.structure import blocks
from paceline.seams import Batch, Build, LayoutKind
from paceline.techniques import early_pooling, packing
from paceline.techniques.compile import apply_compile
from paceline.techniques.early_pooling import apply_early_pooling, difference
from paceline.techniques.fused_qkv import apply_fused_qkv
from paceline.techniques.recompute import apply_recompute
from tests.parity.driving import assembled, recipe, train
from tests.parity.reference import tiny_model
from tests.parity.test_packing import IDS, made, magnifying, model_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

FAMILIES = ("distilbert", "bert", "roberta", "xlm-roberta", "electra")


def packed_build(model: Any, kind: str = "classification", **settings: Any) -> Build:
    """A packed build of this model, as it stands when early pooling comes to it."""
    build, layout = made(model, kind, **settings)
    packed = {"layout_kind": LayoutKind.PACKED, "execution": {"layout": "packed"}}
    found = tuple(block for _, block in blocks(model))
    return replace(build, layout=layout, forward=packing.apply_packing(model), blocks=found, **packed)


def slopes(build: Build, batch: Batch) -> dict[str, Tensor]:
    """Logits and every gradient, of a sum in the model's own number format."""
    build.model.zero_grad(set_to_none=True)
    logits = build.forward(build.model, batch)
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum().backward()
    found = {name: p.grad.clone() for name, p in build.model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys(), "other parameters have gradients"
    norm = torch.stack([value.norm() for value in expected.values()]).norm()
    apart = {name: float((found[name] - expected[name]).norm() / norm) for name in expected}
    wrong = {name: f"{value:.1e}" for name, value in apart.items() if not value <= tolerance}
    assert not wrong, f"early and late pooling differ: {wrong}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_is_that_of_a_whole_last_block(family: str) -> None:
    build = packed_build(model_of(family).double())
    batch = build.layout.collate(IDS)
    expected = slopes(build, batch)
    apply_early_pooling(build.model, build.blocks[-1])
    assert_equal(slopes(build, batch), expected, 1e-14)


def test_rounding_is_told_from_a_difference_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "TOLERANCES", {("cpu", torch.float32): 0.0})  # fp32 never tells
    for seed in range(8):
        build = packed_build(magnifying(seed))
        assert difference(build, IDS) is None, f"seed {seed}"
        assert not hasattr(build.model, packing.POOLS_EARLY)


@pytest.mark.parametrize("trains", [False, True], ids=["an evaluation", "a step"])
@pytest.mark.parametrize("also", ["alone", "with joined products"])
def test_a_pass_leaves_nothing_to_the_garbage_collector(also: str, trains: bool) -> None:
    """Else the rows of several batches lie in a GPU's memory until it comes."""
    build = packed_build(model_of("bert"))
    apply_early_pooling(build.model, build.blocks[-1])
    if also != "alone":
        apply_fused_qkv(build.model)
    batch = build.layout.collate(IDS)
    seen: list[weakref.ref[Tensor]] = []
    for block in build.blocks:
        block.register_forward_hook(lambda _block, _args, out: seen.append(weakref.ref(packing.hidden_of(out))))
    build.model.train(trains)
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(trains):
            logits = build.forward(build.model, batch)
            if trains:
                torch.autograd.grad(logits.sum(), [p for p in build.model.parameters() if p.requires_grad])
        del logits
        left = sum(each() is not None for each in seen)
    finally:
        gc.enable()
    assert len(seen) == len(build.blocks)
    assert left == 0, f"of {len(seen)} blocks' results {left} are still there"


def test_comparing_leaves_no_copy_to_the_garbage_collector() -> None:
    """Else the steps' memory lies around it."""
    model = tiny_model(dropout=0.0)
    mine = {id(parameter) for parameter in model.parameters()}
    gc.collect()
    before = {id(parameter) for parameter in _alive()} - mine
    gc.disable()
    try:
        run = assembled(model, recipe(techniques={"packing": True, "early_pooling": True}))
        left = [tuple(parameter.shape) for parameter in _alive() if id(parameter) not in mine | before]
    finally:
        gc.enable()
    assert run.build.execution["early_pooling"] == "the last block"
    assert not left, f"copies of {left} are still there"


def _alive() -> list[nn.Parameter]:
    return [thing for thing in gc.get_objects() if type(thing) is nn.Parameter]


@pytest.mark.parametrize("kind", ["multi_label", "regression"])
def test_in_every_task_and_in_pairs(kind: str) -> None:
    build = packed_build(model_of("bert", 1 if kind == "regression" else 3), kind, pairs=True)
    batch = build.layout.collate(IDS)
    expected = slopes(build, batch)
    apply_early_pooling(build.model, build.blocks[-1])
    assert_equal(slopes(build, batch), expected, 2e-6)


@pytest.mark.parametrize("lengths", [(1,) * 8, (40, *(1,) * 7), (64,) * 8], ids=["ones", "one long", "no filler"])
def test_texts_of_one_token_and_rows_without_filler(lengths: tuple[int, ...]) -> None:
    model = model_of("distilbert").double()
    build = packed_build(model, lengths=lengths)
    batch = build.layout.collate(IDS)
    expected = slopes(build, batch)
    apply_early_pooling(model, build.blocks[-1])
    assert_equal(slopes(build, batch), expected, 1e-14)


def test_the_last_block_computes_one_position_a_sequence() -> None:
    build = packed_build(model_of("bert"))
    batch = build.layout.collate(IDS)
    assert batch.packed is not None
    seen: list[tuple[str, tuple[int, ...]]] = []
    for name, module in build.model.named_modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda _m, _a, out, n=name: seen.append((n, tuple(out.shape))))
    apply_early_pooling(build.model, build.blocks[-1])
    build.forward(build.model, batch)
    row, sequences = batch.inputs["input_ids"].shape[1], batch.packed.cu_seqlens.numel() - 1
    assert sequences < row / 4, "the batch shows nothing"
    widths = {name: shape[1] for name, shape in seen if ".layer." in name}
    assert {width for name, width in widths.items() if ".layer.0." in name} == {row}
    assert {width for name, width in widths.items() if ".layer.1." in name} == {sequences}


def test_padded_batches_names_and_copies_are_as_before() -> None:
    build = packed_build(model_of("roberta"))
    padded, _ = made(build.model)
    before, names = slopes(padded, padded.layout.collate(IDS)), list(build.model.state_dict())
    apply_early_pooling(build.model, build.blocks[-1])
    assert_equal(slopes(padded, padded.layout.collate(IDS)), before, 0)
    assert list(build.model.state_dict()) == names
    batch = build.layout.collate(IDS)
    expected = slopes(build, batch)
    other = replace(build, model=copy.deepcopy(build.model))
    for parameter in build.model.parameters():
        parameter.data.zero_()
    assert_equal(slopes(other, batch), expected, 0)


def test_twenty_steps_stay_with_those_of_a_whole_block() -> None:
    losses = []
    for early in (False, True):
        chosen = recipe(techniques={"packing": True, "early_pooling": early})
        run = assembled(tiny_model(dropout=0.0), chosen)
        assert run.build.execution["early_pooling"] == ("the last block" if early else "off")
        losses.append(train(run, chosen))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("also", ["fused_qkv", "recompute", pytest.param("compile", marks=pytest.mark.slow), "all"])
def test_it_composes(also: str) -> None:
    build = packed_build(model_of("bert").train())
    batch = build.layout.collate(IDS)
    expected = slopes(build, batch)
    apply_early_pooling(build.model, build.blocks[-1])
    if also in ("fused_qkv", "all"):
        # the last layer's products are no longer three of one input
        assert apply_fused_qkv(build.model) == 1
        build.forward(build.model, batch)
    if also in ("recompute", "all"):
        apply_recompute(build.blocks)
    if also in ("compile", "all"):
        apply_compile(build.blocks, backend="aot_eager")
    try:
        assert_equal(slopes(build, batch), expected, 2e-6)
    finally:
        torch._dynamo.reset()


def test_blocks_of_all_lengths_are_two_compilations() -> None:
    build = packed_build(model_of("distilbert").train(), lengths=(5, 31, 2, 17, 3, 40, 23, 9, 60, 11))
    apply_early_pooling(build.model, build.blocks[-1])
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module

    apply_compile(build.blocks, backend=backend)
    try:
        for ids in (IDS, IDS[:3], IDS[2:], IDS[:5]):
            build.forward(build.model, build.layout.collate(ids)).sum().backward()
    finally:
        torch._dynamo.reset()
    assert len(graphs) == 2, f"{len(graphs)} graphs: the whole block and the short one should be all"


# -- who may have it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("modernbert", "has no attention with three products"),
        ("modernbert-mean", "reads every position"),
    ],
)
def test_other_models_keep_their_last_block(family: str, reason: str) -> None:
    build = packed_build(model_of(family))
    found = early_pooling.apply(build, "auto", IDS)
    assert reason in found.execution["early_pooling"]
    assert found.execution["early_pooling"].startswith("off: ")
    assert (found.decisions[-1].setting, found.decisions[-1].value) == ("techniques.early_pooling", "false")
    with pytest.raises(RecipeError, match=r"techniques\.early_pooling = true"):
        early_pooling.apply(build, True, IDS)


def test_padded_batches_are_left_alone() -> None:
    build, _ = made(model_of("bert"))
    assert (
        early_pooling.apply(build, "auto", IDS).execution["early_pooling"].startswith("off: it is for texts in packed")
    )
    assert early_pooling.apply(build, False, IDS).execution["early_pooling"] == "off"


PLANTED: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm before attention": lambda hidden: F.layer_norm(hidden, hidden.shape[-1:]),
    "a copy": torch.clone,
}


@pytest.mark.parametrize("name", PLANTED)
def test_an_attention_that_is_given_something_else_is_refused(name: str) -> None:
    build = packed_build(model_of("bert"))
    build.blocks[-1].attention.self.register_forward_pre_hook(lambda _, given: (PLANTED[name](given[0]), *given[1:]))
    reason = difference(build, IDS)
    assert reason is not None
    assert "is not given what its block is given" in reason


def test_products_that_change_before_attention_are_refused() -> None:
    """Also where only training does it, which no comparison of numbers without dropout can see."""
    from transformers.models.bert.modeling_bert import BertSelfAttention

    class Dropping(BertSelfAttention):
        def forward(self, *arguments: Any, **kwargs: Any) -> Any:
            from transformers import AttentionInterface

            plain = AttentionInterface()[packing.NAME]

            def dropping(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Any:
                return plain(module, F.dropout(q, 0.5, module.training), k, v, *rest, **more)

            AttentionInterface.register(packing.NAME, dropping)
            try:
                return BertSelfAttention.forward(self, *arguments, **kwargs)
            finally:
                AttentionInterface.register(packing.NAME, plain)

    build = packed_build(model_of("bert").eval())
    attention = build.blocks[-1].attention
    last = Dropping(build.model.config, layer_idx=1)
    last.load_state_dict(attention.self.state_dict())
    attention.self = last
    reason = difference(build, IDS)
    assert reason is not None
    assert "changes its products before attention" in reason


def test_values_that_are_not_the_third_product_differ_in_numbers() -> None:
    build = packed_build(model_of("bert"))
    attention = build.blocks[-1].attention.self
    attention.key, attention.value = attention.value, attention.key
    # the class reads the names, and so do we: swapped layers are swapped for both
    assert difference(build, IDS) is None
    attention.value.register_forward_hook(lambda _m, _a, out: out + 1)
    reason = difference(build, IDS)
    assert reason is not None
    assert "early pooled" in reason


def test_a_block_that_is_passed_twice_or_not_last_is_left_alone() -> None:
    build = packed_build(model_of("bert"))
    encoder = build.model.bert.encoder
    first = replace(build, blocks=build.blocks[:1])
    assert "something comes after its last block" in str(difference(first, IDS))
    encoder.layer = nn.ModuleList([build.blocks[0], build.blocks[0]])
    twice = replace(build, blocks=(build.blocks[0],))
    assert "passed more than once" in str(difference(twice, IDS))


@pytest.mark.parametrize("training", [True, False])
def test_the_question_leaves_no_trace(training: bool) -> None:
    build = packed_build(model_of("bert").train(training))
    batch, state = build.layout.collate(IDS), torch.random.get_rng_state()
    modes = [module.training for module in build.model.modules()]
    assert difference(build, IDS) is None
    assert torch.equal(torch.random.get_rng_state(), state), "random numbers were drawn"
    assert [module.training for module in build.model.modules()] == modes
    assert not [module for module in build.model.modules() if "forward" in vars(module)]
    assert all(p.grad is None for p in build.model.parameters())
    assert batch.packed is not None
    assert not hasattr(build.model, packing.POOLS_EARLY)


def test_a_block_without_such_an_attention_is_an_error() -> None:
    with pytest.raises(ModelError, match="has no attention with products"):
        apply_early_pooling(nn.Linear(2, 2), nn.Linear(2, 2))
