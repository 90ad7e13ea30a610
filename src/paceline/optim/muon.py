"""Muon for the matrices of hidden layers, AdamW for all else, as one optimizer.

An update of Muon's is the momentum made nearly orthogonal, so that no direction of a matrix is favoured. torch's own
``torch.optim.Muon`` does it, on matrices alone: of a convolution the weight is seen as one row an output channel. Steps
are as large as AdamW's (``match_rms_adamw``), so that one learning rate serves both.

Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is Scalable for
LLM Training, 2025, arXiv:2502.16982 (the size of a step).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.recipe.parts import OptimizerPart

_OF_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def hidden_weights(model: nn.Module) -> frozenset[str]:
    """Names of the weights that are Muon's: of linear layers and convolutions, without the last linear layer, which is
    the head. A weight that another kind of layer has too, such as an embedding, is not among them."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    head = next((m for m in reversed(list(model.modules())) if isinstance(m, nn.Linear)), None)
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and all(isinstance(m, _OF_LAYERS) and m is not head for m in owners[parameter])
    )


@final
class MuonAndAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` for some groups, ``torch.optim.AdamW`` for the others; states are named as theirs.

    Args:
        groups: as of every optimizer of torch's, with ``lr`` and ``weight_decay``; ``hidden`` in those that are Muon's.
        part: momentum and Nesterov of Muon, betas and eps of AdamW.

    Example:
        >>> names = hidden_weights(model)
        >>> of = lambda hidden: [p for n, p in model.named_parameters() if (n in names) is hidden]
        >>> groups = [{"params": of(h), "lr": 1e-3, "weight_decay": 0.01, "hidden": h} for h in (True, False)]
        >>> optimizer = MuonAndAdamW(groups, OptimizerPart(type="muon", momentum=0.95))
    """

    def __init__(self, groups: list[dict[str, Any]], part: OptimizerPart) -> None:
        super().__init__(groups, {"hidden": False})
        self._matrices: dict[nn.Parameter, nn.Parameter] = {
            p: nn.Parameter(_as_matrix(p.detach())) for g in self.param_groups if g["hidden"] for p in g["params"]
        }
        self._inner: list[tuple[dict[str, Any], torch.optim.Optimizer]] = []
        for group in self.param_groups:
            rates = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            inner: torch.optim.Optimizer
            if group["hidden"]:
                matrices = [self._matrices[p] for p in group["params"]]
                shape: dict[str, Any] = {
                    "momentum": part.momentum,
                    "nesterov": part.nesterov,
                    "adjust_lr_fn": "match_rms_adamw",
                }
                inner = torch.optim.Muon(matrices, **rates, **shape)
            else:
                inner = torch.optim.AdamW(group["params"], **rates, betas=part.betas, eps=part.eps, foreach=False)
                inner.state = self.state
            self._inner.append((group, inner))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for parameter, matrix in self._matrices.items():
            matrix.grad = None if parameter.grad is None else _as_matrix(parameter.grad)
        for group, inner in self._inner:
            inner.param_groups[0].update(lr=group["lr"], weight_decay=group["weight_decay"])
            inner.step()
            for parameter in group["params"] if group["hidden"] else ():
                state = inner.state.get(self._matrices[parameter])
                if state and parameter not in self.state:
                    self.state[parameter] = state


def _as_matrix(tensor: Tensor) -> Tensor:
    """[rows, columns], of the same memory: channels last or not, for the order of columns changes no update."""
    if tensor.ndim > 2 and not tensor.is_contiguous():
        tensor = tensor.movedim(1, -1)
    return tensor.view(len(tensor), -1)
