"""Twenty steps of paceline equal twenty steps of a hand-written loop, bit for bit, on a CPU in fp32."""

import pytest
import torch

from tests.parity.driving import assembled, assert_same_bits, recipe, train
from tests.parity.reference import tiny_model, train_by_hand

OPTIMIZERS = {
    "adamw": (
        {},
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01, foreach=False),
    ),
    "adam": (
        {"type": "adam", "weight_decay": 0.0},
        lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, foreach=False),
    ),
    "sgd": (
        {"type": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True},
        lambda m: torch.optim.SGD(
            m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False
        ),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_twenty_steps_equal_a_hand_written_loop_bit_for_bit(name: str, clip_norm: float | None) -> None:
    settings, make_optimizer = OPTIMIZERS[name]
    chosen = recipe(optimizer={**settings, "clip_norm": clip_norm})
    ours, theirs = tiny_model(), tiny_model()
    losses = train(assembled(ours, chosen), chosen)
    expected = train_by_hand(theirs, make_optimizer=make_optimizer, clip_norm=clip_norm)
    assert losses == expected
    assert_same_bits(ours, theirs)


def test_the_default_optimizer_of_torch_gives_the_same_bits() -> None:
    """Nobody writes foreach=False by hand."""
    chosen = recipe()
    ours, theirs = tiny_model(), tiny_model()
    train(assembled(ours, chosen), chosen)
    train_by_hand(theirs, make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01))
    assert_same_bits(ours, theirs)


def test_another_seed_gives_other_weights() -> None:
    """The comparison can fail."""
    chosen = recipe()
    ours, theirs = tiny_model(), tiny_model()
    train(assembled(ours, chosen), chosen)
    train_by_hand(theirs, make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), seed=1)
    with pytest.raises(AssertionError, match="weights differ"):
        assert_same_bits(ours, theirs)
