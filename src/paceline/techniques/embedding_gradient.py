"""Embedding gradient: what a step adds to the rows of its embeddings, by two kernels of our own instead of torch's ten.

The lookup stays torch's, so that a compiler makes one kernel of it and what follows; only its gradient is ours, see
``kernels/embedding_gradient.py``. Weights, names and results of the forward pass do not notice.
"""

from __future__ import annotations

import types
from typing import Literal

from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.kernels.embedding_gradient import embedding
from paceline.seams import Build

SETTING = "techniques.embedding_gradient"

REASON = "two kernels of our own in place of torch's ten"

FEW = 64
"""Rows below which a table is left to torch: all of a batch's tokens share them, and one program would add up each."""


def apply_embedding_gradient(model: nn.Module) -> int:
    """Take over the gradients of ``model``'s embeddings, in place; returns how many there were.

    An embedding is left alone when its weight is frozen, has few rows or is renormed at each lookup, when its gradient
    is sparse or scaled by how often a row occurs, or when it is of a class of its own or adapted.
    """
    found = [module for module in model.modules() if _is_plain(module)]
    for module in found:
        # on the instance, so that the class and every other model of it are left alone
        module.forward = types.MethodType(_forward, module)
    return len(found)


def apply(build: Build, setting: bool | Literal["auto"], *, compiled: bool) -> Build:
    """Take over the gradients of the embeddings of the build's model.

    Args:
        setting: ``auto`` leaves compiled embeddings alone: their gradient is one kernel already.
        compiled: whether they will be.

    Raises:
        RecipeError: ``setting`` is true and there is none.
    """
    if setting is False:
        return build
    open_, left = setting == "auto", "compiled embeddings have one kernel for it" if compiled else ""
    count = 0 if open_ and left else apply_embedding_gradient(build.model)
    if not count:
        why = left or f"this model trains no plain embedding of {FEW} rows or more"
        if not open_:
            raise RecipeError(f"{SETTING} = true", why, f"--set {SETTING}=false")
        return build.decided(SETTING, False, why)
    build = build.carried_out(embedding_gradient=f"{count} table{'' if count == 1 else 's'}")
    return build.decided(SETTING, True, REASON) if open_ else build


def _is_plain(module: nn.Module) -> bool:
    return (
        type(module) is nn.Embedding
        and "forward" not in vars(module)
        and module.weight.requires_grad
        and len(module.weight) >= FEW
        and module.max_norm is None
        and not module.sparse
        and not module.scale_grad_by_freq
    )


def _forward(self: nn.Embedding, input: Tensor) -> Tensor:  # named as nn.Embedding's
    return embedding(input, self.weight, self.padding_idx)
