"""What a launcher, or a person, is told of a rank that fails."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from paceline.contract.errors import DataError, Preempted, UserError
from paceline.distributed import failures
from paceline.distributed.failures import (
    PIPE_BYTES,
    REPEAT_SECONDS,
    REPORT_CHARACTERS,
    REPORT_FD,
    failures_told,
    tell_launcher,
)
from paceline.machine.cluster import LAUNCHER

HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The descriptor on which a launcher, our parent, would hear."""
    hearing, telling = os.pipe()
    os.set_blocking(hearing, False)
    monkeypatch.setenv(LAUNCHER, str(os.getppid()))
    monkeypatch.setenv(REPORT_FD, str(telling))
    yield hearing
    os.close(hearing)
    os.close(telling)


@pytest.mark.parametrize(
    ("error", "code", "is_bug", "message"),
    [
        (DataError("empty", file="a.csv", line=3), 2, False, "a.csv:3: empty"),
        (Preempted("saved"), 75, False, "saved"),
        (KeyboardInterrupt(), 130, False, "interrupted"),
        (ZeroDivisionError("ours"), 1, True, "ZeroDivisionError: ours"),
    ],
)
def test_the_launcher_is_told_instead_of_the_person(
    launcher: int, error: BaseException, code: int, is_bug: bool, message: str
) -> None:
    with pytest.raises(SystemExit) as ended, failures_told():
        raise error
    assert ended.value.code == code
    told = json.loads(os.read(launcher, 65536))
    assert (told["code"], told["is_bug"]) == (code, is_bug)
    assert told["message"].rpartition("\n")[2] == message
    assert ("Traceback" in told["message"]) == is_bug
    assert told["lost"] == []
    assert told["at"] > 0


def test_no_message_fills_the_pipe(launcher: int) -> None:
    """Telling would wait for a launcher that may be waiting for us."""
    assert tell_launcher(UserError("\0" * 100_000 + "end"))
    text = os.read(launcher, 65536)
    assert len(json.loads(text)["message"]) == REPORT_CHARACTERS
    assert tell_launcher(ValueError("\ud800" * 100_000 + "end"))
    assert json.loads(os.read(launcher, 65536))["message"].endswith("end")


def test_an_end_that_is_no_failure_is_not_told(launcher: int) -> None:
    for end in (SystemExit(0), GeneratorExit()):
        assert not tell_launcher(end)
        with pytest.raises(type(end)), failures_told():
            raise end
    with pytest.raises(BlockingIOError):
        os.read(launcher, 1)


@pytest.mark.parametrize("missing", ["launcher", "parent", "descriptor", "reader"])
def test_without_our_launcher_errors_pass_through(launcher: int, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match missing:
        case "launcher":
            monkeypatch.delenv(LAUNCHER)
        case "parent":  # a process that a rank started inherits the variables
            monkeypatch.setenv(LAUNCHER, "1" + str(os.getppid()))
        case "descriptor":
            monkeypatch.setenv(REPORT_FD, "987654")
        case "reader":
            monkeypatch.delenv(REPORT_FD)
    with pytest.raises(ValueError, match="ours"), failures_told():
        raise ValueError("ours")


@pytest.mark.parametrize(
    ("variables", "option", "said"),
    [
        ({}, None, None),
        ({**HERE, "RANK": "0", "WORLD_SIZE": "2"}, None, None),
        ({**HERE, "RANK": "1", "WORLD_SIZE": "2"}, None, "paceline: rank 1: a.csv: empty\n"),
        ({}, 3, "paceline: rank 3: a.csv: empty\n"),
        ({}, 0, None),
        # what is wrong may be the variables themselves
        ({**HERE, "RANK": "2", "WORLD_SIZE": "2"}, None, None),
    ],
)
def test_another_rank_than_the_first_says_which_it_is(
    variables: dict[str, str],
    option: int | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first one's error passes through: the command line prints it."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((SystemExit, DataError)) as ended, failures_told(option):
        raise DataError("empty", file="a.csv")
    assert capsys.readouterr().err == (said or "")
    assert isinstance(ended.value, SystemExit) == (said is not None)
    if isinstance(ended.value, SystemExit):
        assert ended.value.code == 2


def test_a_rank_of_torchruns_lets_the_first_one_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**HERE, **TORCHRUN, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    with pytest.raises(SystemExit), failures_told():
        raise DataError("empty")
    assert (waited, capsys.readouterr().err) == ([REPEAT_SECONDS], "paceline: rank 1: empty\n")
    with pytest.raises(SystemExit) as ended, failures_told():
        raise Preempted("saved")
    assert (len(waited), capsys.readouterr().err, ended.value.code) == (1, "", 75)


def test_a_bug_of_another_rank_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**HERE, "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="ours"), failures_told():
        raise ValueError("ours")


def test_the_last_collectives_come_after_the_failure(launcher: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line of their own: asking for them may fail, or never come to its end."""
    last = {"default_pg (gloo 0)": {"at": 1, "ops": {"1": "all_reduce of 3 Float"}}}
    monkeypatch.setattr(failures, "recorded", lambda: last)
    assert tell_launcher(UserError("late"))
    first, second = os.read(launcher, 65536).splitlines()
    assert json.loads(first)["message"] == "late"
    assert json.loads(second) == {"collectives": last}
    monkeypatch.setattr(failures, "recorded", lambda: {"x" * PIPE_BYTES: last})
    assert tell_launcher(UserError("late"))
    assert len(os.read(launcher, 2 * PIPE_BYTES).splitlines()) == 1, "telling would wait for who reads"

    def fails() -> None:
        raise KeyError("profiling_name")

    monkeypatch.setattr(failures, "recorded", fails)
    assert tell_launcher(UserError("late"))
    assert len(os.read(launcher, 65536).splitlines()) == 1
