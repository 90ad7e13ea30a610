"""A batch split over several devices trains as one that is not. The GPUs themselves: tests/gpu/test_dp.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.prepare.assemble import assemble
from paceline.seams import Build, Mesh
from paceline.strategies import strategy_for
from tests.parity import driving, reference
from tests.parity.test_fsdp import Case, built, model_of


def split_over(build: Build, case: Case, count: int, monkeypatch: pytest.MonkeyPatch) -> Build:
    """The build with its passes on ``count`` devices."""
    module = SimpleNamespace(device_count=lambda: count)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    chosen = case.recipe().with_settings(["parallel.strategy=dp"])
    return strategy_for(chosen, Mesh()).prepare(build)


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


def trained(case: Case, *, split: bool, patch: pytest.MonkeyPatch) -> tuple[list[float], nn.Module, dict[str, str]]:
    model, chosen = model_of(case), case.recipe()
    build = built(case, model)
    if split:
        build = split_over(build, case, 2, patch)
    run = assemble(chosen, build, reference.STEPS)
    return driving.train(run, chosen), model, dict(build.execution)


@pytest.mark.parametrize("size", [8, 3])
def test_split_batches_train_as_whole_ones(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Batches that two devices divide, and that they do not: the last one of an epoch holds a single sample."""
    monkeypatch.setattr(nn, "DataParallel", Pieces)
    case = Case(batch_size=size, micro_batch_size=size)
    (losses, model, path), (split_losses, split, split_path) = (
        trained(case, split=split, patch=monkeypatch) for split in (False, True)
    )
    assert split_losses == pytest.approx(losses, rel=1e-6)
    assert split_path == {**path, "parallel": "dp: 2 GPUs"}
    assert split.state_dict().keys() == model.state_dict().keys(), "weights have other names"
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs, tests/gpu/test_dp.py runs torch's own")
def test_torchs_own_runs_the_model_as_it_is_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(dtype=torch.float32)
    (losses, model, _), (split_losses, split, _) = (
        trained(case, split=split, patch=monkeypatch) for split in (False, True)
    )
    assert split_losses == losses
    driving.assert_same_bits(model, split)


@pytest.mark.parametrize(
    ("techniques", "count", "message"),
    [((), 1, "there is 1"), ((), 0, "there is none"), ((("packing", True),), 2, "packed row")],
)
def test_what_cannot_be_split_says_so(
    techniques: Any, count: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(techniques=techniques)
    with pytest.raises(RecipeError, match=message):
        split_over(built(case, model_of(case)), case, count, monkeypatch)
