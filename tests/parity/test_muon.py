"""Muon and AdamW as one optimizer are torch's two, each over its own parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.contract.errors import RecipeError
from paceline.machine.facts import this_machine
from paceline.optim.muon import MuonAndAdamW, hidden_weights
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.parts import OptimizerPart
from tests.parity.driving import assembled, assert_same_bits, recipe, train
from tests.parity.reference import tiny_model, train_by_hand
from tests.testing.tiny import tiny_resnet_config

RATE, DECAY = 1e-3, 0.01
MUON = {"type": "muon", "momentum": 0.95}


class Both(torch.optim.Optimizer):
    """torch's optimizers one after the other."""

    def __init__(self, *each: torch.optim.Optimizer) -> None:
        super().__init__([group for one in each for group in one.param_groups], {})
        self.each = each

    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for one in self.each:
                for own in one.param_groups:
                    if own["params"][0] is group["params"][0]:
                        own["lr"] = group["lr"]
        for one in self.each:
            one.step()


def two(model: nn.Module, lr: float = RATE) -> torch.optim.Optimizer:
    inside = {
        n for n, p in model.named_parameters() if p.ndim == 2 and "embeddings" not in n and n != "classifier.weight"
    }
    rest = [(n, p) for n, p in model.named_parameters() if n not in inside]
    groups = [
        {"params": [p for _, p in rest if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for _, p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    matrices = [p for n, p in model.named_parameters() if n in inside]
    settings = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw", "weight_decay": DECAY}
    return Both(torch.optim.Muon(matrices, lr=lr, **settings), torch.optim.AdamW(groups, lr=lr))


def test_a_run_equals_a_hand_written_loop_bit_for_bit() -> None:
    chosen = recipe(optimizer={**MUON, "decay_all": False, "clip_norm": None})
    ours, theirs = tiny_model(), tiny_model()
    losses = train(assembled(ours, chosen), chosen)
    assert losses == train_by_hand(theirs, make_optimizer=two, clip_norm=None)
    assert_same_bits(ours, theirs)
    plain = recipe(optimizer={"decay_all": False, "clip_norm": None})
    assert losses != train(assembled(tiny_model(), plain), plain)


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
def test_a_convolution_is_a_matrix_with_a_row_a_channel(memory: torch.memory_format) -> None:
    model = network().to(memory_format=memory)
    assert hidden_weights(model) == {"0.weight"}
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n == "0.weight") is hidden], "lr": 0.1, "hidden": hidden}
        for hidden in (True, False)
    ]
    optimizer = MuonAndAdamW([group | {"weight_decay": 0.0} for group in groups], OptimizerPart(**MUON))
    matrix = nn.Parameter(model[0].weight.detach().clone().reshape(4, -1))
    muon = torch.optim.Muon([matrix], lr=0.1, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    images = torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(images), torch.arange(5) % 3).backward()
        matrix.grad = model[0].weight.grad.reshape(4, -1).clone()
        optimizer.step()
        muon.step()
        # bf16 products round otherwise where columns are in another order
        torch.testing.assert_close(model[0].weight.reshape(4, -1), matrix, rtol=0, atol=2e-3)


def test_a_tied_embedding_is_not_hidden() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(5, 4), "inner": nn.Linear(4, 4), "out": nn.Linear(4, 5)})
    model["tied"] = nn.Linear(4, 5)
    model["tied"].weight = model["words"].weight
    model["last"] = nn.Linear(4, 2)
    assert hidden_weights(model) == {"inner.weight", "out.weight"}


def whole(**more: object) -> Recipe:
    return Recipe.parse(
        {
            "model": {"config": tiny_resnet_config()},
            "data": {
                "source": "builtin:random",
                "random": {"samples": 24, "image": (8, 8, 1)},
                "splits": {"validation": 8, "test": 0},
            },
            "optimizer": {**MUON, "lr": 1e-3},
            "schedule": {"type": "constant", "warmup": 0},
            "loop": {"epochs": 2, "batch_size": 6, "checkpoint_every": 2, "save_best": False},
            "device": "cpu",
            "observe": {"console": "off", "report": False},
            **more,
        }
    )


def test_a_run_that_goes_on_is_one_that_was_not_interrupted(tmp_path: Path) -> None:
    paceline.train(whole(), out=tmp_path / "straight")
    paceline.train(whole().with_settings(["loop.max_steps=2"]), out=tmp_path / "parts")
    paceline.resume(tmp_path / "parts", ["loop.max_steps=null"])
    one, other = (tmp_path / name / "model" / "model.safetensors" for name in ("straight", "parts"))
    assert one.read_bytes() == other.read_bytes()


def test_what_has_no_sense_beside_it_is_refused_before_anything_loads() -> None:
    with pytest.raises(RecipeError, match="a matrix is made orthogonal whole"):
        choose(whole().with_settings(["parallel.strategy=fsdp"]), this_machine(), 2)
    settings = ["techniques.precision=pure_bf16", "optimizer.rounding=kahan"]
    with pytest.raises(RecipeError, match="torch's Muon changes the weights itself"):
        choose(whole().with_settings(settings), this_machine())
