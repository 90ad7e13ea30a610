"""A batch dealt to several devices trains as one that is not. The cards themselves: tests/gpu/test_dp.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.engine.assemble import assemble
from paceline.errors import RecipeError
from paceline.techniques import dp
from tests.parity import driving, reference
from tests.parity.test_fsdp import Case, built, model_of

CARDS = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Pieces(nn.Module):
    """What DataParallel does to a batch, on one device: cut along the first dimension, run piece by piece, join."""

    def __init__(self, module: nn.Module, device_ids: list[int]) -> None:
        super().__init__()
        self.module, self.num_pieces, self.calls = module, len(device_ids), 0

    def forward(self, **inputs: Tensor) -> Tensor:
        pieces = zip(*(tensor.chunk(self.num_pieces) for tensor in inputs.values()), strict=True)
        logits = [self.module(**dict(zip(inputs, piece, strict=True))).logits for piece in pieces]
        self.calls += len(logits)
        return torch.cat(logits)


def trained(case: Case, *, dealt: bool) -> tuple[list[float], nn.Module, dict[str, str]]:
    model, chosen = model_of(case), case.recipe()
    build = built(case, model)
    if dealt:
        build = dp.apply(build, CARDS)
    run = assemble(chosen, build, reference.STEPS)
    return driving.train(run, chosen), model, dict(build.path)


@pytest.mark.parametrize("size", [8, 3])
def test_dealt_batches_train_as_whole_ones(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Batches that two devices divide, and that they do not: the last one of an epoch holds a single sample."""
    monkeypatch.setattr(nn, "DataParallel", Pieces)
    case = Case(batch_size=size, micro_batch_size=size)
    (losses, model, path), (dealt_losses, dealt, dealt_path) = (trained(case, dealt=dealt) for dealt in (False, True))
    assert dealt_losses == pytest.approx(losses, rel=1e-6)
    assert dealt_path == {**path, "parallel": "dp: 2 cards"}
    assert dealt.state_dict().keys() == model.state_dict().keys(), "weights have other names"
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(dealt.state_dict()[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with cards, tests/gpu/test_dp.py runs torch's own")
def test_torchs_own_runs_the_model_as_it_is_without_cards() -> None:
    case = Case(dtype=torch.float32)
    (losses, model, _), (dealt_losses, dealt, _) = (trained(case, dealt=dealt) for dealt in (False, True))
    assert dealt_losses == losses
    driving.assert_same_bits(model, dealt)


@pytest.mark.parametrize(
    ("techniques", "devices", "message"),
    [((), CARDS[:1], "there is 1"), ((), [], "there is none"), ((("packing", True),), CARDS, "packed row")],
)
def test_what_cannot_be_dealt_says_so(techniques: Any, devices: list[torch.device], message: str) -> None:
    case = Case(techniques=techniques)
    with pytest.raises(RecipeError, match=message):
        dp.apply(built(case, model_of(case)), devices)
