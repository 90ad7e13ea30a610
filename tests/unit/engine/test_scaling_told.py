"""What fp16's loss scaling tells: the scale of each step, skipped ones, and how many gradients are 0."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.contract.records import LossScaling, StepRecord
from paceline.data.order import OrderState
from paceline.observe.collect import Collected
from paceline.observe.metrics_file import MetricsFile, read_metrics
from paceline.optim.gradients import FlatGradients
from paceline.optim.scaling import Dynamic
from paceline.report.curves import curves
from paceline.run.progress import Progress, with_step
from paceline.seams import Update
from tests.parity import driving
from tests.parity.reference import tiny_model

CPU, INITIAL = torch.device("cpu"), 65536.0


def record(step: int = 1, **changes: Any) -> StepRecord:
    plain = {"step": step, "epoch": 0, "loss": 0.5, "gradient_norm": 1.0, "learning_rates": (0.1,), "samples": 4}
    counts = {"tokens": 4, "slots": 4, "correct": 2.0, "counted": 4, "skipped": False, "seconds": 0.1}
    return StepRecord(**{**plain, **counts, "peak_bytes": None, **changes})


def collected(steps: list[StepRecord]) -> Collected:
    nothing: dict[str, Any] = {"started": None, "evaluations": (), "checkpoints": (), "notices": (), "recipe": ""}
    return Collected(folder=Path("run"), steps=tuple(steps), manifest={}, summary=None, **nothing)


def test_zeros_are_counted_without_padding_and_without_embeddings() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(10, 4), "one": nn.Linear(3, 5), "two": nn.Linear(3, 1, bias=False)})
    gradients = FlatGradients(list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad.fill_(1.0)
    tables = list(model["table"].parameters())
    assert gradients.zero_share(tables).item() == 0.0
    model["table"].weight.grad.zero_()
    assert gradients.zero_share(tables).item() == 0.0
    assert gradients.zero_share().item() == pytest.approx(40 / 63)
    model["one"].weight.grad[:2] = 0.0
    assert gradients.zero_share(tables).item() == pytest.approx(6 / 23)
    assert gradients.zero_share(list(model.parameters())) is None


def test_an_update_tells_of_the_scale_it_was_made_with() -> None:
    chosen = driving.recipe()
    run = driving.assembled(tiny_model(dropout=0.0), chosen)
    tables = [p for m in run.build.model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()]
    object.__setattr__(run.engine._step, "scale", Dynamic(CPU, tables=tables))
    batch = run.build.layout.collate(driving.dataset().splits["train"][:8])

    def update() -> Update:
        run.engine.accumulate_batches([batch], 8.0)
        return run.engine.update()

    first = update()
    assert first.loss_scale == INITIAL
    assert 0 <= first.zero_share.item() < 0.2
    hook = run.build.model.classifier.bias.register_hook(lambda gradient: gradient * float("inf"))
    overflowed = update()
    hook.remove()
    assert not overflowed.finite
    assert overflowed.loss_scale == INITIAL, "what this step's gradients were made with"
    assert update().loss_scale == INITIAL / 2


def test_without_a_scale_an_update_is_what_it_was() -> None:
    chosen = driving.recipe()
    run = driving.assembled(tiny_model(), chosen)
    run.engine.accumulate_batches([run.build.layout.collate(driving.dataset().splits["train"][:8])], 8.0)
    assert (lambda done: (done.loss_scale, done.zero_share))(run.engine.update()) == (None, None)


def test_the_sums_of_a_run_survive_a_checkpoint() -> None:
    found = None
    for told in (
        record(1, loss_scale=65536.0, zero_share=0.0, skipped=True),
        record(2, loss_scale=32768.0, zero_share=0.1),
        record(3, loss_scale=32768.0, zero_share=0.2),
        record(4, loss_scale=65536.0, zero_share=0.6),
    ):
        found = with_step(found, told)
    assert found == LossScaling(
        lowest=32768.0, highest=65536.0, last=65536.0, skipped=1, counted=3, zero_share=pytest.approx(0.3)
    )
    progress = Progress(order=OrderState(seed=0, epoch=0, step=0, batch_size=4), scaling=found)
    assert Progress.parse(progress.plain()) == progress
    older = {name: value for name, value in progress.plain().items() if name != "scaling"}
    assert Progress.parse(older) == replace(progress, scaling=None)
    assert with_step(None, record()) is None
    assert with_step(None, record(loss_scale=2.0)).zero_share is None, "shards do not count"


def test_metrics_and_report_have_them_and_older_metrics_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    steps = [record(step, loss_scale=2.0**step, zero_share=0.1, skipped=step == 2) for step in range(1, 6)]
    for told in steps:
        file.observe(told)
    file.close()
    assert read_metrics(path) == steps
    shown = "".join(curves(collected(steps)))
    assert "Loss scale over steps" in shown
    assert "Gradients that are 0 over steps" in shown
    assert "Loss scale" not in "".join(curves(collected([record(step) for step in range(1, 6)])))
    older = asdict(record())
    del older["loss_scale"], older["zero_share"]
    assert StepRecord(**older) == record()
