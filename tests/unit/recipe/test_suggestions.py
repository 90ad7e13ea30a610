"""Suggestions for unknown keys, values and options: by meaning, else by spelling, else none."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from paceline.contract.errors import RecipeError
from paceline.recipe import Recipe
from paceline.recipe.suggestions import suggest_option, translate_settings
from paceline.recipe.terms import Term, find_term, is_setting, read_sections

TERMS = [term for section in read_sections() for term in section.terms]
PLACEHOLDERS = {"N": "2", "FACTOR": "0.1", "NAME": "loss", "MODULE:FUNCTION": "functions:factor"}
"""What stands in capitals in a suggestion, and what a user may write for it."""

VALUES = {
    "model.lora.targets": "[q_lin]",
    "optimizer.ema": 0.999,
    "optimizer.layer_decay": 0.9,
    "task.label_smoothing": 0.1,
    "task.class_weights": "balanced",
    "task.type": "regression",
    "optimizer.loss_scale.backoff_factor": 0.5,
    "parallel.backend": "nccl",
    "parallel.reduce_dtype": "bf16",
    "data.normalise": "imagenet",
    "model.vocabulary_size": 8000,
    "data.max_length": 128,
    "model.train=lora --set model.lora.targets={}": "[q_lin]",
}
"""Setting -> a value that it takes, where neither true, 2, 0.5 nor a word is one."""


def recipe(**more: Any) -> Recipe:
    return Recipe.parse({"model": {"source": "m"}, "data": {"source": "d.csv"}, **more})


def refusal(setting: str) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        recipe().with_settings([setting])
    return caught.value


def settings_of(fix: str) -> list[str]:
    """The settings that a shell would pass on of ``--set A=B --set C=D``, with placeholders filled in."""
    words = shlex.split(fix)
    assert words[::2] == ["--set"] * (len(words) // 2), fix
    pairs = [word.split("=", 1) for word in words[1::2]]
    return [f"{path}={PLACEHOLDERS.get(value, value)}" for path, value in pairs]


def check_settings(fix: str) -> None:
    """The recipe takes the settings of a fix."""
    in_its_place = ["model.source=null"] * ("model.factory" in fix)
    recipe().with_settings([*in_its_place, *settings_of(fix)])


@pytest.mark.parametrize("term", [pytest.param(term, id=term.names[0]) for term in TERMS])
def test_every_name_is_answered_by_its_meaning(term: Term) -> None:
    for name in term.names:
        if "." in name or not name.isascii():
            continue  # no key is written so
        error = refusal(f"{name}=some")
        assert "did you mean" not in error.why, "by letters"
        assert max(map(len, str(error).splitlines())) < 400, "too long to be read"
        if not term.here:
            assert error.fix == "leave it out" or " is " in error.why, error


@pytest.mark.parametrize("term", [pytest.param(term, id=term.names[0]) for term in TERMS if is_setting(term.here)])
def test_every_suggested_setting_can_be_set(term: Term) -> None:
    """With some value that the setting takes, and with each value that has a meaning of its own."""
    values: list[Any] = [VALUES.get(term.here), True, 2, 0.5, "some"]
    errors = []
    for value in [value for value in values if value is not None]:
        suggestion = suggest_option(term.names[0], str(value).lower())
        assert suggestion is not None
        if "VALUE" in suggestion.fix:
            break  # only values of the table have a meaning
        try:
            check_settings(suggestion.fix)
        except RecipeError as error:
            errors.append(error)
        else:
            break
    else:
        raise AssertionError(errors)
    for value, here in term.values.items():
        suggestion = suggest_option(term.names[0], value)
        assert suggestion is not None
        if here and not suggestion.command:
            check_settings(suggestion.fix)
        assert suggestion.fix or not here, value


@pytest.mark.parametrize(
    ("setting", "why", "fix"),
    [
        ("learning_rate=3e-5", "learning_rate is optimizer.lr here", "--set optimizer.lr=3e-05"),
        ("optimizer.learning-rate=1", "optimizer.lr", "--set optimizer.lr=1"),
        ("per_device_train_batch_size=8", "(x GPUs x gradient", "--set loop.batch_size=8"),
        ("precision=16-mixed", "", "--set techniques.precision=fp16"),
        ("strategy=ddp_sharded", "stage 3", "--set parallel.strategy=fsdp"),
        ("strategy=deepspeed_stage_2", "no package", "--set parallel.strategy=deepspeed --set parallel.stage=2"),
        (
            "zero_optimization={stage: 2}",
            "zero_optimization.stage is",
            "--set parallel.strategy=deepspeed --set parallel.stage=2",
        ),
        (
            "zero_optimization={offload_param: {device: cpu}}",
            "nvme",
            "--set parallel.strategy=deepspeed --set parallel.stage=3 --set parallel.offload=parameters",
        ),
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
        ("fp16=false", "needs no setting here", "leave it out"),
        ("max_steps=-1", "max_steps = -1 needs no setting here", "leave it out"),
        ("max_steps=20", "max_steps is loop.max_steps=20 here", "--set loop.max_steps=20"),
        ("optim=adamw_torch_fused", "each is fused", "--set optimizer.type=adamw"),
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
        ("loop.epochz=3", "did you mean 'epochs'?", "--set loop.epochs=3"),
        ("optimiser.lr=1", "did you mean 'optimizer'?", "--set optimizer.lr=1"),
        ("optimizer.ema={warm_up: true}", "did you mean 'warmup'?", "--set optimizer.ema.warmup=true"),
        ("optimizer.type=AdamW", "AdamW is optimizer.type=adamw here", "--set optimizer.type=adamw"),
        ("schedule.type=cosin", "it is linear or cosine", "--set schedule.type=cosine"),
        # by meaning, where letters would lead elsewhere
        ("amp=true", "amp is techniques.precision=fp16 here", "--set techniques.precision=fp16"),
        ("eta_min=1e-6", "a factor of the rate", "--set schedule.floor=FACTOR"),
        ("log_level=error", "no levels", "leave it out"),
        ("ema=0.999", "ema is optimizer.ema=0.999 here", "--set optimizer.ema=0.999"),
        ("ema=true", "ema is", "--set optimizer.ema=0.999"),
        ("sync_bn=true", "over all ranks", "--set parallel.sync_batch_norm=true"),
        ("lr_lambda=f", "function(step, total_steps)", "--set schedule.type=MODULE:FUNCTION"),
        ("T_max=50", "the period is the whole run", "--set schedule.type=cosine"),
        ("print_every=50", "observe.log_every", "--set observe.log_every=50"),
        ("techniques.precision=16", "a loss scale", "--set techniques.precision=fp16"),
        ("techniques.precision=half", "eps of 1e-8 is 0 in pure fp16", "--set techniques.precision=fp16"),
        ("techniques.precision=float16", "eps of 1e-8 is 0 in pure fp16", "--set techniques.precision=fp16"),
        ("techniques.precision=64", "the widest format", "--set techniques.precision=fp32"),
        ("techniques.precision=fp8", "in 8 or 4 bits", "--set techniques.precision=auto"),
        ("techniques.precision=pure_fp16", "Adam's eps", "--set techniques.precision=pure_bf16"),
        ("schedule.type=CosineAnnealingLR", "schedule.type=cosine here", "--set schedule.type=cosine"),
        ("optimizer.type=bitsandbytes", "adamw8bit here", "--set optimizer.type=adamw8bit"),
        ("devices=[1]", "devices is --devices 1 here", "--devices 1"),
        ("devices=[0, 2]", "--devices 0,2", "--devices 0,2"),
        ("adam_beta1=0.8", "both in one list", "--set 'optimizer.betas=[0.8,0.999]'"),
        ("num_cycles=0.5", "", "--set schedule.type=cosine"),
        ("lora_r=4", "", "--set model.train=lora --set model.lora.rank=4"),
        # a setting of ours goes before a word of the same name
        ("model.rank=3", "model.rank is model.lora.rank here", "--set model.lora.rank=3"),
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
def test_names_of_strategies_elsewhere_are_translated(name: str, here: list[str]) -> None:
    translated, notices = translate_settings(["seed=3", f"parallel.strategy={name}", "loop.epochs=2"])
    assert translated == ["seed=3", *here, "loop.epochs=2"]
    assert notices == [f"parallel.strategy={name} is --set {' --set '.join(here)} here"]
    recipe().with_settings(translated)


def test_names_here_and_those_without_one_meaning_are_left() -> None:
    settings = ["parallel.strategy=fsdp", "parallel.strategy=hybrid_shard", "parallel.strategy=warp"]
    assert translate_settings(settings) == (settings, [])


def test_every_strategy_elsewhere_is_one_here() -> None:
    strategies = find_term("strategy")
    assert strategies is not None
    assert len(strategies.values) > 30
    for name, here in strategies.values.items():
        translated, _ = translate_settings([f"parallel.strategy={name}"])
        if not here.endswith("=N"):
            recipe().with_settings(translated)


@pytest.mark.parametrize(
    "setting",
    ["amq=1", "eta=1", "namex_of_it=1", "loop.minimum=1", "optimizer.rl=3", "techniques.xyz=true", "data.xyz=1"],
)
def test_a_key_that_is_near_none_gets_no_neighbour(setting: str) -> None:
    error = refusal(setting)
    assert "did you mean" not in error.why
    assert "known: " in error.why
    assert error.fix.startswith("leave it out")


def test_keys_of_one_setting_share_a_fix() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(adam_beta1=0.8, adam_beta2=0.95, lora_r=4, lora_alpha=8)
    assert settings_of(caught.value.fix) == [
        "optimizer.betas=[0.8,0.95]",
        "model.train=lora",
        "model.lora.rank=4",
        "model.lora.alpha=8",
    ]
    check_settings(caught.value.fix)


def test_a_value_that_cannot_be_typed_is_left_to_the_user() -> None:
    assert refusal("learning_rate='1\x1b[31m'").fix == "--set optimizer.lr=VALUE"
    assert refusal(f"learning_rate={'1' * 999}x").fix == "--set optimizer.lr=VALUE"


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
