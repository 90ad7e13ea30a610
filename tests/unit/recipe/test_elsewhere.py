"""What other libraries call a setting: the table is right about this one, errors and the page are made of it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from paceline.contract.errors import RecipeError
from paceline.recipe import Recipe, flatten
from paceline.recipe.elsewhere import TABLE, VALUES, Name
from paceline.recipe.meant import is_setting, understood
from tests.unit.test_docs import script

ENTRIES = [entry for part in TABLE.values() for entry in part]


def recipe(**more: Any) -> Recipe:
    return Recipe.parse({"model": {"source": "m"}, "data": {"source": "d.csv"}, **more})


def refusal(setting: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        recipe().with_settings([setting])
    return caught.value


SETTINGS = dict(flatten(recipe().resolved()))

WRITTEN = [(here, entry) for entry in ENTRIES for here in (entry.here, *entry.values.values()) if is_setting(here)]


@pytest.mark.parametrize(("here", "entry"), [pytest.param(*pair, id=pair[0]) for pair in WRITTEN])
def test_what_takes_its_place_is_a_setting(here: str, entry: Name) -> None:
    first, *more = here.split(" --set ")
    key = first.partition("=")[0]
    assert key in SETTINGS or key.rpartition(".")[0] in SETTINGS, f"{entry.names}: no setting {key}"
    if "=" in here and not re.search(r"=N\b|\{}", here):
        recipe().with_settings([first, *more])


def test_every_name_is_told_once_and_is_no_setting_of_ours() -> None:
    names = Counter(name for entry in ENTRIES for name in entry.names)
    assert [name for name, count in names.items() if count > 1] == []
    known = {key.partition(".")[0] for key in SETTINGS}
    assert not known & set(names), "a key of the recipe's own is not unknown"
    assert [name for name in names if name != name.lower()] == []


@pytest.mark.parametrize("entry", [pytest.param(entry, id=entry.names[0]) for entry in ENTRIES])
def test_every_name_is_answered_by_its_meaning(entry: Name) -> None:
    for name in entry.names:
        told = refusal(f"{name}=some")
        assert f"{name.rpartition('.')[2]}" in told.why
        assert "did you mean" not in told.why, "by letters"
        assert max(map(len, str(told).splitlines())) < 400, "too long to be read"
        if not entry.here:
            assert entry.note in told.why, "what has no counterpart says why"
            assert told.fix == "leave it out"


@pytest.mark.parametrize(
    ("setting", "why", "fix"),
    [
        ("learning_rate=3e-5", "learning_rate is optimizer.lr here", "--set optimizer.lr=3e-05"),
        ("optimizer.learning-rate=1", "optimizer.lr", "--set optimizer.lr=1"),
        ("per_device_train_batch_size=8", "global batch", "--set loop.batch_size=8 x GPUs"),
        ("precision=16-mixed", "", "--set techniques.precision=fp16"),
        ("strategy=ddp_sharded", "stage 3", "--set parallel.strategy=fsdp"),
        ("strategy=deepspeed_stage_2", "no package", "--set parallel.strategy=deepspeed --set parallel.stage=2"),
        ("zero_optimization={stage: 2}", "zero_optimization.stage is", "--set parallel.stage=2"),
        ("zero_optimization={offload_param: {device: cpu}}", "nvme", "--set parallel.offload=parameters"),
        # values that a setting of ours has elsewhere alone
        ("parallel.strategy=zero2", "zero2 is", "--set parallel.strategy=deepspeed --set parallel.stage=2"),
        ("parallel.strategy=ZeRO_3", "ZeRO_3 is", "--set parallel.strategy=deepspeed --set parallel.stage=3"),
        ("parallel.strategy=ddp_sharded", "ddp_sharded is", "--set parallel.strategy=fsdp"),
        ("parallel.strategy=model_parallel", "model_parallel is", "--set parallel.pipeline=2"),
        (
            "parallel.strategy=deepspeed_stage_3_offload",
            "",
            "--set parallel.strategy=deepspeed --set parallel.stage=3 --set parallel.offload=parameters",
        ),
        ("zero_optimization={stage: 0}", "", "--set parallel.strategy=ddp"),
        ("fp16={enabled: true}", "fp16 is", "--set techniques.precision=fp16"),
        ("fp16=false", "by itself", "leave it out"),
        ("max_steps=-1", "max_steps = -1 is how it is here by itself", "leave it out"),
        ("max_steps=20", "max_steps is loop.max_steps here", "--set loop.max_steps=20"),
        ("optim=adamw_torch_fused", "fused by itself", "--set optimizer.type=adamw"),
        ("optim=lion", "adamw, adam, sgd or adamw8bit", "--set optimizer.type=VALUE"),
        ("optim=adafactor", "adamw8bit", "--set optimizer.type=VALUE"),
        ("num_workers=4", "no counterpart here: texts are encoded once", "leave it out"),
        ("devices=4", "--gpus 4", "--gpus 4"),
        ("output_dir=here", "--out here", "--out here"),
        ("eval_strategy=no", "", "--set loop.evaluate_every=never"),
        # ours, in another place
        ("batch_size=16", "batch_size is loop.batch_size here", "--set loop.batch_size=16"),
        ("loop.seed=3", "loop.seed is seed here", "--set seed=3"),
        ("optimizer.params={lr: 1, eps: 2}", "optimizer.params.eps is", "--set optimizer.lr=1 --set optimizer.eps=2"),
        # and what is only a letter away
        ("loop.epoch=3", "did you mean 'epochs'?", "loop.epochs"),
        ("optimiser.lr=1", "did you mean 'optimizer'?", "optimizer"),
    ],
)  # fmt: skip
def test_a_key_is_led_to_what_it_means(setting: str, why: str, fix: str) -> None:
    told = refusal(setting)
    assert why in told.why
    assert told.fix == fix


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("ddp_sharded", ["parallel.strategy=fsdp"]),
        ("DDP_Spawn", ["parallel.strategy=ddp"]),
        ("deepspeed_stage_2", ["parallel.strategy=deepspeed", "parallel.stage=2"]),
        (
            "deepspeed_stage_3_offload",
            ["parallel.strategy=deepspeed", "parallel.stage=3", "parallel.offload=parameters"],
        ),
        ("zero-2", ["parallel.strategy=deepspeed", "parallel.stage=2"]),
        ("model_parallel", ["parallel.pipeline=2"]),
        ("apex", ["parallel.strategy=ddp"]),
    ],
)
def test_names_of_strategies_elsewhere_are_understood(name: str, here: list[str]) -> None:
    kept, told = understood(["seed=3", f"parallel.strategy={name}", "loop.epochs=2"])
    assert kept == ["seed=3", *here, "loop.epochs=2"]
    assert told == [f"parallel.strategy={name} is --set {' --set '.join(here)} here"]
    recipe().with_settings(kept)


def test_names_here_and_those_without_one_meaning_are_left() -> None:
    asked = ["parallel.strategy=fsdp", "parallel.strategy=hybrid_shard", "parallel.strategy=warp"]
    assert understood(asked) == (asked, [])


def test_every_strategy_elsewhere_is_one_here() -> None:
    for path, names in VALUES.items():
        for name in names:
            kept, told = understood([f"{path}={name}"])
            if told:
                recipe().with_settings(kept)
            else:
                assert names[name].endswith("=N"), name


def test_a_pasted_configuration_is_answered_in_one_go() -> None:
    """Of many keys a handful at a time: the message stays short enough to be read."""
    pasted = {"learning_rate": 1e-5, "num_train_epochs": 2, "fp16": True, "tf32": True, "report_to": "wandb"}
    with pytest.raises(RecipeError) as caught:
        recipe(**pasted)
    assert caught.value.fix == "--set optimizer.lr=1e-05 --set loop.epochs=2 --set techniques.precision=fp16", (
        "one of two"
    )
    with pytest.raises(RecipeError, match="and 2 more such keys") as many:
        recipe(**pasted, warmup_ratio=0.1, output_dir="x")
    assert max(map(len, str(many.value).splitlines())) < 400


def test_the_page_is_made_of_the_table() -> None:
    writer = script("coming_from")
    written = writer.PAGE.read_text(encoding="utf-8")
    assert written == writer.page(written), "run: python scripts/coming_from.py"
    for entry in ENTRIES:
        assert all(f"`{name}`" in written for name in entry.names)
