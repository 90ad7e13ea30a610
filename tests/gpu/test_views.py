"""Windows of texts and views of images on a GPU: the CPU's results, repeatable, and nothing waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.engine.numerics import numerics
from paceline.techniques.overflow import aggregate
from paceline.techniques.tta import averaged, views
from tests.gpu.waiting import waits_are_errors
from tests.parity import driving
from tests.parity.reference import tiny_model
from tests.parity.test_overflow import dataset

CUDA = torch.device("cuda")


@pytest.fixture
def deterministic() -> Iterator[None]:
    with numerics("fp32", deterministic=True):
        yield


@pytest.mark.parametrize("how", ["mean", "max"])
def test_windows_are_joined_as_on_a_cpu_and_repeatably(how: str, deterministic: None) -> None:
    generator = torch.Generator().manual_seed(0)
    windows = torch.arange(500).repeat_interleave(torch.randint(1, 30, (500,), generator=generator))
    logits = torch.randn(len(windows), 7, generator=generator)
    expected = aggregate(logits, windows, 500, how)
    found = []
    for _ in range(2):
        there = logits.to(CUDA).requires_grad_()
        on_device = windows.to(CUDA)
        with waits_are_errors():
            joined = aggregate(there, on_device, 500, how)
            joined.square().sum().backward()
        torch.testing.assert_close(joined.cpu(), expected)
        assert there.grad is not None
        found.append((joined.detach(), there.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
def test_training_on_windows_is_that_of_the_cpu(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "dataset", dataset)
    losses: list[list[float]] = []
    for device in ("cpu", "cuda"):
        settings: dict[str, Any] = {"techniques": {"packing": packs}}
        chosen = driving.recipe(data={"overflow": "windows"}, **settings)
        run = driving.assembled(tiny_model(dropout=0.0), chosen, device=device)
        losses.append(driving.train(run, chosen))
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_views_are_those_of_a_cpu(memory: torch.memory_format) -> None:
    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    there = images.to(CUDA).contiguous(memory_format=memory)
    names = ["flip", "crop5", "scales"]
    with waits_are_errors():
        found = views(there, names)
        averaged(lambda view: view.mean((2, 3)), there, names)
    for number, (one, other) in enumerate(zip(found, views(images, names), strict=True)):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=0, msg=f"view {number}")
        assert one.is_contiguous(memory_format=memory)
