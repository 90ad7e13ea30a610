"""Training on windows, by the plainest loop: every window through the model, the mean or maximum of a text's logits.

The tokens that are kept are compared with what tokenizers cut in tests/unit/data/test_overflow.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.data.dataset import Dataset, Tokens
from paceline.data.overflow import Overflow, pieces
from paceline.engine.evaluate import evaluate
from paceline.seams import Alone, World
from paceline.tasks import task_for
from paceline.techniques.overflow import aggregate
from tests.distributed import splitting
from tests.parity import driving, test_fsdp
from tests.parity.reference import STEPS, batches, linear_schedule, padded, samples, tiny_model
from tests.testing.distributed import run_distributed
from tests.testing.marks import slow_except

ROOM = 8
"""Tokens of a window, where texts have 3 to 24."""

CHOICE = Overflow(kind="windows", stride=2)


def windows_of(text: np.ndarray) -> list[np.ndarray]:
    """By hand: eight tokens, and the next eight from six on, until the text ends."""
    found = [text[:ROOM]]
    start = 0
    while start + ROOM < len(text):
        start += ROOM - 2
        found.append(text[start : start + ROOM])
    return found


def dataset() -> Dataset:
    texts, _ = samples()
    cut = [[text[at] for at in pieces(len(text), ROOM, CHOICE)] for text in texts]
    flat = [window for windows in cut for window in windows]
    tokens = Tokens(
        np.concatenate(flat).astype(np.uint16),
        np.cumsum([0, *map(len, flat)]).astype(np.int64),
        pad_id=0,
        windows=np.cumsum([0, *map(len, cut)]).astype(np.int64),
    )
    return replace(driving.plain_dataset(), inputs=tokens)


def by_hand(model: nn.Module, how: str) -> list[float]:
    texts, labels = samples()
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": 0.01},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    losses = []
    model.train()
    for step, ids in enumerate(batches(8)):
        optimizer.param_groups[0]["lr"] = 1e-3 * linear_schedule(step, STEPS, 2)
        rows = []
        for i in ids:
            logits = model(**padded(windows_of(texts[i]))).logits
            rows.append(logits.mean(0) if how == "mean" else logits.amax(0))
        loss = F.cross_entropy(torch.stack(rows), torch.from_numpy(labels[ids]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("how", ["mean", "max"])
@pytest.mark.parametrize("micro", slow_except([None, 3], 3), ids=["whole", "micro-batches"])
def test_training_on_windows_is_that_of_a_plain_loop(
    how: str, packs: bool, micro: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "dataset", dataset)
    settings: dict[str, Any] = {"techniques": {"packing": packs}, "loop": {"micro_batch_size": micro}}
    chosen = driving.recipe(data={"overflow": "windows", "aggregate": how}, **settings)
    model, plain = tiny_model(dropout=0.0), tiny_model(dropout=0.0)
    run = driving.assembled(model, chosen)
    assert run.build.execution["overflow"] == "windows"
    assert run.build.execution["layout"] == ("packed" if packs else "padded")
    losses, expected = driving.train(run, chosen), by_hand(plain, how)
    assert np.allclose(losses, expected, atol=2e-5), f"losses differ by {np.abs(np.subtract(losses, expected)).max()}"
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-4), name


def by_ddp(world: World) -> tuple[float, bool]:
    """How far weights after three steps are from those of one process, and whether evaluations have the same bits."""
    with mock.patch.object(driving, "dataset", dataset):
        techniques = {**driving.PLAIN, "packing": True}
        chosen = driving.recipe(data={"overflow": "windows"}, techniques=techniques, loop={"batch_size": 8})
        alone, together = (splitting.assembled(each, chosen) for each in (Alone(), world))
        for run, each in ((alone, Alone()), (together, world)):
            splitting.train(run, chosen, each, 3)
        build = replace(together.build, task=task_for("classification", ("0", "1", "2"), chosen.task))
        one, several = (
            evaluate(together.engine.infer, build, "test", np.arange(61), 8, step=0, epoch=0, world=each)
            for each in (Alone(), world)
        )
        same = (one.loss, one.metrics, 61) == (several.loss, several.metrics, several.samples)
        return splitting.furthest(together.engine.whole(), alone.engine.whole()), same


def test_ranks_train_and_evaluate_as_one_process_does() -> None:
    for rank, (away, same) in enumerate(run_distributed(by_ddp, 2)):
        assert away < 1e-9, f"rank {rank}: weights are {away:.1e} from those of one process"
        assert same, f"rank {rank}: another evaluation"


def by_fsdp(world: World) -> tuple[Any, Any]:
    recipe = partial(driving.recipe, data={"overflow": "windows"})
    with mock.patch.object(driving, "dataset", dataset), mock.patch.object(driving, "recipe", recipe):
        case = test_fsdp.Case(techniques=(("packing", True),))
        return test_fsdp.alone(case), test_fsdp.together(world, case)


def test_shards_train_as_one_process_does() -> None:
    for alone, together in run_distributed(by_fsdp, 2):
        assert alone.execution["overflow"] == "windows"
        test_fsdp.assert_equal(alone, together, 1e-5)


def test_windows_are_joined_in_anybodys_loop() -> None:
    # the card's example, docs/techniques/overflow.md
    tokens = np.arange(1000)
    places = pieces(len(tokens), room=510, choice=Overflow(kind="windows", stride=0.25))
    windows = [tokens[at] for at in places]
    assert [len(window) for window in windows] == [510, 510, 236]
    logits = torch.tensor([[0.0, 3.0], [2.0, 1.0], [4.0, 2.0], [7.0, 7.0]])  # three windows of a text, one of another
    which = torch.tensor([0, 0, 0, 1])
    assert aggregate(logits, which, 2).tolist() == [[2.0, 2.0], [7.0, 7.0]]
    assert aggregate(logits, which, 2, "max").tolist() == [[4.0, 3.0], [7.0, 7.0]]


def test_half_precision_is_added_in_fp32() -> None:
    logits = torch.full((300, 1), 1.01, dtype=torch.bfloat16)
    assert aggregate(logits, torch.zeros(300, dtype=torch.int64), 1).dtype is torch.float32
