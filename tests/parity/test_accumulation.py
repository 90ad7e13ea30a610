"""A batch cut into micro-batches gives the gradient of the whole batch, also in the last, partial step."""

import pytest
import torch

from tests.parity.driving import assembled, assert_same_bits, recipe, train
from tests.parity.reference import tiny_model, train_by_hand


@pytest.mark.parametrize("micro_batch_size", [1, 3, 5])
def test_micro_batches_equal_the_hand_written_accumulation_bit_for_bit(micro_batch_size: int) -> None:
    chosen = recipe(loop={"batch_size": 12, "micro_batch_size": micro_batch_size})
    ours, theirs = tiny_model(), tiny_model()
    losses = train(assembled(ours, chosen), chosen)
    expected = train_by_hand(
        theirs,
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.01),
        batch_size=12,
        micro_batch_size=micro_batch_size,
    )
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("micro_batch_size", [1, 5, 7])
def test_accumulated_gradient_is_that_of_the_big_batch(micro_batch_size: int) -> None:
    """fp64, no dropout: 64 samples in batches of 12 leave a last batch of 4; every step must agree."""
    losses = {}
    models = {}
    for size in (None, micro_batch_size):
        torch.set_default_dtype(torch.float64)
        try:
            model = tiny_model(dropout=0.0).double()
            chosen = recipe(loop={"batch_size": 12, "micro_batch_size": size})
            losses[size] = train(assembled(model, chosen, total_steps=12), chosen, steps=12)
        finally:
            torch.set_default_dtype(torch.float32)
        models[size] = model
    # the loss itself is taken in fp32
    assert losses[None] == pytest.approx(losses[micro_batch_size], rel=1e-5)
    for (name, a), b in zip(
        models[None].state_dict().items(), models[micro_batch_size].state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
