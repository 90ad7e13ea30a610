"""Groups of options: what typer sees of them, what a command gets, and how it is typed again."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.verbs.cli import app
from paceline.verbs.commands.options import Changes, Source, Trusting, unfolded
from paceline.verbs.commands.ranks import Joining, Launch

calls: list[dict[str, Any]] = []


def fetch(*, source: Source, often: int = 1, ranks: Annotated[Launch, "As of others."], changes: Changes) -> None:
    """Fetch it."""
    calls.append({"source": source, "often": often, "ranks": ranks, "changes": changes})


@pytest.fixture
def run() -> Any:
    """Runs ``fetch`` with arguments: the output."""
    calls.clear()
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(unfolded(fetch))
    return lambda *arguments: CliRunner().invoke(app, arguments, catch_exceptions=False).output


def test_a_group_stands_where_the_command_has_it(run: Any) -> None:
    out = run("--help")
    assert "Fetch it." in out
    options = [word.rstrip(",") for line in out.splitlines() for word in line.split()[:1] if word.startswith("--")]
    assert options == [
        *("--model", "--data", "--often", "--gpus", "--devices", "--processes"),
        *("--set", "--epochs", "--lr", "--batch-size", "--max-length", "--seed", "--help"),
    ]
    assert out.count("As of others.") == 3


def test_a_group_comes_whole(run: Any) -> None:
    assert run("--model", "m", "--gpus", "2", "--set", "a=1", "--set", "b=2", "--batch-size", "8") == ""
    assert calls == [
        {
            "source": Source(model="m"),
            "often": 1,
            "ranks": Launch(gpus=2),
            "changes": Changes(settings=["a=1", "b=2"], batch_size="8"),
        }
    ]
    assert calls[0]["changes"].in_full() == ["a=1", "b=2", "loop.batch_size=8"]


def test_what_was_given_has_the_names_that_are_typed() -> None:
    assert Launch().given() == {}
    assert Joining(rank=0, world_size=2).given() == {"--rank": 0, "--world-size": 2}
    assert Joining(init="tcp://a:1", timeout=5).place() == ["--init"]
    assert Changes(settings=["a=1"], max_length="9").given() == {"--set": ["a=1"], "--max-length": "9"}
    assert Trusting(trust_references=True).given() == {"--trust-references": True}


def test_words_are_what_would_be_typed_again(run: Any) -> None:
    source, ranks = Source(model="some model", data="d.csv"), Launch(devices="1,3")
    assert source.words() == ["--model", "some model", "--data", "d.csv"]
    changes = Changes(settings=["a=1", "b=2"], seed="3")
    run(*source.words(), *ranks.words(), *changes.words())
    assert calls == [{"source": source, "often": 1, "ranks": ranks, "changes": changes}]


def test_the_command_can_still_be_looked_at() -> None:
    parameters = inspect.signature(unfolded(fetch), eval_str=True).parameters
    assert {"model", "often", "gpus", "settings"} <= parameters.keys()
    assert not {"source", "ranks", "changes"} & parameters.keys()


class TestSingleOptions:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--data", "a.csv", "--data", "b.csv"], "--data a.csv and --data b.csv: given twice"),
            (["--data=a.csv", "--data", "b c.csv"], "--data a.csv and --data 'b c.csv': given twice"),
            (["--lr", "1", "--epochs", "2", "--lr", "3"], "--lr 1 and --lr 3: given twice"),
        ],
    )
    def test_with_two_values_are_refused(self, words: list[str], message: str) -> None:
        done = CliRunner().invoke(app, ["train", "--model", "m", *words])
        assert done.exit_code == 2
        assert message in done.stderr
        assert "leave one of them out" in done.stderr

    @pytest.mark.parametrize(
        "words", [["--data", "a.csv", "--data", "a.csv"], ["--set", "seed=1", "--set", "name=x", "--data", "a.csv"]]
    )
    def test_with_one_value_and_repeatable_ones_are_not(self, words: list[str]) -> None:
        done = CliRunner().invoke(app, ["train", "--model", "m", *words])
        assert "given twice" not in done.stderr
        assert "a.csv" in done.stderr

    @pytest.mark.parametrize(("option", "key"), [("--data", "data.source"), ("--model", "model.source")])
    def test_that_are_set_too_are_refused(self, option: str, key: str) -> None:
        words = {"--data": "a.csv", "--model": "m"}
        typed = [word for pair in words.items() for word in pair]
        done = CliRunner().invoke(app, ["train", *typed, "--set", f"{key}=other"])
        assert done.exit_code == 2
        assert f"{option} {words[option]}: {key} is set twice" in done.stderr
