"""GroupNorm in place of batch norms over images: a sample is normalised by itself, in groups of its channels.

Shapes: C channels.
Source: Wu and He, Group Normalization, ECCV 2018, arXiv:1803.08494.
"""

from __future__ import annotations

import math

from torch import nn

from paceline.contract.errors import ModelError

SETTING = "model.group_norm"


def apply_group_norm(model: nn.Module, groups: int) -> list[str]:
    """Replace every ``BatchNorm2d`` of ``model`` by a ``GroupNorm`` with its weight, bias and eps, in place.

    Before an optimizer, a hook or a wrapper holds on to its layers. Running statistics are gone.

    Returns:
        The layers' names.

    Raises:
        ModelError: there is none, one has a forward pass of its own, or channels that the groups do not divide.
    """
    layers = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.BatchNorm2d)}
    kind = getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__
    what, leave = f"{SETTING} = {groups}", "leave it out"
    if not layers:
        raise ModelError(what, f"{kind} has no batch norm over images", leave)
    for name, layer in layers.items():
        if type(layer).forward is not nn.BatchNorm2d.forward:
            raise ModelError(what, f"{name} of {kind} is a {type(layer).__name__}, which does more than that", leave)
        if layer.num_features % groups:
            most = math.gcd(groups, *(each.num_features for each in layers.values()))
            fix = f"--set {SETTING}={most}, which divides the channels of every layer"
            raise ModelError(what, f"{name} of {kind} has {layer.num_features} channels, no multiple of it", fix)
    made = {layer: _made(layer, groups) for layer in layers.values()}
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made[layer])
    return list(layers)


def _made(layer: nn.BatchNorm2d, groups: int) -> nn.GroupNorm:
    found = nn.GroupNorm(groups, layer.num_features, eps=layer.eps, affine=False)
    # the same parameters: frozen stays frozen, and shared stays shared
    found.affine, found.weight, found.bias = layer.affine, layer.weight, layer.bias
    return found.train(layer.training)
