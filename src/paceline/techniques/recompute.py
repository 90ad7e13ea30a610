"""Recompute: keep each block's input only, and run its forward pass again in the backward pass.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; torch.utils.checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from paceline.contract.errors import RecipeError
from paceline.seams import Build


def apply_recompute(blocks: Sequence[nn.Module]) -> None:
    """Make each block recompute its activations in the backward pass; dropout draws the same numbers again.

    Only training forward passes pay for it: where no gradient is wanted, torch runs the block as it is.
    """
    for block in blocks:
        # on the instance, so that the class and every other model of it are left alone
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def apply(build: Build) -> Build:
    """Recompute in every block of the build's model.

    Raises:
        RecipeError: the model has no repeated blocks to take hold of, or they hold batch normalisation.
    """
    if any(isinstance(module, _BatchNorm) for block in build.blocks for module in block.modules()):
        raise RecipeError(
            "techniques.recompute = true",
            "the blocks hold batch normalisation, whose running statistics a second forward pass would update again",
            "set it to false",
        )
    if not build.blocks:
        raise RecipeError(
            "techniques.recompute = true", "no repeated blocks were found in this model", "set it to false"
        )
    apply_recompute(build.blocks)
    return build
