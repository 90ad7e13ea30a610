import pytest
import torch
from torch import nn

from paceline.contract.errors import RecipeError
from paceline.optim.optimizer import build_optimizer, parameter_groups
from paceline.recipe.parts import GroupPart, OptimizerPart, SchedulePart


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "head": nn.Linear(2, 2)})


def groups(part: OptimizerPart, chosen: nn.Module | None = None):
    return parameter_groups(list((chosen or model()).named_parameters()), part, SchedulePart())


def test_biases_and_normalisation_do_not_decay() -> None:
    found = groups(OptimizerPart(weight_decay=0.1))
    assert [(g.name, g.weight_decay, [p.ndim for p in g.parameters]) for g in found] == [
        ("all", 0.1, [2, 2]),
        ("all (no decay)", 0.0, [1, 1, 1, 1]),
    ]


@pytest.mark.parametrize(("kind", "expected"), [("adamw", 0.01), ("adamw8bit", 0.01), ("adam", 0.0), ("sgd", 0.0)])
def test_only_decoupled_optimizers_decay_unasked(kind: str, expected: float) -> None:
    """L2 in the gradient, as adam and sgd have it, is another thing than AdamW's decay."""
    assert max(g.weight_decay for g in groups(OptimizerPart(type=kind))) == expected
    assert max(g.weight_decay for g in groups(OptimizerPart(type=kind, weight_decay=0.3))) == 0.3


def test_decay_all_makes_one_group() -> None:
    assert [g.weight_decay for g in groups(OptimizerPart(weight_decay=0.1, decay_all=True))] == [0.1]


def test_the_first_matching_group_takes_a_parameter_and_every_parameter_is_in_one() -> None:
    constant = SchedulePart(type="constant", warmup=0)
    part = OptimizerPart(
        lr=1e-3,
        weight_decay=0.0,
        groups=(GroupPart(match="head.*", lr=1e-2, schedule=constant), GroupPart(match="*bias", lr=2e-3)),
    )
    chosen = model()
    found = groups(part, chosen)
    assert [(g.name, g.lr, len(g.parameters)) for g in found] == [
        ("head.*", 1e-2, 2),
        ("*bias", 2e-3, 2),
        ("rest", 1e-3, 2),
    ]
    assert found[0].schedule is constant
    assert sorted(id(p) for g in found for p in g.parameters) == sorted(id(p) for p in chosen.parameters())


def test_a_group_has_a_weight_decay_of_its_own_also_of_zero() -> None:
    matched = (GroupPart(match="head.*", weight_decay=0.5), GroupPart(match="body.0.*", weight_decay=0.0))
    found = groups(OptimizerPart(weight_decay=0.1, decay_all=True, groups=matched))
    assert [(g.name, g.weight_decay) for g in found] == [("head.*", 0.5), ("body.0.*", 0.0), ("rest", 0.1)]
    optimizer = build_optimizer(found, OptimizerPart(), fused=False)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0, 0.1]


def test_a_group_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"groups\.0\.match = 'classifier\*'"):
        groups(OptimizerPart(groups=(GroupPart(match="classifier*"),)))


def test_frozen_parameters_are_in_no_group() -> None:
    chosen = model()
    chosen["body"].requires_grad_(False)
    assert sum(len(g.parameters) for g in groups(OptimizerPart(), chosen)) == 2
    chosen.requires_grad_(False)
    with pytest.raises(RecipeError, match="no parameter is trained"):
        groups(OptimizerPart(), chosen)


@pytest.mark.parametrize(
    ("kind", "expected"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_the_recipes_optimizer(kind: str, expected: type) -> None:
    part = OptimizerPart(type=kind)
    assert type(build_optimizer(groups(part), part, fused=False)) is expected


def test_eight_bit_without_its_packages_names_the_command(monkeypatch) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    part = OptimizerPart(type="adamw8bit")
    with pytest.raises(RecipeError, match="pip install"):
        build_optimizer(groups(part), part, fused=False)
