"""The textbook formula: bytes a parameter, times parameters. Shown beside a trace, never instead of one.

Source: Hugging Face, Transformers documentation, "Model training anatomy" (bytes a parameter); Rajbhandari et al.,
ZeRO, SC 2020, section 3.1 (mixed precision keeps a 16-bit copy beside the fp32 weights) and section 5 (what N ranks
split).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.contract.errors import RecipeError, close_words, nearest
from paceline.recipe.choose import STATE_BYTES
from paceline.recipe.parts.optimizer import LOW_BIT

WEIGHT_BYTES: Final = {"fp32": 4, "tf32": 4, "bf16": 6, "fp16": 6, "pure_bf16": 2}
"""Precision -> bytes of a weight. The names of the recipe, where 16 bits mean autocast over fp32 weights: 4 and a copy
of 2. ``pure_bf16`` is a model that is bf16 itself."""

LEAVES_OUT: Final = "activations, temporary buffers, kernels' workspaces, what ranks exchange and the CUDA context"


@dataclass(frozen=True, kw_only=True)
class Textbook:
    """What the formula says of one rank, in bytes."""

    weights_bytes: int
    gradients_bytes: int
    states_bytes: int
    """The optimizer's states."""
    label: str
    """What was reckoned, and what it leaves out: one sentence, to stand beside the figure."""

    @property
    def total_bytes(self) -> int:
        """All three parts."""
        return self.weights_bytes + self.gradients_bytes + self.states_bytes


def textbook(
    num_parameters: int,
    num_trained: int,
    *,
    precision: str,
    optimizer: str,
    momentum: float = 0.9,
    num_shards: int = 1,
    rounding: str = "nearest",
) -> Textbook:
    """Weights, gradients and optimizer states by the textbook's bytes a parameter.

    Weights take 4 bytes in fp32 and tf32, 6 with autocast, 2 where the model itself is bf16; gradients 4, or 2 in that
    last case. States of AdamW and Adam are two numbers and those of SGD with momentum one, in the weight's own format
    (4 bytes, or 2); 8-bit and fp8 AdamW's take 2 bytes, 4-bit AdamW's 1, plain SGD has none. A frozen parameter has its
    weight alone.

    What paceline's step keeps differs: autocast drops its copies at the end of a micro-batch.

    Args:
        num_parameters: the model's weights, in single numbers.
        num_trained: those among them that are trained.
        precision: a key of ``WEIGHT_BYTES``.
        optimizer: a value of ``optimizer.type``.
        momentum: of sgd.
        num_shards: ranks that share one copy of all three (fsdp; ZeRO's stage 3), each rounded up; 1 where every rank
            keeps a whole one (ddp).
        rounding: a value of ``optimizer.rounding``; kahan's compensation is a state in the weight's format.

    Raises:
        RecipeError: an unknown precision or optimizer.
        ValueError: numbers that no model and no run can have.
    """
    if not 0 <= num_trained <= num_parameters or num_shards < 1:
        raise ValueError(f"{num_trained} trained of {num_parameters} parameters, in {num_shards} shards")
    weight = _known("techniques.precision", precision, WEIGHT_BYTES)
    state = _known("optimizer.type", optimizer, STATE_BYTES)
    number = min(weight, 4)
    if optimizer == "sgd" and momentum == 0:
        state = 0
    elif optimizer not in LOW_BIT:
        state = state * number // 4
    if rounding == "kahan":
        state += number
    share = f", split over {num_shards} ranks" if num_shards > 1 else ""
    frozen = f" and {weight} a frozen one" if num_trained < num_parameters else ""
    return Textbook(
        weights_bytes=-(-num_parameters * weight // num_shards),
        gradients_bytes=-(-num_trained * number // num_shards),
        states_bytes=-(-num_trained * state // num_shards),
        label=f"textbook formula: {weight + number + state} bytes a trained parameter (weights {weight}, gradients "
        f"{number}, states {state}){frozen}{share}; leaves out {LEAVES_OUT}",
    )


def _known(setting: str, value: str, table: dict[str, int]) -> int:
    if value in table:
        return table[value]
    example = next(iter(close_words(value, table) or table))
    what = f"{setting} = {value}: unknown to the formula"
    raise RecipeError(what, nearest(value, table), f"--set {setting}={example}")
