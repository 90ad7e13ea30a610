"""Gradients of embeddings: those of torch, whatever else is done to the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from paceline.contract.errors import RecipeError
from paceline.techniques import embedding_gradient
from paceline.techniques.compile import apply_compile, embeddings_of, takes_embeddings
from paceline.techniques.embedding_gradient import apply_embedding_gradient
from tests.parity.driving import assembled, recipe, train
from tests.parity.reference import padded, samples, tiny_model, train_by_hand
from tests.parity.test_fused_qkv import FAMILIES, gradients, made


def assert_same_gradients(plain: nn.Module, ours: nn.Module) -> None:
    inputs = padded(samples()[0][:6])
    one, other = gradients(plain, **inputs), gradients(ours, **inputs)
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_gradient_is_torchs(kind: str) -> None:
    ours = made(kind)
    assert apply_embedding_gradient(ours) == 2, "tokens and positions; of token types there are two"
    assert_same_gradients(made(kind), ours)


def test_twenty_steps_have_the_losses_of_the_hand_written_loop() -> None:
    model, chosen = tiny_model(), recipe()
    assert apply_embedding_gradient(model) == 1
    by_hand = train_by_hand(
        tiny_model(), make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01)
    )
    assert train(assembled(model, chosen), chosen) == pytest.approx(by_hand, rel=1e-6)


# torch's compiler makes one of the class itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_embeddings_have_the_same_gradients() -> None:
    ours = tiny_model(dropout=0.0).train()
    assert apply_embedding_gradient(ours) == 1
    apply_compile([], embeddings_of(ours, list(ours.distilbert.transformer.layer)), backend="aot_eager")
    assert_same_gradients(tiny_model(dropout=0.0).train(), ours)


def test_what_is_not_plain_is_left_alone() -> None:
    class Own(nn.Embedding):
        pass

    frozen = nn.Embedding(80, 4)
    frozen.weight.requires_grad_(False)
    left = [
        frozen,
        Own(80, 4),
        nn.Embedding(8, 4),
        nn.Embedding(80, 4, max_norm=1.0),
        nn.Embedding(80, 4, sparse=True),
        nn.Embedding(80, 4, scale_grad_by_freq=True),
    ]
    model = nn.ModuleList([*left, nn.Embedding(80, 4)])
    assert apply_embedding_gradient(model) == 1
    assert apply_embedding_gradient(model) == 0, "once is enough"
    assert not any("forward" in vars(module) for module in left)


def test_a_model_without_any_is_refused() -> None:
    run = assembled(tiny_model(), recipe())
    for module in run.build.model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)
    with pytest.raises(RecipeError) as found:
        embedding_gradient.apply(run.build, True, compiled=False)
    why = "trains no plain embedding of 64 rows or more"
    assert why in str(found.value)
    left = embedding_gradient.apply(run.build, "auto", compiled=False)
    assert why in left.decisions[-1].reason
    assert "embedding_gradient" not in left.execution


@pytest.mark.parametrize("compiled", [True, False])
def test_where_it_is_open_compiled_embeddings_are_left_to_their_compiler(compiled: bool) -> None:
    build = assembled(tiny_model(), recipe()).build
    found = embedding_gradient.apply(build, "auto", compiled=compiled)
    assert found.decisions[-1].setting == "techniques.embedding_gradient"
    assert found.decisions[-1].value == ("false" if compiled else "true")
    assert found.execution.get("embedding_gradient") == (None if compiled else "1 table")


def test_bare_embeddings_are_not_compiled_with_the_blocks() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(80, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    build = assembled(tiny_model(), recipe()).build
    assert takes_embeddings(build)
    bare = Bare()
    assert not takes_embeddings(replace(build, model=bare, blocks=list(bare.blocks)))
