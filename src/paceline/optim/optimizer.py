"""Parameter groups and the optimizer, from the recipe's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from paceline.contract.errors import RecipeError
from paceline.optim.low_bit import low_bit_optimizer
from paceline.optim.muon import MuonAndAdamW
from paceline.recipe.parts import OptimizerPart, SchedulePart
from paceline.recipe.parts.optimizer import LOW_BIT


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a learning rate, a weight decay and a schedule."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    lr: float
    weight_decay: float
    schedule: SchedulePart
    hidden: bool = False
    """Whether Muon updates them, where the recipe has it."""


def parameter_groups(
    named: Sequence[tuple[str, nn.Parameter]],
    part: OptimizerPart,
    schedule: SchedulePart,
    undecayed: frozenset[str] = frozenset(),
    factors: Mapping[str, float] = MappingProxyType({}),
    hidden: frozenset[str] = frozenset(),
) -> list[ParameterGroup]:
    """Trained parameters by the first recipe group whose pattern matches, then by rate, then by whether they decay.

    Biases and normalisation weights (fewer than two dimensions) do not decay unless ``decay_all``.

    Args:
        undecayed: names of weights that never decay.
        factors: name -> what the rate is multiplied by, where it is not 1. A recipe group's own rate stays as it is.
        hidden: names of the weights that are in groups of their own, for Muon.

    Raises:
        RecipeError: a group that matches no trained parameter, or none left to train.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not trained:
        raise RecipeError("model.train", "no parameter is trained", "--set model.train=all")
    taken: set[str] = set()
    groups = []
    for index, group in enumerate([*part.groups, None]):
        members = [(n, p) for n, p in trained if n not in taken and (group is None or fnmatchcase(n, group.match))]
        if group is not None and not members:
            raise RecipeError(
                f"optimizer.groups.{index}.match = {group.match!r}",
                "no trained parameter that is left has such a name",
                f"names look like {trained[0][0]!r}, {trained[-1][0]!r}",
            )
        taken |= {name for name, _ in members}
        lr = group.lr if group and group.lr is not None else part.lr
        decay = group.weight_decay if group and group.weight_decay is not None else part.decay
        own = group.schedule if group and group.schedule is not None else schedule
        label = group.match if group else "rest" if part.groups else "all"
        scaled = MappingProxyType({}) if group and group.lr is not None else factors
        for factor, alike in _by_factor(members, scaled):
            called = label if factor == 1 else f"{label} x {factor:.3g}"
            for name, chosen, weight_decay in _by_decay(called, alike, decay, part.decay_all, undecayed):
                for is_hidden, some in _by_layer(chosen, frozenset(p for n, p in alike if n in hidden)):
                    told = f"{name} (muon)" if is_hidden else name
                    groups.append(ParameterGroup(told, some, lr * factor, weight_decay, own, is_hidden))
    return groups


def build_optimizer(groups: Sequence[ParameterGroup], part: OptimizerPart, *, fused: bool) -> torch.optim.Optimizer:
    """The recipe's optimizer over the groups.

    Args:
        fused: torch's fused kernels, which take the learning rate, the clip factor and the gate from the device, and
            can be captured in a CUDA graph.

    Raises:
        RecipeError: as ``low_bit_optimizer``.
    """
    settings: list[dict[str, Any]] = [
        {"params": list(g.parameters), "lr": g.lr, "weight_decay": g.weight_decay} for g in groups
    ]
    if part.type in LOW_BIT:
        return low_bit_optimizer(settings, part)
    if part.type == "muon":
        hidden = [group | {"hidden": g.hidden} for group, g in zip(settings, groups, strict=True)]
        return MuonAndAdamW(hidden, part)
    if part.type == "sgd":
        sgd = torch.optim.SGD(
            settings, momentum=part.momentum, nesterov=part.nesterov, fused=fused, foreach=False if not fused else None
        )
        if fused and part.momentum:
            # the fused kernel leaves the buffer that it allocates unwritten when the very first step is skipped
            for parameter in (p for group in sgd.param_groups for p in group["params"]):
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    kind = torch.optim.AdamW if part.type == "adamw" else torch.optim.Adam
    foreach = None if fused else False
    return kind(settings, betas=part.betas, eps=part.eps, fused=fused, capturable=fused, foreach=foreach)


def _by_factor(
    members: Sequence[tuple[str, nn.Parameter]], factors: Mapping[str, float]
) -> list[tuple[float, list[tuple[str, nn.Parameter]]]]:
    """Members whose rates are multiplied by the same, the largest rate first; none for no members."""
    found: dict[float, list[tuple[str, nn.Parameter]]] = {}
    for member in members:
        found.setdefault(factors.get(member[0], 1.0), []).append(member)
    return sorted(found.items(), key=lambda one: -one[0])


def _by_layer(
    parameters: Sequence[nn.Parameter], hidden: frozenset[nn.Parameter]
) -> list[tuple[bool, tuple[nn.Parameter, ...]]]:
    """Those that are ``hidden``, and the others; neither where it is empty."""
    found = [(one, tuple(p for p in parameters if (p in hidden) is one)) for one in (True, False)]
    return [(one, some) for one, some in found if some]


def _by_decay(
    label: str,
    members: Sequence[tuple[str, nn.Parameter]],
    decay: float,
    decay_all: bool,
    undecayed: frozenset[str],
) -> list[tuple[str, list[nn.Parameter], float]]:
    def decays(name: str, parameter: nn.Parameter) -> bool:
        return name not in undecayed and (decay_all or parameter.ndim >= 2)

    if decay == 0 or all(decays(*member) for member in members):
        return [(label, [parameter for _, parameter in members], decay)] if members else []
    parts = [
        (label, [p for n, p in members if decays(n, p)], decay),
        (f"{label} (no decay)", [p for n, p in members if not decays(n, p)], 0.0),
    ]
    return [found for found in parts if found[1]]
