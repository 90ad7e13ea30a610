"""LoRA beside plain peft in a plain loop: the same adapters and head after twenty steps, alone and with the rest."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.contract.errors import RecipeError
from paceline.models.adapters import merged
from paceline.models.structure import head_names, linear_layers
from paceline.prepare.assemble import assemble, assemble_build
from paceline.seams import Alone, Mesh, World
from paceline.techniques import lora
from paceline.techniques.lora import apply_lora
from tests.distributed import splitting
from tests.parity.driving import PLAIN, assembled, dataset, recipe, train
from tests.parity.reference import STEPS, padded, samples, tiny_model, train_by_hand
from tests.testing.distributed import run_distributed

SEED, HEAD = 5, ("pre_classifier", "classifier")
SETTINGS = {"rank": 4, "alpha": 8}

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


def adapted(dropout: float = 0.1, **settings: Any) -> nn.Module:
    """The tiny model with adapters beside all linear layers of its blocks."""
    model = tiny_model(dropout)
    torch.manual_seed(SEED)
    apply_lora(model, linear_layers(model), head_names(model), **SETTINGS, **settings)
    return model


def by_peft(dropout: float = 0.1, **settings: Any) -> nn.Module:
    """The same by peft's own front door."""
    from peft import LoraConfig, get_peft_model

    names = ["q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"]
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=names,
        modules_to_save=list(HEAD),
        lora_dropout=settings.get("dropout", 0.0),
        use_dora=settings.get("dora", False),
    )
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers', about what peft asks it
        return get_peft_model(tiny_model(dropout), config)


def furthest(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference between weights, by the names of peft's model."""
    named = ours.state_dict()
    found = {}
    for name, tensor in theirs.state_dict().items():
        if "original_module" not in name:
            plain = name.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
            found[name] = (named[plain] - tensor).abs().max().item()
    assert len(found) == len(named), "the models have other weights"
    return max(found.values())


def by_hand(model: nn.Module, **more: Any) -> list[float]:
    return train_by_hand(
        model,
        make_optimizer=lambda m: torch.optim.AdamW(
            [p for p in m.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01
        ),
        **more,
    )


@pytest.mark.parametrize("settings", [{}, {"dropout": 0.2}, {"dora": True}], ids=["lora", "dropout", "dora"])
def test_weights_are_those_of_plain_peft(settings: dict[str, Any]) -> None:
    chosen = recipe(loop={"micro_batch_size": 4})
    ours, theirs = adapted(**settings), by_peft(**settings)
    assert furthest(ours, theirs) == 0, "they begin with other weights"
    losses = train(assembled(ours, chosen), chosen)
    assert losses == pytest.approx(by_hand(theirs, micro_batch_size=4), abs=1e-6)
    assert furthest(ours, theirs) < 1e-6
    assert furthest(adapted(**settings), ours) > 1e-3, "nothing was learned"


TOGETHER = {
    "packed": {"packing": True, "early_pooling": True},
    "recomputed": {"recompute": True},
    "compiled": {"packing": True, "early_pooling": True, "compile": True},
}


@pytest.mark.parametrize(
    ("name", "dora"),
    [
        ("packed", False),
        ("packed", True),
        ("recomputed", False),
        ("recomputed", True),
        pytest.param("compiled", False, marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_plain_peft_beside_other_techniques(
    name: str, dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.techniques import compile as technique

    plainly = technique.apply_compile
    monkeypatch.setattr(technique, "apply_compile", lambda blocks, *_, **__: plainly(blocks, backend="aot_eager"))
    chosen = recipe(techniques=TOGETHER[name], loop={"micro_batch_size": 4})
    ours, theirs = adapted(dropout=0.0, dora=dora), by_peft(dropout=0.0, dora=dora)
    run = assembled(ours, chosen)
    train(run, chosen, steps=6)
    by_hand(theirs, micro_batch_size=4, steps=6, total_steps=STEPS)
    assert furthest(ours, theirs) < 2e-5
    assert furthest(adapted(dora=dora), ours) > 1e-3, "nothing was learned"
    if "early_pooling" in TOGETHER[name]:
        assert run.build.execution["early_pooling"] == "the last block"


def test_bf16_is_peft_under_autocast() -> None:
    chosen = recipe(techniques={"precision": "bf16"})
    ours, theirs = adapted(), by_peft()
    train(assembled(ours, chosen), chosen)
    by_hand(theirs, wrap=lambda: torch.autocast("cpu", torch.bfloat16))
    assert furthest(ours, theirs) < 1e-6


def test_joined_products_step_aside_and_say_why() -> None:
    chosen = recipe(techniques={"fused_qkv": "auto"})
    run = assembled(adapted(), chosen)
    (decision,) = [found for found in run.build.decisions if found.setting == "techniques.fused_qkv"]
    assert (decision.value, "adapters" in decision.reason) == ("false", True)
    with pytest.raises(RecipeError, match="adapters stand beside"):
        assembled(adapted(), recipe(techniques={"fused_qkv": True}))
    elsewhere = tiny_model()
    apply_lora(elsewhere, ["lin1"], HEAD)
    assert assembled(elsewhere, chosen).build.execution["fused_qkv"] == "2 layers"


def test_adapters_and_head_alone_have_gradients_and_states() -> None:
    chosen, model = recipe(), adapted()
    run = assembled(model, chosen)
    train(run, chosen, steps=1)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".lora_")[0] for name in trained if ".lora_" in name} == set(linear_layers(tiny_model()))
    assert {name.partition(".")[0] for name in trained if ".lora_" not in name} == set(HEAD)
    held = sum(p.numel() for name, p in model.named_parameters() if name in trained)
    states = [tensor for name, tensor in run.engine.state()[0]["optimizer"].items() if "exp_avg" in name]
    assert sum(tensor.numel() for tensor in states) == 2 * held
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_adopt_takes_a_model_with_adapters() -> None:
    ours, theirs = adapted(dropout=0.0), by_peft(dropout=0.0)
    texts, labels = samples()
    batch = {**padded(texts[:8]), "labels": torch.from_numpy(labels[:8])}
    optimizer, plain = (
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2) for model in (ours, theirs)
    )
    engine = paceline.adopt(ours, optimizer, lambda model, b: model(**b).loss * 8)
    for _ in range(3):
        engine.accumulate([batch], denominator=8)
        engine.update()
        plain.zero_grad()
        theirs(**batch).loss.backward()
        plain.step()
    assert furthest(ours, theirs) < 1e-6


def trained(world: World, techniques: dict[str, Any], strategy: str, dora: bool) -> dict[str, torch.Tensor]:
    """All weights after six steps in fp64, and those that would be saved merged; on the first rank alone."""
    chosen = recipe(techniques={**PLAIN, **techniques}, parallel={"strategy": strategy}, loop={"micro_batch_size": 2})
    model, data, mesh = adapted(dropout=0.0, dora=dora).double(), dataset(), Mesh.over(world)
    build = assemble_build(
        chosen,
        model,
        data,
        splitting.Exact(),
        torch.device("cpu"),
        blocks=list(model.distilbert.transformer.layer),
        normalisation=((), ()),
        mesh=mesh,
    )
    run = assemble(chosen, build, STEPS, mesh=mesh)
    splitting.train(run, chosen, world, 6)
    whole = run.engine.whole()
    added = {f"merged {name}": tensor for name, tensor in merged(model, whole).items()} if whole else {}
    return {name: tensor.detach().clone() for name, tensor in (*whole.items(), *added.items())}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("techniques", "dora"),
    [({}, False), ({"packing": True, "early_pooling": True, "recompute": True}, True)],
    ids=["padded", "packed-dora"],
)
def test_two_ranks_learn_what_one_does(strategy: str, techniques: dict[str, Any], dora: bool) -> None:
    expected = trained(Alone(), techniques, "auto", dora)
    found = run_distributed(trained, 2, techniques, strategy, dora)[0]
    assert found.keys() == expected.keys()
    far = {name: (tensor - expected[name]).abs().max().item() for name, tensor in found.items()}
    assert max(far.values()) < 1e-9, f"the furthest: {max(far, key=lambda name: far[name])}"


def test_without_peft_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(lora.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError) as caught:
        apply_lora(tiny_model(), ["q_lin"])
    assert caught.value.fix == "pip install 'paceline[lora]'"


def test_the_example_of_its_card_runs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/techniques/lora.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "apply_lora" in block]
    texts, labels = samples()
    loader = [{**padded(texts[:4]), "labels": torch.from_numpy(labels[:4])}] * 2
    model = tiny_model(dropout=0.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exec(code, {"model": model, "loader": loader})
    after = model.state_dict()
    kept = [name for name in before if name in after and torch.equal(before[name], after[name])]
    assert "distilbert.embeddings.word_embeddings.weight" in kept
    assert "classifier.weight" not in kept
