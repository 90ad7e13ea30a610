"""The tutorial's plain loop, and the same loop with paceline's engine: at most ten lines differ, no number does."""

from __future__ import annotations

import difflib
import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.contract.errors import UserError
from tests.parity.reference import padded, samples, tiny_model


def loader() -> DataLoader[Any]:
    texts, labels = samples()
    rows = list(zip(texts, labels, strict=True))

    def collate(chosen: list[Any]) -> dict[str, torch.Tensor]:
        return {**padded([text for text, _ in chosen]), "label": torch.tensor([int(label) for _, label in chosen])}

    return DataLoader(rows, batch_size=12, shuffle=True, collate_fn=collate)


# fmt: off
def plain_loop(model, optimizer, train_loader, num_epochs):
    losses = []
    for _ in range(num_epochs):
        correct = 0
        for batch in train_loader:
            model.train()
            outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["label"])
            optimizer.zero_grad()
            outputs["loss"].backward()
            optimizer.step()
            losses.append(outputs["loss"].item())
            correct += (outputs["logits"].argmax(1) == batch["label"]).sum().item()
    return losses, correct


def adopted_loop(model, optimizer, train_loader, num_epochs):
    losses = []
    engine = paceline.adopt(model, optimizer, loss_sum)
    for _ in range(num_epochs):
        correct = 0
        for batch in train_loader:
            forward = engine.accumulate([batch], denominator=len(batch["label"]))
            engine.update()
            outputs = {"loss": forward.loss, "logits": forward.extras[0]}
            losses.append(outputs["loss"].item())
            correct += (outputs["logits"].argmax(1) == batch["label"]).sum().item()
    return losses, correct
# fmt: on


def loss_sum(model, batch):
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["label"], reduction="sum"), logits.detach()


def run(loop) -> tuple[list[float], int, torch.nn.Module]:
    model = tiny_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    torch.manual_seed(123)
    losses, correct = loop(model, optimizer, loader(), 3)
    return losses, correct, model


def test_the_adopted_loop_gives_the_same_numbers() -> None:
    losses, correct, model = run(adopted_loop)
    expected_losses, expected_correct, expected_model = run(plain_loop)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert correct == expected_correct
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected_model.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_at_most_ten_lines_change() -> None:
    one, other = (inspect.getsource(f).splitlines()[1:] for f in (plain_loop, adopted_loop))
    changed = [line for line in difflib.unified_diff(one, other, n=0, lineterm="") if line[0] in "+-"][2:]
    assert len(changed) <= 10, "\n".join(changed)


def test_micro_batches_of_an_adopted_loop_add_up() -> None:
    batch = next(iter(loader()))
    gradients = {}
    for size in (12, 5):
        model = tiny_model(dropout=0.0)
        engine = paceline.adopt(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_sum)
        pieces = [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, 12, size)]
        engine.accumulate(pieces, denominator=12)
        gradients[size] = [p.grad.clone() for p in model.parameters()]
    for whole, cut in zip(gradients[12], gradients[5], strict=True):
        torch.testing.assert_close(whole, cut, rtol=1e-5, atol=1e-7)


def test_clipping_and_its_norm() -> None:
    model = tiny_model()
    engine = paceline.adopt(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_sum, clip_norm=0.01)
    before = [p.detach().clone() for p in model.parameters()]
    batch = next(iter(loader()))
    engine.accumulate([batch], denominator=12)
    update = engine.update()
    moved = math.sqrt(
        sum((p.detach() - b).square().sum().item() for p, b in zip(model.parameters(), before, strict=True))
    )
    assert update.norm > 0.01
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match="not the model's"):
        paceline.adopt(tiny_model(), torch.optim.SGD(tiny_model().parameters(), lr=1.0), loss_sum)


def test_frozen_parameters_do_not_move() -> None:
    """Weight decay reaches every parameter that has a gradient, be it of zeros."""
    model = tiny_model()
    model.distilbert.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.distilbert.state_dict().items()}
    engine = paceline.adopt(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), loss_sum)
    for _ in range(2):
        engine.accumulate([next(iter(loader()))], denominator=12)
        engine.update()
    after = model.distilbert.state_dict()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []


def test_a_zero_grad_left_over_is_an_error_and_not_an_unclipped_update() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = paceline.adopt(model, optimizer, loss_sum, clip_norm=1e-6)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    engine.accumulate([next(iter(loader()))], denominator=12)
    with pytest.raises(UserError, match="zero_grad"):
        engine.update()
    assert all(torch.equal(p.detach(), b) for p, b in zip(model.parameters(), before, strict=True))


def test_inference_gives_logits() -> None:
    model = tiny_model()
    engine = paceline.adopt(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_sum)
    batch = next(iter(loader()))
    logits = engine.infer({"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]})
    assert logits.shape == (12, 3)


def test_what_an_exception_left_behind_is_overwritten() -> None:
    model, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    other.load_state_dict(model.state_dict())
    rows = torch.randn(4, 3)

    def loss_sum(module: torch.nn.Module, batch: torch.Tensor | None) -> torch.Tensor:
        if batch is None:
            raise MemoryError("a batch that does not fit")
        return module(batch).sum()

    engine = paceline.adopt(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_sum)
    with pytest.raises(MemoryError):
        engine.accumulate([rows[:2], None], 4)
    with pytest.raises(UserError, match="no gradients to apply"):
        engine.update()
    engine.accumulate([rows[2:]], 2)
    engine.update()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    (other(rows[2:]).sum() / 2).backward()
    optimizer.step()
    assert torch.equal(model.weight, other.weight)


def test_an_update_without_gradients_is_named() -> None:
    model = tiny_model()
    engine = paceline.adopt(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(**b).loss)
    with pytest.raises(UserError, match="no gradients to apply"):
        engine.update()
