"""Recompute: keep each block's input only, and run its forward pass again in the backward pass.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; torch.utils.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from paceline.contract.errors import RecipeError
from paceline.seams import Build


def apply_recompute(blocks: Sequence[nn.Module], *, to_the_end: bool = False) -> None:
    """Make each block recompute its activations in the backward pass; dropout draws the same numbers again.

    Only training forward passes pay for it: where no gradient is wanted, torch runs the block as it is.

    Args:
        to_the_end: of the block, although its last products are not needed again: what is begun in it is ended in it.
    """
    for block in blocks:
        # on the instance, so that the class and every other model of it are left alone
        recomputed = partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = partial(_to_the_end, recomputed) if to_the_end else recomputed


def _to_the_end(recomputed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with set_checkpoint_early_stop(False):
        return recomputed(*args, **kwargs)


def apply(build: Build) -> Build:
    """Recompute in every block of the build's model.

    Raises:
        RecipeError: the model has no repeated blocks to take hold of, or they hold batch normalisation.
    """
    if any(isinstance(module, _BatchNorm) for block in build.blocks for module in block.modules()):
        raise RecipeError(
            "techniques.recompute = true",
            "the blocks hold batch normalisation, whose running statistics a second forward pass would update again",
            "--set techniques.recompute=false",
        )
    if not build.blocks:
        raise RecipeError(
            "techniques.recompute = true",
            "no repeated blocks were found in this model",
            "--set techniques.recompute=false",
        )
    apply_recompute(build.blocks, to_the_end=build.meets_in_forward)
    return build
