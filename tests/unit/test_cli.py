"""The command line: what reaches the verbs, and what reaches the person. The verbs themselves are stood in for."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.models import OptionInfo

from paceline import __version__
from paceline.contract.errors import DataError, Preempted, RecipeError
from paceline.contract.records import EvaluationRecord
from paceline.recipe import Recipe
from paceline.verbs import asked, cli

RECIPE = """
name: told
model: {config: {model_type: bert}, vocabulary_size: 900}
data: {source: old.csv, test: old-test.csv, text: review}
loop: {epochs: 2}
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command as a shell would: exit code, standard output, standard error."""

    def invoke(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        try:
            cli.main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
        output = capsys.readouterr()
        return code, output.out, output.err

    return invoke


@pytest.mark.parametrize("module", ["paceline", "paceline.verbs.cli"])
def test_it_is_a_module_to_start_too(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"paceline {__version__}\n"


@pytest.mark.parametrize("option", ["--local-rank=1", "--local_rank=0"])
def test_what_torchs_old_launcher_puts_first_is_left_out(run: Run, option: str) -> None:
    code, out, err = run(option, "--version")
    assert (code, err) == (0, "")
    assert out.startswith("paceline ")
    assert run("--local-rank=x", "--version")[0] == 2


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Puts a function in a module's place that notes its calls, and returns or raises what is given."""

    def replace(module: str, *names: str, result: Any = None) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            if isinstance(result, BaseException):
                raise result
            return result

        fake = types.ModuleType(module)
        for name in names:
            setattr(fake, name, noted)
        monkeypatch.setitem(sys.modules, module, fake)
        return calls

    return replace


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "my recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_help_names_every_command_and_version_is_ours(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in (
        "train", "launch", "evaluate", "predict", "demo", "doctor", "techniques", "schema", "report", "data", "convert",
        "restore",
    ):  # fmt: skip
        assert f"\n  {command} " in out
    assert "..." not in out.partition("Commands:")[2], "a summary is cut off"
    assert run("--version") == (0, f"paceline {__version__}\n", "")


@pytest.mark.parametrize(
    "command", [command.name or command.callback.__name__ for command in cli.app.registered_commands]
)
def test_the_help_of_every_command_shows_how_it_is_typed(run: Run, command: str) -> None:
    code, out, _ = run(command, "-h")
    assert code == 0
    assert f"\n  paceline {command}" in out.partition("Options:")[0].partition("Usage:")[2], "no example"


@pytest.mark.parametrize(
    ("arguments", "suggestion"), [(["trian"], "train"), (["train", "--modle", "x"], "--model"), (["predict"], "RUN")]
)
def test_usage_errors_exit_2_and_name_the_nearest(run: Run, arguments: list[str], suggestion: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert suggestion in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate"], "calibrate: no such command\n  why: calibrate has no counterpart here: it was removed"),
        (["epochs"], "epochs: no such command\n  why: epochs is loop.epochs here"),
        (["finetune"], "fix: paceline train --model NAME --data FILE"),
        (["launch", "torchrun", "r.yaml", "--hosts", "a", "--ssh"], "--ssh: no such option\n  why: ssh has no"),
    ],
)
def test_a_command_that_is_gone_or_called_otherwise_is_explained(run: Run, arguments: list[str], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err


def test_no_option_is_spelled_by_what_stands_for_its_value() -> None:
    """typer 0.27 names an option ``--KIND`` whose metavar is its name in capitals; 0.28 does not."""
    for command in cli.app.registered_commands:
        for name, parameter in inspect.signature(command.callback, eval_str=True).parameters.items():
            for given in getattr(parameter.annotation, "__metadata__", ()):
                if given.metavar == name.upper() and isinstance(given, OptionInfo):
                    # in an annotation the first name stands where a default would
                    assert given.default == f"--{name}", command.callback.__name__


def test_train_takes_model_and_data_alone(run: Run, stand_in: Any) -> None:
    calls = stand_in("paceline.verbs.train", "train", "resume")
    code, _, err = run(
        "train", "--model", "some/model", "--data", "d/my reviews.csv.gz", "--out", "here", "--on-bad-row", "skip",
        "--set", "seed=3", "--set", "optimizer.lr=3e-5",
    )  # fmt: skip
    assert code == 0, err
    ((recipe,), options) = calls[0]
    assert (options.pop("started") > 0, options) == (True, {"out": Path("here")})
    assert (recipe.model.source, recipe.data.source, recipe.name) == ("some/model", "d/my reviews.csv.gz", "my-reviews")
    assert (recipe.seed, recipe.optimizer.lr, recipe.data.on_bad_row) == (3, 3e-5, "skip")


def test_train_takes_a_recipe_and_lays_the_options_over_it(run: Run, stand_in: Any, recipe_file: Path) -> None:
    calls = stand_in("paceline.verbs.train", "train", "resume")
    assert run("train", recipe_file)[0] == 0
    assert run("train", recipe_file, "--model", "m", "--data", "new.csv", "--set", "loop.epochs=5")[0] == 0
    plain, changed = (call[0][0] for call in calls)
    assert plain == Recipe.load(recipe_file)
    assert (changed.name, changed.loop.epochs) == ("told", 5)
    assert (changed.model.source, changed.model.config) == ("m", None), "the file's model is replaced as a whole"
    assert (changed.data.source, changed.data.test) == ("new.csv", None), "another source has other test data"
    assert changed.data.text == "review", "what is not of the source alone stays"


UNTRUSTED = {"trust_remote_code": False, "trust_references": False}


def test_resume_takes_a_folder_and_settings(run: Run, stand_in: Any, tmp_path: Path) -> None:
    calls = stand_in("paceline.verbs.train", "train", "resume")
    assert run("train", tmp_path, "--resume", "--set", "loop.epochs=9", "--trust-references")[0] == 0
    assert calls[0][0] == (tmp_path, ["loop.epochs=9"])
    assert calls[0][1].pop("started")
    assert calls[0][1] == {"trust_remote_code": False, "trust_references": True}


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("model.factory=nets:build", "factory", "nets:build"),
        ("model.config={model_type: bert}", "config", {"model_type": "bert"}),
        ("model.config.model_type=bert", "config", {"model_type": "bert"}),
        ("model.source=some/model", "source", "some/model"),
    ],
)
def test_a_model_can_be_set_where_no_option_names_it(
    run: Run, stand_in: Any, setting: str, field: str, value: object
) -> None:
    calls = stand_in("paceline.verbs.train", "train", "resume")
    assert run("train", "--data", "d.csv", "--set", setting)[::2] == (0, "")
    assert run("train", "--set", setting, "--set", "data.source=e.csv")[::2] == (0, "")
    by_option, by_setting = (call[0][0] for call in calls)
    assert getattr(by_option.model, field) == value
    assert by_option.model == by_setting.model
    assert (by_option.name, by_setting.name, by_setting.data.source) == ("d", "e", "e.csv")


def test_a_folder_in_a_recipes_place_is_told_by_what_is_in_it(run: Run, tmp_path: Path, recipe_file: Path) -> None:
    """Advice to resume what is no run, or has ended, would be refused in turn."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert f"--model {folder} --data FILE" in run("train", folder)[2]
    shutil.copy(recipe_file, folder / "recipe.yaml")
    assert f"paceline train {folder} --resume" in run("train", folder)[2]
    assert f"paceline plan {folder}/recipe.yaml" in run("plan", folder)[2]
    (folder / "summary.json").write_text("{}")
    told = run("train", folder)[2]
    assert "--resume" not in told
    assert f"paceline train {folder}/recipe.yaml" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "--model and --data: missing"),
        (["train", "--data", "x.csv"], "--model: missing"),
        (["train", "."], "paceline train --model NAME --data ."),
        (["train", "--data", "x.csv", "--set", "model.train=head"], "--model: missing"),
        (["train", "--set", "model.factory=a:b"], "--data: missing"),
        (["train", "--resume"], "no run folder given"),
        (["train", "runs/x", "--resume", "--data", "x.csv"], "--resume with --data"),
        (["train", "none.yaml"], "none.yaml: no such recipe"),
        (["train", "--model", "m", "--data", "d", "--gpus", "2", "--processes", "2"], "--gpus 2 with --processes 2"),
        (["train", "--model", "m", "--data", "d", "--set", "optimizer.lrr=1"], "did you mean"),
        (["data", "imbd", "folder"], "did you mean 'imdb'"),
    ],
)
def test_what_train_cannot_do_exits_2_with_the_way_out(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (
            DataError("empty text", file="a.csv", line=3, fix="delete it"),
            2,
            "paceline: a.csv:3: empty text\n  fix:",
        ),
        (RecipeError("device = cuda", "no GPU", "--set device=cpu"), 2, "why: no GPU\n  fix: --set device=cpu"),
        (Preempted("stopped after step 7"), 75, "stopped after step 7"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_messages_and_exit_codes(
    run: Run, stand_in: Any, raised: BaseException, code: int, message: str
) -> None:
    stand_in("paceline.verbs.train", "train", "resume", result=raised)
    found, out, err = run("train", "--model", "m", "--data", "d.csv")
    assert found == code
    assert message in err
    assert "Traceback" not in err
    assert out == ""


def test_a_bug_keeps_its_traceback(run: Run, stand_in: Any) -> None:
    stand_in("paceline.verbs.train", "train", "resume", result=ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError, match="ours"):  # Python prints it and exits with 1
        run("train", "--model", "m", "--data", "d.csv")


def test_evaluate_prints_a_table(run: Run, stand_in: Any) -> None:
    record = EvaluationRecord(
        split="test", step=9, epoch=1, loss=0.25, metrics={"accuracy": 0.9, "f1": 0.8}, samples=1200, seconds=1.5
    )
    calls = stand_in("paceline.verbs.evaluate", "evaluate", result=record)
    code, out, _ = run("evaluate", "runs/x", "--data", "t.csv", "--set", "data.text=review")
    assert code == 0
    given = {"data": "t.csv", "split": "test", "settings": ["data.text=review"], **UNTRUSTED}
    assert calls == [((Path("runs/x"),), given)]
    assert out == "t.csv: 1,200 samples in 1.5 s\n  loss      0.2500\n  accuracy  0.9000\n  f1        0.8000\n"


def test_the_other_commands_hand_over_their_arguments(run: Run, stand_in: Any) -> None:
    predict = stand_in("paceline.verbs.predict", "predict", result=1200)
    convert = stand_in("paceline.models.convert", "convert", result=[Path("old/model.safetensors")])
    files = [Path("d/train.jsonl"), Path("d/test.jsonl")]
    fetch = stand_in("paceline.verbs.data", "data", result=files)
    report = stand_in("paceline.verbs.report", "report", result=Path("runs/x/report.html"))
    demo = stand_in("paceline.verbs.demo", "demo")
    assert run("predict", "runs/x", "new.csv", "-o", "out.csv") == (0, "wrote out.csv: 1,200 rows\n", "")
    assert run("convert", "old") == (0, "wrote old/model.safetensors\n", "")
    assert run("report", "runs/x") == (0, "wrote runs/x/report.html\n", "")
    assert run("data", "imdb", "d") == (0, "wrote d/train.jsonl\nwrote d/test.jsonl\n", "")
    assert run("demo")[0] == 0
    assert predict == [((Path("runs/x"), "new.csv", Path("out.csv")), {"settings": (), **UNTRUSTED, "safe_csv": False})]
    assert convert == [((Path("old"),), {})]
    assert fetch == [(("imdb", Path("d")), {})]
    assert report == [((Path("runs/x"),), {})]
    assert demo == [((), {})]


def test_techniques_and_schema_print_themselves(run: Run) -> None:
    code, out, _ = run("techniques")
    assert code == 0
    assert "speed and memory" in out
    code, out, _ = run("techniques", "precision")
    assert code == 0
    assert "techniques.precision = auto | fp32 | tf32 | bf16 | fp16 | pure_bf16  (default auto)" in out
    assert "preserves  up to rounding; pure_bf16 changes the result" in out
    code, out, _ = run("techniques", "recompute")
    assert code == 0
    assert "preserves  bit-exact" in out
    assert "excludes   model.train=head|features" in out
    code, out, _ = run("schema")
    assert code == 0
    assert out.startswith("{")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("a/texts.csv.gz", "texts"),
        ("hub:org/set", "set"),
        ("builtin:digits", "digits"),
        ("a/b/", "b"),
        ("/", "run"),
    ],
)
def test_run_names_come_from_the_data(source: str, name: str) -> None:
    assert asked._run_name(source) == name


def test_an_error_does_not_tell_a_secret(run: Run) -> None:
    code, _, err = run("train", "--model", "m", "--data", "d.csv", "--set", "https://user:S3cr3t@host/rows.csv")
    assert code == 2
    assert "S3cr3t" not in err
    assert "https://[redacted]@host/rows.csv" in err
