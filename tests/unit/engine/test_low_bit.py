"""AdamW with states of few bits: which library is taken, what is told of it, and that its states go on; by fakes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.machine.facts import Facts
from paceline.machine.gpus import facts_with, gpu_for
from paceline.optim.low_bit import CLASSES, PlannedLowBit, library_of
from paceline.optim.optimizer import build_optimizer, parameter_groups
from paceline.optim.updates import HostGated, build_updates
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.parts import OptimizerPart, SchedulePart
from tests.parity import driving
from tests.parity.reference import tiny_model
from tests.unit.test_choose import HOPPER, machine_with

CPU = torch.device("cpu")


class Narrow(torch.optim.Optimizer):
    """Sign descent with states as torchao has them: the rate is a tensor, and codes and scales are apart."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for group in self.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["lr"], Tensor), "the rate was put in another object's place"
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    codes = torch.zeros(parameter.numel(), dtype=torch.uint8)
                    state |= {"step": torch.tensor(0.0), "codes": codes, "scale": torch.zeros(1)}
                state["step"] += 1
                state["codes"] += 1
                state["scale"].fill_(parameter.grad.abs().mean())
                parameter -= group["lr"] * parameter.grad.sign() * state["step"]


def library(name: str, *classes: str) -> ModuleType:
    """A module ``<name>.optim`` that has these classes."""
    module = ModuleType(f"{name}.optim")
    for each in classes:
        setattr(module, each, type(each, (Narrow,), {"__module__": f"{name}.optim"}))
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has these libraries installed, and no others."""

    def put(**libraries: tuple[str, ...]) -> None:
        for name in ("bitsandbytes", "torchao"):
            there = name in libraries
            monkeypatch.setitem(sys.modules, name, ModuleType(name) if there else None)  # type: ignore[arg-type]
            module = library(name, *libraries[name]) if there else None
            monkeypatch.setitem(sys.modules, f"{name}.optim", module)  # type: ignore[arg-type]

    return put


ALL = tuple(CLASSES.values())


def made(**settings: Any) -> torch.optim.Optimizer:
    part = OptimizerPart(**settings)
    groups = parameter_groups(list(nn.Linear(3, 3).named_parameters()), part, SchedulePart())
    return build_optimizer(groups, part, fused=False)


def test_auto_takes_bitsandbytes_before_torchao_and_whichever_there_is(installed: Any) -> None:
    installed(bitsandbytes=("AdamW8bit",), torchao=ALL)
    assert library_of(made(type="adamw8bit"))["optimizer"].startswith("AdamW8bit of bitsandbytes")
    assert library_of(made(type="adamw8bit", low_bit="torchao"))["optimizer"].startswith("AdamW8bit of torchao")
    assert library_of(made(type="adamw4bit"))["optimizer"].startswith("AdamW4bit of torchao")
    installed(torchao=ALL)
    assert library_of(made(type="adamw8bit"))["optimizer"].startswith("AdamW8bit of torchao")
    assert library_of(made(type="adamwfp8"))["optimizer"].startswith("AdamWFp8 of torchao")
    assert library_of(torch.optim.AdamW([nn.Parameter(torch.ones(1))])) == {}


def test_a_library_that_is_missing_or_too_old_is_an_error_with_the_command(installed: Any) -> None:
    installed(bitsandbytes=("AdamW8bit",))
    with pytest.raises(RecipeError, match=r"pip install 'paceline\[torchao\]'"):
        made(type="adamw8bit", low_bit="torchao")
    installed(torchao=("AdamW8bit",))
    with pytest.raises(RecipeError, match="needs torchao, and it is not installed, or too old"):
        made(type="adamwfp8")
    installed()
    with pytest.raises(RecipeError, match="needs bitsandbytes or torchao, and neither is installed"):
        made(type="adamw8bit")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low_bit": "torchao"}, "low_bit: has no effect with type: adamw; it is of adamw8bit, adamw4bit, adamwfp8"),
        ({"type": "adamw4bit", "low_bit": "bitsandbytes"}, "bitsandbytes has no adamw4bit; low_bit=torchao has it"),
        ({"type": "adamwfp8", "momentum": 0.5}, "momentum: has no effect with type: adamwfp8"),
    ],
)
def test_what_has_no_effect_or_is_not_there_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.parse({"model": {"source": "any"}, "optimizer": settings})


ADA = machine_with("NVIDIA A100", (8, 0), torchao="0.18", bitsandbytes="0.49")


@pytest.mark.parametrize(
    ("facts", "settings", "message"),
    [
        (HOPPER, ["optimizer.type=adamw4bit"], r"needs torchao, and it is not installed[\s\S]*paceline\[torchao\]"),
        (ADA, ["optimizer.type=adamwfp8"], r"compute capability 8.9 or above; this one has 8.0"),
        (ADA, ["optimizer.type=adamw4bit", "device=cpu"], "run on GPUs only"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(facts: Facts, settings: list[str], message: str) -> None:
    plain = Recipe.parse({"model": {"source": "any"}, "data": {"source": "any.csv"}})
    with pytest.raises(RecipeError, match=message):
        choose(plain.with_settings(settings), facts)


@pytest.mark.parametrize("kind", ["adamw8bit", "adamw4bit", "adamwfp8"])
def test_shards_are_refused_and_a_plan_is_made_of_whatever_is_installed(kind: str) -> None:
    plain = Recipe.parse({"model": {"source": "any"}, "data": {"source": "any.csv"}, "optimizer": {"type": kind}})
    planned = facts_with([gpu_for("h200")] * 2, HOPPER)
    assert choose(plain, planned, 2)[0].optimizer.type == kind
    with pytest.raises(RecipeError, match="blocks that would cross shards"):
        choose(plain.with_settings(["parallel.strategy=fsdp"]), planned, 2)


def test_the_summary_says_which_library_ran_and_states_go_on(installed: Any) -> None:
    whole, second, third = tiny_model(), tiny_model(), tiny_model()  # transformers looks at what is installed
    installed(torchao=ALL)
    chosen = driving.recipe(optimizer={"type": "adamw4bit", "low_bit": "torchao"})
    run, resumed = driving.assembled(whole, chosen), driving.assembled(second, chosen)
    assert run.engine.execution["optimizer"].startswith("AdamW4bit of torchao")
    driving.train(run, chosen, 8)
    tensors, state = run.engine.state()
    assert any(name.endswith("codes") for name in tensors["optimizer"])
    saved = {stem: {name: tensor.clone() for name, tensor in named.items()} for stem, named in tensors.items()}
    driving.train(run, chosen, 4, first=8)
    resumed.engine.load(saved, state)
    driving.train(resumed, chosen, 4, first=8)
    driving.assert_same_bits(whole, second)
    plain = driving.recipe()
    assert "optimizer" not in driving.assembled(third, plain).engine.execution


def test_rates_are_put_into_the_librarys_own_tensor(installed: Any) -> None:
    installed(torchao=ALL)
    model, part = nn.Linear(2, 2, bias=False), OptimizerPart(type="adamw8bit", weight_decay=0.0)
    groups = parameter_groups(list(model.named_parameters()), part, SchedulePart())
    updates, gradients = build_updates(groups, part, np.array([[0.0], [0.5]]), CPU)
    assert isinstance(updates, HostGated)
    before = model.weight.detach().clone()
    model.weight.grad.fill_(1.0)
    yes = torch.tensor(True)
    updates.apply(gradients, torch.ones(()), yes)
    assert torch.equal(model.weight, before), "the first rate is 0"
    updates.apply(gradients, torch.ones(()), torch.tensor(False))
    assert torch.equal(model.weight, before)
    updates.apply(gradients, torch.ones(()), yes)
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * 2)


@pytest.mark.parametrize(("bits", "expected"), [(8, 2 * (8192 + 4 * 32)), (4, 2 * (4096 + 4 * 64))])
def test_a_planned_state_has_the_librarys_size(bits: int, expected: int) -> None:
    large, small = nn.Parameter(torch.zeros(64, 128)), nn.Parameter(torch.zeros(100))
    optimizer = PlannedLowBit([{"params": [large, small]}], bits)
    optimizer.step()
    optimizer.step()

    def size(parameter: nn.Parameter) -> int:
        return sum(t.numel() * t.element_size() for t in optimizer.state[parameter].values())

    assert size(large) == expected
    assert size(small) == 2 * 400
