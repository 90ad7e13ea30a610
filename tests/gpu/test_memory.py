"""``paceline memory`` on a GPU: its stages are there, they add up, and the plan is near."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.records import MemoryStages
from paceline.machine.facts import this_machine
from paceline.models.saved import load_saved, save_model
from paceline.optim.flat import FlatLayout
from paceline.recipe import Recipe
from paceline.recipe.parts.optimizer import LOW_BIT
from paceline.report.stages import predicted
from paceline.verbs.memory import memory, shown
from tests.testing.tiny import tiny_bert_config
from tests.unit.models.test_saved import TEXT, bert

EAGER = ["context", "model", "checks", "optimizer", "warm-up", "forward", "backward", "update", "steady"]
PLAIN = {"packing": False, "early_pooling": False, "fused_qkv": False, "fusion": False, "compile": False}

MIB = 2**20

CLOSE, RESERVED = 0.1, 0.25
"""Of small runs, whose workspaces are half of what they take."""


def recipe(**techniques: Any) -> Recipe:
    """A BERT of 20 million parameters: small, and above what rounding and a workspace are."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    return Recipe.parse(
        {
            "name": "small",
            "model": {"config": tiny_bert_config(**sizes, max_position_embeddings=256)},
            "data": {
                "source": "builtin:random",
                "max_length": 256,
                "splits": {"validation": 0, "test": 0},
                "random": {"samples": 256, "length": 256, "vocabulary": 2000},
            },
            "loop": {"batch_size": 16, "epochs": 1},
            "techniques": {"precision": "fp32", "capture": False, **PLAIN, **techniques},
        }
    )


def check(found: MemoryStages) -> None:
    """What holds of every run that went to its end."""
    assert (found.problem, found.plan_problem) == ("", ""), found.traceback
    assert found.plan is not None
    for stage in found.stages:
        assert stage.allocated <= stage.peak <= stage.reserved <= stage.in_use, stage
    assert found.total <= torch.cuda.get_device_properties(0).total_memory
    assert found.plan.allocated == pytest.approx(found.peak, rel=CLOSE)
    # what the driver counts is not compared: other tests come and go on this GPU
    assert found.plan.reserved == pytest.approx(max(stage.reserved for stage in found.stages), rel=RESERVED)
    assert found.step_seconds is not None
    assert found.step_seconds < 1


def test_each_stage_adds_what_it_should(tmp_path: Path) -> None:
    anatomy = memory(recipe(), ["loop.micro_batch_size=4", "techniques.recompute=true"], out=tmp_path)
    plain, accumulated, recomputed = anatomy.ladder
    for found in anatomy.ladder:
        check(found)
        assert [stage.name for stage in found.stages] == EAGER
    stages = {stage.name: stage for stage in plain.stages}
    assert plain.plan is not None
    weights = 4 * plain.plan.num_parameters
    assert stages["context"].allocated < MIB
    assert stages["model"].allocated == pytest.approx(weights, rel=0.01)
    assert stages["forward"].allocated > stages["optimizer"].allocated + 10 * MIB, "activations"
    assert stages["backward"].allocated < stages["forward"].allocated
    assert stages["update"].allocated >= 3 * weights, "weights and two states"
    for name in ("model", "steady"):
        figure = predicted(plain, stages[name])
        assert figure == pytest.approx(stages[name].peak, rel=CLOSE), name
    assert recomputed.peak < accumulated.peak < plain.peak
    assert json.loads((tmp_path / "memory.json").read_text())["ladder"][0]["total"] == plain.total
    assert (tmp_path / "report.html").read_text(encoding="utf-8").count("<figure") == 3
    assert "side by side" in shown(anatomy)


def test_everything_that_is_chosen_by_itself() -> None:
    """Packed, fused, captured: the steps are replayed, and their memory is taken while they are captured."""
    asked = recipe().with_settings(
        [f"techniques.{name}=auto" for name in ("precision", "capture", *PLAIN)] + ["data.splits.validation=0.25"]
    )
    found = memory(asked).ladder[0]
    check(found)
    names = [stage.name for stage in found.stages]
    assert names[:5] == EAGER[:5]
    assert names[-1] == "evaluation"
    assert found.execution["layout"] == "packed"
    assert found.execution["steps"].startswith("captured"), found.execution
    assert "passes" in names, "the first step is replayed"


def test_a_rung_that_takes_too_much_says_where_and_the_others_go_on() -> None:
    too_large = "loop.batch_size=100000 data.random.samples=100000 loop.micro_batch_size=100000"
    found = memory(recipe(), [too_large, "loop.batch_size=16 loop.micro_batch_size=16"]).ladder
    assert "out of memory" in found[1].problem.lower(), found[1]
    assert found[1].traceback == ""
    assert [stage.name for stage in found[1].stages][:2] == EAGER[:2], "what was measured before is kept"
    check(found[2])


@pytest.mark.skipif(
    not any(this_machine().versions.get(name) for name in LOW_BIT["adamw8bit"]), reason="needs bitsandbytes or torchao"
)
def test_states_of_8_bits_are_there_after_the_first_update() -> None:
    found = memory(recipe(), ["optimizer.type=adamw8bit"]).ladder[1]
    check(found)
    stages = {stage.name: stage for stage in found.stages}
    assert found.plan is not None
    added = stages["update"].allocated - stages["backward"].allocated
    assert added == pytest.approx(2 * found.plan.num_parameters, rel=0.3)
    assert predicted(found, stages["forward"]) is None, "the plan's forward passes stand beside the states"


def test_saving_a_model_takes_nothing_of_the_gpu(tmp_path: Path) -> None:
    """transformers clones, where they are, tensors that share their memory, as weights in a flat buffer do."""
    model, tokenizer = bert()
    model.cuda()
    FlatLayout([list(model.parameters())]).move_in()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    save_model(model, tokenizer, tmp_path / "model", TEXT)
    assert torch.cuda.max_memory_allocated() == before
    loaded = load_saved(tmp_path / "model").model.state_dict()
    assert all(torch.equal(value.cpu(), loaded[name]) for name, value in model.state_dict().items())
