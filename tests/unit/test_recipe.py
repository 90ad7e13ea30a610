"""Recipes: in and out of YAML, changed by dotted settings, refused with a lesson."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.contract.errors import RecipeError
from paceline.recipe import Recipe, flatten, is_execution, read_yaml

BASE: dict[str, Any] = {"model": {"source": "some-model"}, "data": {"source": "rows.csv"}}


def recipe(**parts: Any) -> Recipe:
    return Recipe.parse({**BASE, **parts})


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"optimizer": {"type": "sgd", "momentum": 0.0, "nesterov": False}},
        {"optimizer": {"groups": [{"match": "*head*", "lr": 0.1, "schedule": {"type": "constant", "warmup": 0}}]}},
        {"data": {"source": "builtin:random", "random": {"length": [4, 9], "image": [8, 8, 3]}}},
        {"loop": {"evaluate_every": 50, "early_stopping": {"patience": 2}}},
    ],
)
def test_a_resolved_recipe_runs_again_as_it_is(parts: dict[str, Any]) -> None:
    written = recipe(**parts).to_yaml()
    again = Recipe.parse(yaml.safe_load(written))
    assert again.resolved() == recipe(**parts).resolved()
    assert again.to_yaml() == written


def test_plain_holds_only_what_was_set() -> None:
    assert recipe(seed=3).plain() == {**BASE, "seed": 3}


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("optimizer.lr=3e-5", "optimizer.lr", 3e-5),
        ("optimizer.betas=[0.8, 0.99]", "optimizer.betas", [0.8, 0.99]),
        ("loop.max_steps=20", "loop.max_steps", 20),
        ("loop.evaluate_every=never", "loop.evaluate_every", "never"),
        ("data.label=[toxic, rude]", "data.label", ["toxic", "rude"]),
        ("data.pair=null", "data.pair", None),
        ("techniques.recompute=true", "techniques.recompute", True),
        ("data.source=a=b.csv", "data.source", "a=b.csv"),
    ],
)
def test_settings_are_read_as_yaml(setting: str, path: str, value: Any) -> None:
    assert dict(flatten(recipe().with_settings([setting]).resolved()))[path] == value


def test_the_last_setting_wins_and_the_recipe_itself_is_left_alone() -> None:
    base = recipe()
    assert base.with_settings(["seed=1", "seed=2"]).seed == 2
    assert base.seed == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.lrr=1", r"optimizer\.lrr = 1: unknown key\n.*did you mean 'lr'"),
        ("optimiser.lr=1", r"optimiser = .*unknown key\n.*did you mean 'optimizer'"),
        ("optimizer.lr=-1", r"optimizer\.lr = '-1'\n.*greater than 0"),
        ("optimizer.lr=inf", r"optimizer\.lr = 'inf'\n.*finite number"),
        ("optimizer.lr=quick", r"optimizer\.lr = 'quick'\n.*valid number"),
        ("loop.epochs=0", r"loop\.epochs = '0'\n"),
        ("loop.evaluate_every=0", r"loop\.evaluate_every = '0'\n.*'epoch' or 'never', or greater than or equal to 1"),
        ("techniques.capture=maybe", r"techniques\.capture = 'maybe'\n.*'auto', or true or false\n.*capture=auto"),
        ("optimizer.groups=[{mach: x}]", r"optimizer\.groups\.0\.ma(t)?ch"),
        ("optimizer.momentum=0.5", r"momentum: has no effect with type: adamw"),
        ("optimizer.betas=[0.9,1.0]", r"optimizer\.betas.* = '1\.0'\n.*less than 1"),
        ("optimizer.betas=[-0.1,0.9]", r"optimizer\.betas.* = '-0\.1'\n.*greater than or equal to 0"),
        ("data.label_separator=''", r"data\.label_separator: found '', no character; YAML needs quotes"),
        ("data.label_separator=", r"data\.label_separator: found '', no character"),
        ("data.delimiter=", r"data\.delimiter: found '', no character"),
        ("data.delimiter=;;", r"data\.delimiter: one character such as"),
        ("data={label_separator: [a]}", r"data\.label_separator: found \['a'\], no character"),
        ("data.splits.validation=2.5", r"data\.splits\.validation: 2\.5 is neither a share below 1 nor a whole number"),
        ("data.splits.test=.inf", r"data\.splits\.test: inf is neither a share"),
        ("data.splits.train=-5", r"data\.splits\.train = '-5'\n.*greater than or equal to 0"),
        ("schedule.warmup=2.5", r"schedule\.warmup: 2\.5 is neither a share"),
        ("data.splits.validation=0.95", r"data\.splits: shares add up to 1.05"),
        ("model.source=null", r"no model: set model\.source"),
        ("model.factory=a.b:c", r"factory builds the whole model"),
        ("model.lora.rank=4", r"model: lora\.rank has no effect with train: all\n.*--set model\.train=lora"),
        ("model.lora.merge=true", r"model: lora\.merge has no effect with train: all"),
        ("model={source: m, train: lora, lora: {rank: 0}}", r"model\.lora\.rank = '0'\n.*greater than or equal to 1"),
        ("model={source: m, train: lora, lora: {dropout: 1.0}}", r"model\.lora\.dropout = '1\.0'\n.*less than 1"),
        ("model={source: m, train: lora, lora: {targets: []}}", r"model\.lora\.targets"),
        ("model={source: m, train: lora, lora: {targets: all}}", r"model\.lora\.targets = 'all'"),
        ("model={config: {model_type: bert}, train: lora}", r"there is none\n.*--set model\.lora\.merge=true"),
        ("model={source: m, train: lora, lora: {r: 4}}", r"r is model\.train=lora --set model\.lora\.rank=4 here"),
        ("model.train=last:0", r"model\.train = 'last:0'"),
        ("name=../../x", r"name = '../../x'"),
        ("seed", r"--set 'seed'\n.*written key=value"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_a_lesson(setting: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe().with_settings([setting])


PUNCTUATION = [*"#~|-;,:?!&*>%@`{}[]'=/\\0", " ", "\t", ", ", " | ", "||", ": ", "- ", "::"]


@pytest.mark.parametrize("mark", PUNCTUATION)
def test_punctuation_is_taken_as_it_is_typed(mark: str) -> None:
    for field in ["label_separator", "delimiter"] if len(mark) == 1 else ["label_separator"]:
        changed = recipe().with_settings([f"data.{field}={mark}"])
        assert getattr(changed.data, field) == mark
        again = recipe().with_settings([f"data.{field}={json.dumps(mark)}"])  # in YAML's quotes
        assert getattr(again.data, field) == mark
        assert getattr(Recipe.parse(yaml.safe_load(changed.to_yaml())).data, field) == mark


@pytest.mark.parametrize(
    ("typed", "mark"),
    [(r"\t", "\t"), (r'"\t"', "\t"), (r"'\t'", "\t"), (r"\n", "\n"), ("null", None), ('"null"', "null")],
)
def test_what_cannot_be_typed_is_spelled(typed: str, mark: str | None) -> None:
    assert recipe().with_settings([f"data.label_separator={typed}"]).data.label_separator == mark


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("label_separator: #", r"label_separator has no value: # begins a comment(.|\n)*label_separator: \"#\""),
        ("label_separator: ~", r"~ is null(.|\n)*or label_separator: null"),
        ("label_separator:", r"no value"),
        ("delimiter: #", r"delimiter has no value(.|\n)*delimiter: \"#\""),
        ("label_separator: |", r"data\.label_separator: found '', no character; YAML needs quotes"),
        ("label_separator: -", r"quotes|sequence entries"),
        ("delimiter: ~", r"~ is null"),
    ],
)
def test_punctuation_that_yaml_reads_as_something_else_is_refused(tmp_path: Path, written: str, message: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"model: {{source: m}}\ndata:\n  {written}\n")
    with pytest.raises(RecipeError, match=message):
        Recipe.load(file)
    file.write_text('model: {source: m}\ndata: {label_separator: null, delimiter: "\\t", split: ~}\n')
    assert Recipe.load(file).data.delimiter == "\t"


@pytest.mark.parametrize("setting", ["data.splits.test=20.0", "data.splits.test=0", "optimizer.betas=[0,0.99]"])
def test_a_setting_at_its_bounds_is_taken(setting: str) -> None:
    recipe().with_settings([setting])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", r"r\.yaml:2:1: not YAML"),
        ("- 1\n- 2\n", "a recipe is a mapping"),
        ("", "empty"),
        ("seed: 1\nseed: 2\n", "given twice"),
        ("model: !!python/object:os.system {}\n", "tag !!python/object:os.system is not read"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text(content + "\n")
    with pytest.raises(RecipeError, match=message):
        Recipe.load(tmp_path / "r.yaml")


def test_a_missing_recipe_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no such recipe\n.*--model and --data"):
        read_yaml(tmp_path / "r.yaml")


def test_fields_that_only_change_how_a_run_is_carried_out() -> None:
    for path in ("loop.micro_batch_size", "device", "techniques.recompute", "observe.console", "loop.keep_last"):
        assert is_execution(path), path
    for path in ("optimizer.lr", "loop.batch_size", "seed", "techniques.precision", "data.source", "no.such.field"):
        assert not is_execution(path), path


def test_a_recipe_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        recipe().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("written", ["auto", {}])
def test_techniques_auto_leaves_each_as_it_is_by_default(written: Any) -> None:
    assert recipe(techniques=written) == recipe()
    assert recipe(techniques=written).with_settings(["techniques.precision=bf16"]).techniques.precision == "bf16"
    changed = recipe(techniques={"precision": "fp16"}).with_settings(["techniques=auto"])
    assert changed.techniques == recipe().techniques, "auto does not undo what was set before"


def test_techniques_take_no_other_word() -> None:
    with pytest.raises(RecipeError, match="techniques = 'fast'"):
        recipe(techniques="fast")


# ---- secrets

SECRET = "S3cr3tvaluexS3cr3tvaluex"


@pytest.mark.parametrize(
    "setting",
    [
        f"data.source=https://user:{SECRET}@host/rows.csv",
        f"data.test=https://host/rows.csv?sv=1&sig={SECRET}",
        f"data.source=https://host/rows.csv?X-Amz-Signature={SECRET}&X-Amz-Date=1",
        f"model.source=hf_{SECRET}",
        f"model.config={{model_type: bert, note: npm_{SECRET}}}",
    ],
)
def test_a_recipe_that_holds_a_secret_is_refused_without_telling_it(setting: str) -> None:
    """It would be written into recipe.yaml and checkpoints, and cannot be cut out of what a resume reads."""
    with pytest.raises(RecipeError) as raised:
        recipe().with_settings([setting])
    assert f"{setting.partition('=')[0]} = " in raised.value.what
    assert "holds a secret" in raised.value.what
    assert "HF_TOKEN" in raised.value.fix
    assert "S3cr3t" not in str(raised.value)


@pytest.mark.parametrize(
    "setting",
    [
        "data.source=hub:user/data@main",
        "data.source=data/token=1/key=2/rows.csv",
        "model.config={model_type: bert, pad_token_id: 0, cls_token: '[CLS]'}",
        "optimizer.groups=[{match: '*key.weight', lr: 1e-4}]",
    ],
)
def test_names_of_tokens_and_keys_are_no_secrets(setting: str) -> None:
    recipe().with_settings([setting])


def test_recipes_of_older_runs_may_name_a_setting_that_is_gone() -> None:
    plain: dict[str, Any] = {"model": {"source": "m"}, "data": {"source": "d.csv"}}
    assert Recipe.parse({**plain, "parallel": {"sum_words": True, "bucket_mib": 25}}).parallel.bucket_mib == 25


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("techniques.cudnn_benchmark=true", "it was removed; it won nothing on a second host"),
        ("model.whitening=true", "it was removed; no run was ever measured with it"),
        ("data.augment.alternating_flip=true", r"(?s)removed.*fix: --set data.augment.flip=true"),
    ],
)
def test_a_setting_that_was_removed_is_dropped_where_it_was_off_and_explained_elsewhere(
    setting: str, message: str
) -> None:
    plain = Recipe.parse({"model": {"source": "bert"}, "data": {"source": "a.csv"}})
    assert plain.with_settings([setting.replace("true", "false")]) == plain
    with pytest.raises(RecipeError, match=message):
        plain.with_settings([setting])
