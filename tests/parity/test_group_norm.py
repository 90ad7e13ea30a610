"""GroupNorm in place of batch norms is the network that somebody would write with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from paceline.contract.errors import ModelError, RecipeError
from paceline.machine.facts import this_machine
from paceline.models.group_norm import apply_group_norm
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from tests.testing.tiny import tiny_resnet_config


def network(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    def made(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels, eps=1e-3) if norm is nn.BatchNorm2d else nn.GroupNorm(4, channels, eps=1e-3)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3), made(8), nn.ReLU(), nn.Sequential(nn.Conv2d(8, 12, 3), made(12)), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3)),
        )


def trained(model: nn.Module) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(5):
        images, labels = torch.randn(6, 3, 8, 8, generator=generator), torch.randint(3, (6,), generator=generator)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_five_steps_are_those_of_a_network_written_with_group_norms() -> None:
    ours, by_hand = network(), network(nn.GroupNorm)
    weights = [ours[1].weight, ours[3][1].bias]
    assert apply_group_norm(ours, 4) == ["1", "3.1"]
    assert [ours[1].weight, ours[3][1].bias] == weights, "the optimizer's parameters are others"
    assert trained(ours) == trained(by_hand)
    assert all(map(torch.equal, ours.state_dict().values(), by_hand.state_dict().values()))
    assert ours.state_dict().keys() == by_hand.state_dict().keys()


def test_a_layer_is_one_layer_under_all_its_names() -> None:
    shared = nn.BatchNorm2d(4).requires_grad_(False)
    model = nn.ModuleDict({"one": shared, "other": shared})
    apply_group_norm(model, 2)
    assert model["one"] is model["other"]
    assert not model["one"].weight.requires_grad


class _Own(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_what_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(ModelError, match=r"3\.1 of Sequential has 12 channels(.|\n)*--set model\.group_norm=4,"):
        apply_group_norm(network(), 8)
    with pytest.raises(ModelError, match="Linear has no batch norm over images"):
        apply_group_norm(nn.Linear(2, 2), 2)
    with pytest.raises(ModelError, match="0 of Sequential is a _Own"):
        apply_group_norm(nn.Sequential(_Own(4)), 2)


def whole(**more: object) -> Recipe:
    return Recipe.parse(
        {
            "model": {"config": tiny_resnet_config(), "group_norm": 4},
            "data": {
                "source": "builtin:random",
                "random": {"samples": 20, "image": (8, 8, 1)},
                "splits": {"validation": 8, "test": 0},
            },
            "loop": {"epochs": 2, "batch_size": 4},
            "device": "cpu",
            "observe": {"console": "off", "report": False},
            **more,
        }
    )


def test_a_saved_run_is_evaluated_with_its_group_norms(tmp_path: Path) -> None:
    record = paceline.train(whole(), out=tmp_path / "run")
    assert any("plain transformers" in text for text in record.notices), record.notices
    saved = tmp_path / "run" / "model"
    assert not any("running" in name for name in load_file(saved / "model.safetensors"))
    assert json.loads((saved / "paceline.json").read_text())["group_norm"] == 4
    again = paceline.evaluate(tmp_path / "run", split="validation")
    assert again.loss == pytest.approx(record.final["validation"]["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("setting", "why"),
    [("model.train=head", "nothing would train"), ("parallel.sync_batch_norm=true", "no batch norm is left")],
)
def test_what_has_no_sense_beside_it_is_refused_before_anything_loads(setting: str, why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        choose(whole().with_settings([setting]), this_machine(), 2)
