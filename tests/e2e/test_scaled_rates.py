"""Learning rates that were scaled by the global batch: led up to by a warm-up, on any number of ranks, or said so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401
import transformers.models.bert.modeling_bert  # noqa: F401

# this one and those above are loaded so that the server from which ranks are forked loads them, once
import paceline.run.run  # noqa: F401
from paceline.verbs.train import resume, train
from tests.e2e.ranks import on_ranks
from tests.e2e.whole_runs import lines, recipe

pytestmark = pytest.mark.timeout(120)

SCALED = ["optimizer.lr_scaling=linear", "optimizer.lr_scaling_base=3", "loop.max_steps=5"]


def rates(folder: Path) -> list[float]:
    return [line["learning_rates"][0] for line in lines(folder, "step")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scaled_rate_is_led_up_to_on_any_number_of_ranks(
    ranks: int, pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    chosen = recipe(pretrained, reviews, optimizer={"lr": 1e-3}, schedule={"type": "constant", "warmup": 3})
    ended = on_ranks(ranks, f"file://{tmp_path}/meeting", chosen.with_settings(SCALED), tmp_path / "run")
    assert [rank.error for rank in ended] == [None] * ranks
    assert rates(tmp_path / "run") == pytest.approx([0, 1e-3, 2e-3, 3e-3, 3e-3]), "9 samples over 3: three times 1e-3"
    assert ended[0].record is not None
    assert not [notice for notice in ended[0].record.notices if "lr_scaling" in notice]


def test_a_scaled_rate_without_a_warm_up_is_warned_of_once(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    chosen = recipe(pretrained, reviews, optimizer={"lr": 1e-3}, schedule={"warmup": 0}).with_settings(SCALED)
    record = train(chosen, out=tmp_path / "run")
    (notice,) = [notice for notice in record.notices if "lr_scaling" in notice]
    assert "by 3, and schedule.warmup = 0" in notice
    assert "--set schedule.warmup=" in notice
    assert rates(tmp_path / "run")[0] == pytest.approx(3e-3)
    again = resume(tmp_path / "run", ["loop.max_steps=6"])
    assert not [notice for notice in again.notices if "lr_scaling" in notice]


@pytest.mark.parametrize(
    "settings", [["schedule.warmup=2"], ["optimizer.lr_scaling_base=18"], ["optimizer.lr_scaling=0.5"]]
)
def test_a_rate_that_is_led_up_to_or_lowered_needs_no_warning(
    settings: list[str], pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    plain = recipe(pretrained, reviews, optimizer={"lr": 1e-3}, schedule={"warmup": 0}, loop={"max_steps": 2})
    scaled = [] if "0.5" in settings[0] else SCALED[:2]
    record = train(plain.with_settings([*scaled, *settings, "loop.max_steps=3"]), out=tmp_path / "run")
    assert not [notice for notice in record.notices if "lr_scaling" in notice]
