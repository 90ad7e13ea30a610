"""Query, key and value in one product are those of three, and so is every gradient."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import lookup_backend

from paceline.contract.errors import ModelError, RecipeError
from paceline.techniques import fused_qkv, packing
from paceline.techniques.compile import apply_compile
from paceline.techniques.fused_qkv import SharedProjection, apply_fused_qkv
from paceline.techniques.packing import apply_packing
from paceline.techniques.recompute import apply_recompute
from tests.parity.driving import assembled, recipe, train
from tests.parity.reference import padded, samples, tiny_model, train_by_hand

pytestmark = [
    # torch hides both while it compiles, in a way that turning warnings into errors defeats
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]

FAMILIES = ("bert", "roberta", "xlm-roberta", "electra", "camembert")


def made(kind: str) -> nn.Module:
    """A model of two layers, the same each time, its biases away from 0."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = AutoConfig.for_model(kind, vocab_size=120, num_labels=3, pad_token_id=0, **sizes, **drops)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_config(config).train()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, std=0.3)
    return model


def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    (model(**inputs).logits * torch.linspace(-1, 1, 3)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_gradient_is_that_of_three_products(kind: str, recomputed: bool) -> None:
    plain, fused = made(kind), made(kind)
    assert apply_fused_qkv(fused) == 2
    if recomputed:
        apply_recompute(list(fused.base_model.encoder.layer))
    inputs = padded(samples()[0][:6])
    one, other = gradients(plain, **inputs), gradients(fused, **inputs)
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_twenty_steps_with_dropout_have_the_losses_of_the_hand_written_loop() -> None:
    model, chosen = tiny_model(dropout=0.1), recipe()
    assert apply_fused_qkv(model) == 2
    by_hand = train_by_hand(
        tiny_model(dropout=0.1),
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01),
    )
    assert train(assembled(model, chosen), chosen) == pytest.approx(by_hand, rel=1e-4)


def test_one_product_is_computed_where_there_were_three() -> None:
    model = tiny_model()
    inputs = padded(samples()[0][:3])

    def products() -> int:
        with torch.autograd.profiler.profile() as profile:
            model(**inputs)
        return sum(event.count for event in profile.key_averages() if event.key == "aten::linear")

    before = products()
    apply_fused_qkv(model)
    assert before - products() == 2 * 2, "two products fewer in each of two layers"


def test_names_of_weights_and_other_models_are_left_alone() -> None:
    model, other = tiny_model(), tiny_model()
    names = list(model.state_dict())
    apply_fused_qkv(model)
    assert list(model.state_dict()) == names
    assert "forward" not in vars(other.distilbert.transformer.layer[0].attention)


def test_under_autocast_the_product_runs_in_bf16() -> None:
    plain, fused = tiny_model(dropout=0.0), tiny_model(dropout=0.0)
    apply_fused_qkv(fused)
    seen = []
    fused.distilbert.transformer.layer[0].attention.out_lin.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].dtype)
    )
    inputs = padded(samples()[0][:6])
    with torch.autocast("cpu", torch.bfloat16):
        one, other = plain(**inputs).logits, fused(**inputs).logits
    assert seen == [torch.bfloat16]
    torch.testing.assert_close(other, one, rtol=0.05, atol=0.01)


def test_nothing_of_a_pass_outlives_it() -> None:
    model = tiny_model()
    apply_fused_qkv(model)
    kept: list[weakref.ref[Tensor]] = []
    for layer in model.distilbert.transformer.layer:
        layer.attention.register_forward_pre_hook(lambda _, args: kept.append(weakref.ref(args[0])))
    gc.disable()  # reference counts alone must free it
    try:
        out = model(**padded(samples()[0][:3])).logits
        out.sum().backward()
        del out
        assert len(kept) == 2
        assert [tensor() for tensor in kept] == [None, None]
    finally:
        gc.enable()


def test_another_input_gets_a_product_of_its_own() -> None:
    linears = [nn.Linear(4, 3) for _ in range(3)]
    shared = SharedProjection(linears)
    hidden, elsewhere = torch.randn(2, 4), torch.randn(5, 4)
    assert torch.allclose(shared.project(0, hidden), linears[0](hidden))
    assert torch.allclose(shared.project(1, elsewhere), linears[1](elsewhere))
    assert torch.allclose(shared.project(2, hidden), linears[2](hidden))


class Attention(nn.Module):
    def __init__(self, **changes: nn.Module) -> None:
        super().__init__()
        for name in ("query", "key", "value"):
            setattr(self, name, changes.get(name, nn.Linear(4, 4)))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.query(hidden) + self.key(hidden) * self.value(hidden)


def test_key_and_value_may_be_narrower_than_the_query() -> None:
    narrow, wide = Attention(key=nn.Linear(4, 1), value=nn.Linear(4, 1)), torch.randn(3, 4)
    expected = narrow(wide)
    assert apply_fused_qkv(narrow) == 1
    torch.testing.assert_close(narrow(wide), expected)


class Adapted(nn.Linear):
    """As a library for adapters makes them."""


@pytest.mark.parametrize(
    "changes",
    [{"key": nn.Linear(5, 4)}, {"key": nn.Linear(4, 4, bias=False)}, {"key": Adapted(4, 4)}, {"key": nn.Identity()}],
    ids=["other width", "no bias", "subclass", "no product"],
)
def test_products_that_differ_are_left_alone(changes: dict[str, nn.Module]) -> None:
    assert apply_fused_qkv(Attention(**changes)) == 0


def test_a_forward_pass_that_calls_its_parents_is_left_alone() -> None:
    """``super()`` wants the module itself, and what stands in for it would be refused."""

    class Louder(Attention):
        def forward(self, hidden: Tensor) -> Tensor:
            return 2 * super().forward(hidden)

    layer, hidden = Louder(), torch.randn(2, 4)
    before = layer(hidden)
    assert apply_fused_qkv(layer) == 0
    assert torch.equal(layer(hidden), before)


def test_products_of_which_some_are_frozen_are_left_alone_and_all_frozen_are_not() -> None:
    some, every = Attention(), Attention()
    some.query.requires_grad_(False)
    every.requires_grad_(False)
    assert (apply_fused_qkv(some), apply_fused_qkv(every)) == (0, 1)
    assert not every(torch.randn(2, 4)).requires_grad


def test_where_there_is_nothing_to_join_auto_says_so_and_true_is_refused() -> None:
    build = assembled(tiny_model(), recipe()).build
    assert fused_qkv.apply(build, "auto").execution["fused_qkv"] == "2 layers"
    bare = replace(build, model=nn.Linear(2, 2))
    told = fused_qkv.apply(bare, "auto")
    assert told.decisions[-1].setting == "techniques.fused_qkv"
    assert told.decisions[-1].value == "false"
    assert told.execution["fused_qkv"].startswith("off: no attention layer")
    assert fused_qkv.apply(bare, False).execution["fused_qkv"] == "off"
    with pytest.raises(RecipeError, match=r"--set techniques\.fused_qkv=auto"):
        fused_qkv.apply(bare, True)


def test_modernbert_has_one_matrix_already() -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ids = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model("modernbert", vocab_size=120, **sizes, **ids)
    assert apply_fused_qkv(AutoModelForSequenceClassification.from_config(config)) == 0


# -- the joined product, straight into attention -----------------------------------------------------------------------

BOUNDS = (0, 5, 36, 38, 55, 64)


def packed_model(kind: str = "bert") -> nn.Module:
    model = tiny_model(dropout=0.0) if kind == "distilbert" else made(kind)
    apply_packing(model)
    return model


def packed_slopes(model: nn.Module, bounds: tuple[int, ...] = BOUNDS) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of a made-up packed row, and every gradient of a sum of them."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, 60, (1, bounds[-1]), generator=generator)
    place = (torch.arange(bounds[-1]) % 31)[None] + 1
    ends = torch.tensor(bounds, dtype=torch.int32)
    model.zero_grad()
    hidden = model.base_model(input_ids=ids, position_ids=place, cu_seq_lens_q=ends, max_length_q=31)[0]
    (hidden * torch.randn(hidden.shape, generator=generator)).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, slope in expected[1].items():
        # relative to the largest: the gradients of the keys' biases are zero but for rounding
        torch.testing.assert_close(found[1][name], slope, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the joined products that reach attention."""
    attend, seen = packing.varlen_attention_joined, []

    def seeing(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(qkv.shape)
        return attend(qkv, *args, **kwargs)

    monkeypatch.setattr(packing, "varlen_attention_joined", seeing)
    return seen


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["distilbert", *FAMILIES])
def test_attention_takes_the_product_as_it_is(kind: str, recomputed: bool, taken: list[torch.Size]) -> None:
    plain, fused = packed_model(kind), packed_model(kind)
    expected = packed_slopes(plain)
    assert not taken, "a layer of three products offered one"
    assert apply_fused_qkv(fused) == 2
    if recomputed:
        base = fused.base_model
        apply_recompute(list(base.transformer.layer if kind == "distilbert" else base.encoder.layer))
    assert_equal(packed_slopes(fused), expected)
    width = expected[0].shape[-1]
    assert [(shape[:2], shape[2] * shape[3]) for shape in taken] == [((64, 3), width)] * (4 if recomputed else 2)


def test_frozen_products_are_taken_too(taken: list[torch.Size]) -> None:
    plain, fused = packed_model(), packed_model()
    for model in (plain, fused):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("attention.self" not in name)
    assert apply_fused_qkv(fused) == 2
    assert_equal(packed_slopes(fused), packed_slopes(plain))
    assert len(taken) == 2


def test_under_autocast_the_joined_product_is_in_bf16(taken: list[torch.Size]) -> None:
    plain, fused = packed_model(), packed_model()
    apply_fused_qkv(fused)
    with torch.autocast("cpu", torch.bfloat16):
        (one, slopes), (other, joined) = packed_slopes(plain), packed_slopes(fused)
    assert len(taken) == 2
    torch.testing.assert_close(other, one, rtol=0.05, atol=0.05)
    norm = torch.stack([slope.norm() for slope in slopes.values()]).norm()
    assert torch.stack([(joined[name] - slopes[name]).norm() for name in slopes]).norm() < 0.02 * norm


@pytest.mark.parametrize(("noted", "recomputed"), [(True, False), (True, True), (False, False)])
def test_compiled_layers_go_by_the_note_and_stay_one_graph(noted: bool, recomputed: bool) -> None:
    plain, fused = packed_model(), packed_model()
    blocks = list(fused.base_model.encoder.layer)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append(graph.print_readable(print_output=False))  # with the graphs inside, which are recomputed
        return lookup_backend("aot_eager")(graph, example)

    apply_fused_qkv(fused)
    if noted:
        packed_slopes(fused)
    if recomputed:
        apply_recompute(blocks)
    apply_compile(blocks, backend=backend)
    torch._dynamo.reset()
    for bounds in (BOUNDS, (0, 31, 50), (0, 20, 31, 60, 77)):
        assert_equal(packed_slopes(fused, bounds), packed_slopes(plain, bounds))
    torch._dynamo.reset()
    assert len(graphs) == 1, "equal layers or other lengths were compiled by themselves"
    assert ("unflatten" in graphs[0]) is noted, graphs[0]


class Asking(nn.Module):
    """Gives what its products become to attention, which here only asks for the joined product."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.between = between

    def forward(self, hidden: Tensor) -> Tensor | None:
        states = [each(hidden).view(1, -1, 2, 4).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)]
        return self.joined(*self.between(self, hidden, *states))


def rotary(_: nn.Module, __: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    angle = torch.arange(query.shape[2])[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin

    return turned(query), turned(key), value


CHANGES = {
    "rotary": rotary,
    "norm": lambda _, __, q, k, v: (F.layer_norm(q, (4,)), F.layer_norm(k, (4,)), v),
    "scaled": lambda _, __, q, k, v: (q / 2, k, v),
    "contiguous": lambda _, __, q, k, v: (q, k, v.contiguous()),
    "swapped": lambda _, __, q, k, v: (k, q, v),
    "shifted": lambda _, __, q, k, v: (q, k, k),
    "another input": lambda self, hidden, q, k, v: (q, k, self.v_proj(2 * hidden).view(1, -1, 2, 4).transpose(1, 2)),
    "in training": lambda self, _, q, k, v: (F.dropout(q, 0.5, self.training), k, v),
    "grouped": lambda _, __, q, k, v: (q, k[:, :1], v[:, :1]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_comes_between_products_and_attention_is_seen(name: str) -> None:
    module = Asking(CHANGES[name]).train()
    assert apply_fused_qkv(module) == 1
    hidden = torch.randn(1, 5, 8)
    assert module(hidden) is None
    assert getattr(module, fused_qkv.NOTE) is False
    assert torch.compile(module, backend="eager", fullgraph=True)(hidden) is None
    torch._dynamo.reset()
    if name == "in training":
        assert module.eval()(hidden) is not None, "in evaluation there is nothing between"
        assert getattr(module, fused_qkv.NOTE) is False, "evaluation told a compiled training pass what to do"


def test_nothing_in_between_is_seen_and_said_to_a_compiled_pass() -> None:
    module, hidden = Asking(lambda _, __, *states: states), torch.randn(1, 5, 8)
    apply_fused_qkv(module)
    first, again = module(hidden), torch.compile(module, backend="eager", fullgraph=True)(hidden)
    torch._dynamo.reset()
    expected = torch.stack([each(hidden) for each in (module.q_proj, module.k_proj, module.v_proj)], 2)
    for found in (first, again):
        torch.testing.assert_close(found, expected.view(1, 5, 3, 2, 4))
    module.between = CHANGES["scaled"]
    module(hidden)
    assert getattr(module, fused_qkv.NOTE) is False, "a note is kept that is not true any more"


def notes(model: nn.Module) -> list[bool]:
    return [getattr(module, fused_qkv.NOTE) for module in model.modules() if hasattr(module, fused_qkv.NOTE)]


@pytest.mark.parametrize("training", [True, False])
def test_packed_builds_have_their_notes_and_are_else_as_before(training: bool) -> None:
    build = assembled(tiny_model(dropout=0.1), recipe(techniques={"packing": True})).build
    build.model.train(training).distilbert.eval()
    modes = [module.training for module in build.model.modules()]
    state = torch.random.get_rng_state()
    fused_qkv.apply(build, True)
    assert notes(build.model) == [True, True]
    assert [module.training for module in build.model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), state), "random numbers were drawn"


def test_padded_builds_need_no_notes() -> None:
    build = assembled(tiny_model(), recipe()).build
    called: list[int] = []
    fused_qkv.apply(replace(build, forward=lambda *_: called.append(1)), True)
    assert (notes(build.model), called) == ([False, False], [])


def test_twenty_packed_steps_have_the_losses_of_three_products(taken: list[torch.Size]) -> None:
    losses = []
    for fused in (False, True):
        chosen = recipe(techniques={"packing": True, "fused_qkv": fused})
        losses.append(train(assembled(tiny_model(dropout=0.0), chosen), chosen))
    assert len(taken) > 40, "attention was not given the joined products"
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_an_error_of_packing_names_the_layer_itself() -> None:
    model = packed_model()
    apply_fused_qkv(model)
    model.base_model.encoder.layer[0].attention.self.is_causal = True
    with pytest.raises(ModelError, match=r"^BertSelfAttention depends also on the order"):
        packed_slopes(model)
