"""On a GPU the snapshot stands in the stream: the host does not wait, and what comes after does not get into it."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.run.checkpoint.background import BackgroundStore
from paceline.run.checkpoint.store import CheckpointStore
from tests.gpu.waiting import waits_are_errors


def test_weights_changed_right_after_a_save_are_saved_as_they_were(tmp_path: Path) -> None:
    store = BackgroundStore(CheckpointStore(tmp_path, keep_last=1))
    flat = torch.zeros(64 * 2**20, device="cuda")
    halves = {"left": flat[: flat.numel() // 2], "right": flat[flat.numel() // 2 :]}
    try:
        store.save(0, {"model": halves}, {})  # takes the pinned memory, which does wait
        store.wait()
        for step in (1, 2, 3):
            flat.fill_(step)
            with waits_are_errors():
                store.save(step, {"model": halves}, {"step": step})
            flat.fill_(-1.0)
            store.wait()
            found = store.store.newest()
            assert found.state == {"step": step}
            for name in halves:
                assert bool((found.tensors("model")[name] == step).all()), f"{name} of step {step} is another step's"
        assert [record.step for record in store.committed()] == [0, 1, 2, 3]
    finally:
        store.close()
