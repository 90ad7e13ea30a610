"""The textbook formula, by hand."""

from __future__ import annotations

from typing import get_args

import pytest

from paceline.contract.errors import RecipeError
from paceline.memory.formula import LEAVES_OUT, WEIGHT_BYTES, textbook
from paceline.recipe.choose import STATE_BYTES
from paceline.recipe.parts import OptimizerPart, TechniquesPart


@pytest.mark.parametrize(
    ("precision", "optimizer", "weights", "gradients", "states"),
    [
        ("fp32", "adamw", 4000, 4000, 8000),
        ("tf32", "adam", 4000, 4000, 8000),
        ("bf16", "adamw", 6000, 4000, 8000),
        ("fp16", "adamw", 6000, 4000, 8000),
        ("bf16", "adamw8bit", 6000, 4000, 2000),
        ("fp32", "sgd", 4000, 4000, 4000),
        ("pure_bf16", "adamw", 2000, 2000, 4000),
        ("pure_bf16", "adamw8bit", 2000, 2000, 2000),
        ("pure_bf16", "sgd", 2000, 2000, 2000),
    ],
)
def test_a_thousand_parameters(precision: str, optimizer: str, weights: int, gradients: int, states: int) -> None:
    found = textbook(1000, 1000, precision=precision, optimizer=optimizer)
    assert (found.weights_bytes, found.gradients_bytes, found.states_bytes) == (weights, gradients, states)
    assert found.total_bytes == weights + gradients + states


def test_plain_sgd_has_no_states() -> None:
    assert textbook(1000, 1000, precision="fp32", optimizer="sgd", momentum=0.0).states_bytes == 0
    assert textbook(1000, 1000, precision="fp32", optimizer="adamw", momentum=0.0).states_bytes == 8000, "sgd's alone"


def test_kahans_compensation_is_a_state() -> None:
    found = textbook(1000, 1000, precision="pure_bf16", optimizer="adamw", rounding="kahan")
    assert (found.states_bytes, found.total_bytes) == (6000, 10_000)


def test_frozen_parameters_are_weights_alone() -> None:
    found = textbook(1000, 100, precision="bf16", optimizer="adamw")
    assert (found.weights_bytes, found.gradients_bytes, found.states_bytes) == (6000, 400, 800)
    frozen = textbook(1000, 0, precision="fp32", optimizer="adamw")
    assert frozen.total_bytes == frozen.weights_bytes == 4000


def test_shards_split_all_three_and_round_up() -> None:
    found = textbook(1001, 1001, precision="fp32", optimizer="adamw", num_shards=8)
    assert (found.weights_bytes, found.gradients_bytes, found.states_bytes) == (501, 501, 1001)
    assert textbook(3, 1, precision="fp32", optimizer="adamw", num_shards=1000).total_bytes == 3


def test_the_well_known_totals() -> None:
    # a model of 7 billion in mixed precision with AdamW: 18 bytes each, 126 GB; in fp32 16 bytes each
    seven = 7 * 10**9
    assert textbook(seven, seven, precision="bf16", optimizer="adamw").total_bytes == 126 * 10**9
    assert textbook(seven, seven, precision="fp32", optimizer="adamw").total_bytes == 112 * 10**9


def test_the_label_says_what_was_reckoned_and_left_out() -> None:
    whole = textbook(1000, 1000, precision="bf16", optimizer="adamw")
    assert whole.label == (
        "textbook formula: 18 bytes a trained parameter (weights 6, gradients 4, states 8); leaves out activations,"
        " temporary buffers, kernels' workspaces, what ranks exchange and the CUDA context"
    )
    split = textbook(1000, 10, precision="pure_bf16", optimizer="adamw", num_shards=4)
    assert split.label == (
        "textbook formula: 8 bytes a trained parameter (weights 2, gradients 2, states 4) and 2 a frozen one,"
        f" split over 4 ranks; leaves out {LEAVES_OUT}"
    )


def test_it_knows_every_precision_and_optimizer_of_a_recipe() -> None:
    precisions = set(get_args(TechniquesPart.model_fields["precision"].annotation)) - {"auto"}
    assert precisions == set(WEIGHT_BYTES)
    assert set(get_args(OptimizerPart.model_fields["type"].annotation)) == set(STATE_BYTES)


@pytest.mark.parametrize(
    ("precision", "optimizer", "what", "why", "fix"),
    [
        (
            "auto",
            "adamw",
            "techniques.precision = auto: unknown to the formula",
            "known: bf16, fp16, fp32, pure_bf16, tf32",
            "--set techniques.precision=fp32",
        ),
        (
            "fp32",
            "adamw8",
            "optimizer.type = adamw8: unknown to the formula",
            "did you mean 'adamw8bit'?",
            "--set optimizer.type=adamw8bit",
        ),
    ],
)
def test_unknown_words_are_refused(precision: str, optimizer: str, what: str, why: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        textbook(1000, 1000, precision=precision, optimizer=optimizer)
    assert (caught.value.what, caught.value.why, caught.value.fix) == (what, why, fix)


@pytest.mark.parametrize(("parameters", "trained", "shards"), [(10, 11, 1), (10, -1, 1), (-1, -1, 1), (10, 10, 0)])
def test_numbers_that_no_run_has_are_a_bug(parameters: int, trained: int, shards: int) -> None:
    with pytest.raises(ValueError, match=f"^{trained} trained of {parameters} parameters, in {shards} shards$"):
        textbook(parameters, trained, precision="fp32", optimizer="adamw", num_shards=shards)
