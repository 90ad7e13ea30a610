"""``paceline check`` from the command line to its claims, on models of two layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.check.claims import CLAIMS
from paceline.data.order import ShuffledOrder
from paceline.engine import evaluate as evaluation
from tests.e2e.commands import Paceline
from tests.testing.tiny import tiny_bert_config, tiny_resnet_config

pytestmark = pytest.mark.usefixtures("forked_interpreters")

ON_A_CPU = {"compile", "capture", "recompiles", "waits", "memory"}
"""Claims that have nothing to be about where nothing is compiled and there is no GPU."""


def write_recipe(folder: Path, source: Path | str, **changes: Any) -> Path:
    """A BERT of two layers with dropout; JSON is YAML."""
    config = tiny_bert_config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    plain = {
        "name": "tiny",
        "model": {"config": config, "vocabulary_size": 300},
        "data": {"source": str(source)},
        "device": "cpu",
        **changes,
    }
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(plain))
    return path


def findings(out: str) -> dict[str, Mapping[str, Any]]:
    return {found["claim"]: found for found in json.loads(out)["findings"]}


IN_PROCESS = ",".join(claim.name for claim in CLAIMS if claim.name not in ("ranks", "strategies"))


def test_a_healthy_recipe_keeps_what_is_promised(paceline: Paceline, reviews: Path, tmp_path: Path) -> None:
    done = paceline("check", write_recipe(tmp_path, reviews), "--only", IN_PROCESS, "--json")
    assert done.code == 0, done
    found = findings(done.out)
    assert {name for name, each in found.items() if each["status"] == "not applicable"} == ON_A_CPU
    assert {each["status"] for name, each in found.items() if name not in ON_A_CPU} == {"passed"}, done.out
    assert json.loads(done.out)["holds"] is True
    assert not list(tmp_path.glob("runs*")), "a check leaves no run"


def test_images_are_checked_too(paceline: Paceline, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": {"config": tiny_resnet_config()}, "data": {"augment": {"crop": 1}}}
    changes["data"]["source"] = "builtin:digits"
    recipe = write_recipe(tmp_path, "", **changes)
    only = "labels,loader,tokenizer,metrics,loop,accumulation,packing,saved,resume"
    done = paceline("check", recipe, "--only", only, "--json")
    assert done.code == 0, done
    statuses = {name: each["status"] for name, each in findings(done.out).items()}
    assert statuses.pop("tokenizer") == statuses.pop("packing") == "not applicable"
    assert set(statuses.values()) == {"passed"}, done.out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_and_every_strategy_have_what_one_has(paceline: Paceline, reviews: Path, tmp_path: Path) -> None:
    done = paceline("check", write_recipe(tmp_path, reviews), "--only", "ranks,strategies", "--json")
    assert done.code == 0, done
    found = findings(done.out)
    assert {each["status"] for each in found.values()} == {"passed"}, done.out
    assert "15 samples in steps of 7, the last of 1" in found["ranks"]["told"]
    equal = found["strategies"]["told"].partition(" on 2 ranks")[0].split(", ")
    assert {"ddp", "fsdp", "tensor"} <= set(equal), "FSDP and tensor parallel need no GPU"


def test_a_claim_is_a_line_and_a_failed_one_says_where_why_and_what_turns_it_off(
    paceline: Paceline, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "inference", lambda build: lambda batch: build.forward(build.model, batch))
    recipe = write_recipe(tmp_path, reviews)
    monkeypatch.setattr(ShuffledOrder, "_samples", with_one_twice(ShuffledOrder._samples))
    done = paceline("check", recipe, "--only", "loader,labels")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[0].startswith("labels  passed          2 classes")
    assert lines[1].startswith("loader  failed          ")
    assert "comes 2 times" in lines[1] or "comes 0 times" in lines[1], lines[1]
    told = [line.strip().partition(":")[0] for line in lines[2:5]]
    assert told == ["claim", "likely", "switch"]
    assert lines[-1].startswith("1 passed, 1 failed in ")


def with_one_twice(given: Any) -> Any:
    """The samples of a step, of which the last takes the place of the first."""

    def changed(self: ShuffledOrder, at: Any) -> Any:
        found = given(self, at).copy()
        found[0] = found[-1]
        return found

    return changed


def test_a_difference_names_the_first_tensor_and_how_far_it_is(
    paceline: Paceline, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.optim.gradients import FlatGradients

    given = FlatGradients.add
    monkeypatch.setattr(FlatGradients, "add", lambda self, loss, **more: given(self, loss * 1.5, **more))
    done = paceline("check", write_recipe(tmp_path, reviews), "--only", "loop", "--json")
    assert done.code == 1
    found = findings(done.out)["loop"]
    assert found["status"] == "failed"
    assert found["tensor"] == "gradient's norm of step 1"
    assert 0.1 < found["away"] < 1
    assert found["likely"]
    assert "techniques.packing=false" in found["switch"]


def test_a_runs_own_weights_are_checked(paceline: Paceline, reviews: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, reviews, loop={"max_steps": 2}, observe={"report": False, "console": "plain"})
    assert paceline("train", recipe, "--out", "run").code == 0
    before = sorted(path.name for path in Path("run").iterdir())
    done = paceline("check", "run", "--only", "labels,metrics,saved", "--json")
    assert done.code == 0, done
    assert {each["status"] for each in findings(done.out).values()} == {"passed"}
    assert sorted(path.name for path in Path("run").iterdir()) == before, "nothing is written into the run's folder"


def test_the_weights_of_a_run_are_those_that_are_tried(
    paceline: Paceline, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.check import labels
    from paceline.check.subject import Subject

    recipe = write_recipe(tmp_path, reviews, loop={"max_steps": 3}, observe={"report": False, "console": "plain"})
    assert paceline("train", recipe, "--out", "run", "--lr", "0.1").code == 0
    seen: list[nn.Module] = []

    def noted(subject: Subject) -> str:
        seen.append(subject.pristine)
        return ""

    monkeypatch.setattr(labels, "check", noted)
    for target in ("run", recipe):
        assert paceline("check", target, "--only", "labels").code == 0
    trained, fresh = (model.state_dict() for model in seen)
    assert not all(torch.equal(trained[name], fresh[name]) for name in fresh)


def test_the_list_needs_no_recipe(paceline: Paceline) -> None:
    done = paceline("check", "--list")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == [claim.name for claim in CLAIMS]
    assert len(paceline("check", "--list", "--only", "packing,labels").out.splitlines()) == 2


def test_claims_without_time_are_named_and_fail_nothing(paceline: Paceline, reviews: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, reviews)
    done = paceline("check", recipe, "--only", "labels,loader,metrics", "--budget", "0.01s")
    assert done.code == 0
    lines = done.out.splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["passed", "left", "left"]
    assert lines[-1] == "no time was left for: loader, metrics; try --only loader,metrics"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("tiny.yaml", "--only", "packng"), ("--only packng: no such claim", "did you mean 'packing'?", "--list")),
        (("missing.yaml",), ("missing.yaml: no such recipe",)),
        ((), ("--model and --data: missing", "paceline check RECIPE.yaml")),
        (("tiny.yaml", "--budget", "soon"), ("--budget 'soon'", "90s, 2m or 1h")),
        (("tiny.yaml", "--samples", "2"), ("--samples 2", "5 or more")),
        (("tiny.yaml", "--set", "loop.batchsize=3"), ("loop.batchsize",)),
        (("tiny.yaml", "--model", "no/such/folder"), ("no/such/folder",)),
        (("tiny.yaml", "--set", "model.config.hidden_sise=3"), ("model.config.hidden_sise", "hidden_size")),
        ((".",), ("is a folder",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_told_before_anything_starts(
    paceline: Paceline, reviews: Path, tmp_path: Path, arguments: tuple[str, ...], told: tuple[str, ...]
) -> None:
    write_recipe(tmp_path, reviews)
    done = paceline("check", *arguments)
    assert done.code == 2, done
    assert "Traceback" not in done.err
    for part in told:
        assert part in done.err, done.err
