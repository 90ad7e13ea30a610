"""Signals: a run that is asked to stop does so soon, says how to go on, and loses nothing."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.contract.errors import CheckpointError, Preempted, RecipeError
from paceline.contract.stop import Stop
from paceline.engine import torch_engine
from paceline.run.checkpoint.store import CheckpointStore
from paceline.verbs.train import resume, train
from tests.e2e.whole_runs import STEPS, Crashed, Disturb, assert_same, lines, outcome, recipe
from tests.testing.marks import slow_except

TERM, INTERRUPT = signal.SIGTERM, signal.SIGINT


@contextlib.contextmanager
def signals_in(monkeypatch: pytest.MonkeyPatch, where: str, *numbers: signal.Signals, call: int = 1) -> Iterator[None]:
    """Inside, one call of the function at a dotted path sends signals before its work."""
    original, calls = pkgutil.resolve_name(where), 0

    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        for number in numbers if calls == call else ():
            os.kill(os.getpid(), number)
        return original(*arguments, **named)

    with monkeypatch.context() as during:
        during.setattr(where, wrapped)
        yield
    assert calls >= call, f"{where} was not called so often"


@pytest.mark.parametrize("number", Stop.SIGNALS, ids=lambda number: number.name)
def test_the_message_says_how_to_go_on(
    number: signal.Signals, pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    folder = tmp_path / "my run"
    disturb.signals[4] = number
    with pytest.raises(Preempted) as stopped:
        train(recipe(pretrained, reviews), out=folder)
    how = f"paceline train '{folder}' --resume goes on"
    assert str(stopped.value) == f"stopped by {number.name} after step 4 of 12; a checkpoint is saved: {how}"
    assert stopped.value.exit_code == 75
    assert CheckpointStore(folder / "checkpoints", 1).steps() == (4,)


def test_word_of_a_stop_is_there_until_the_run_goes_on(
    pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    folder = tmp_path / "run"
    disturb.signals[4] = TERM
    with pytest.raises(Preempted) as stopped:
        train(recipe(pretrained, reviews), out=folder)
    assert (folder / "preempted").read_text() == f"{stopped.value}\n"
    resume(folder)
    assert not (folder / "preempted").exists(), "whoever looks for stopped runs would resume one that has ended"


def test_asked_twice_is_asked_once(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher may repeat its SIGTERM: in the middle of a step, and in the middle of the save that follows."""
    with (
        signals_in(monkeypatch, "paceline.engine.step.Step.micro", TERM, TERM, call=4),
        signals_in(monkeypatch, "paceline.run.job.BackgroundStore.save", TERM, signal.SIGUSR1),
        pytest.raises(Preempted, match="SIGTERM after step 2 of 12"),
    ):
        train(recipe(pretrained, reviews), out=tmp_path / "run")
    whole = outcome(train(recipe(pretrained, reviews), out=tmp_path / "undisturbed"))
    assert_same(outcome(resume(tmp_path / "run")), whole)


def test_a_second_ctrl_c_interrupts_at_once(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step; what was saved before stays good."""
    chosen = recipe(pretrained, reviews, loop={"checkpoint_every": 3})
    with (
        signals_in(monkeypatch, "paceline.engine.step.Step.micro", INTERRUPT, INTERRUPT, call=11),  # the fourth step
        pytest.raises(KeyboardInterrupt),
    ):
        train(chosen, out=tmp_path / "run")
    store = CheckpointStore(tmp_path / "run" / "checkpoints", 1)
    assert store.steps() == (3,)
    assert not [path for path in store.folder.iterdir() if path.name.startswith(".")], "half a checkpoint was left"
    assert signal.getsignal(INTERRUPT) is signal.default_int_handler
    whole = outcome(train(chosen, out=tmp_path / "undisturbed"))
    assert_same(outcome(resume(tmp_path / "run")), whole)


@pytest.mark.parametrize("interrupted", slow_except([1, 2], 2))
def test_an_evaluation_is_broken_off_and_done_again(
    interrupted: int, pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine samples are two batches; after the first the flag is seen. The next start may be stopped there again."""
    chosen, folder = recipe(pretrained, reviews), tmp_path / "run"
    seen: list[int] = []
    infer = torch_engine.TorchEngine.infer
    monkeypatch.setattr(torch_engine.TorchEngine, "infer", lambda *given: seen.append(1) or infer(*given))
    for start in range(interrupted):
        with (
            signals_in(monkeypatch, "paceline.engine.torch_engine.TorchEngine.infer", TERM),
            pytest.raises(Preempted, match="after step 5 of 12"),
        ):
            resume(folder) if start else train(chosen, out=folder)
        assert len(seen) == start + 1, "the evaluation went on to its end"
        assert lines(folder, "evaluation") == []
    assert_same(outcome(resume(folder)), outcome(train(chosen, out=tmp_path / "undisturbed")))


@pytest.mark.parametrize(
    "where",
    [
        "paceline.prepare.preparation.read_config",
        "paceline.prepare.preparation.outline",
        "paceline.prepare.preparation.import_class",
        "paceline.run.job.assemble",
    ],
)
@pytest.mark.parametrize(
    "number", [TERM, pytest.param(INTERRUPT, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_before_the_first_step_nothing_is_waited_for_and_nothing_left(
    where: str, number: signal.Signals, pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        signals_in(monkeypatch, where, number),
        pytest.raises(Preempted, match=f"stopped by {number.name}; no step was made, so nothing is lost") as stopped,
    ):
        train(recipe(pretrained, reviews), out=tmp_path / "run")
    assert stopped.value.exit_code == 75
    assert not (tmp_path / "run").exists(), "a folder with nothing in it was left"
    assert train(recipe(pretrained, reviews), out=tmp_path / "run").status == "finished"


def test_before_the_first_step_of_a_resumed_run(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturb: Disturb
) -> None:
    folder = tmp_path / "run"
    disturb.signals[7] = TERM
    with pytest.raises(Preempted):
        train(recipe(pretrained, reviews), out=folder)
    with (
        signals_in(monkeypatch, "paceline.prepare.preparation.outline", TERM),
        pytest.raises(Preempted, match=r"^stopped by SIGTERM; paceline train .* --resume goes on$"),
    ):
        resume(folder)
    assert_same(outcome(resume(folder)), outcome(train(recipe(pretrained, reviews), out=tmp_path / "undisturbed")))


def test_a_warm_up_is_broken_off_without_a_word_of_torchs(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a backward pass that torch traces, which then says where its forward pass was."""

    def warm_up(engine: Any, given: Any) -> None:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            rows = torch.ones(3, requires_grad=True) * 2
            rows.register_hook(lambda gradient: os.kill(os.getpid(), TERM))
            rows.sin().sum().backward()

    monkeypatch.setattr(torch_engine.TorchEngine, "warm_up", warm_up)
    chosen, folder = recipe(pretrained, reviews, loop={"on_oom": "split"}), tmp_path / "run"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(Preempted, match="no step was made"):
            train(chosen, out=folder)
    assert not [warning for warning in said if "Error detected" in str(warning.message)]
    monkeypatch.undo()
    assert train(chosen, out=folder).status == "finished", "its folder was not given way to"


@pytest.mark.parametrize(
    "optimizer", [{}, pytest.param({"type": "sgd", "lr": 0.05}, marks=pytest.mark.slow)], ids=["adamw", "sgd"]
)
def test_between_the_first_record_and_the_first_step(
    optimizer: dict[str, Any], pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds a run by then, so it must be one that can go on."""
    chosen = recipe(pretrained, reviews, optimizer=optimizer)
    with (
        signals_in(monkeypatch, "paceline.run.beginning._started", TERM),
        pytest.raises(Preempted, match="after step 0 of 12"),
    ):
        train(chosen, out=tmp_path / "run")
    assert_same(outcome(resume(tmp_path / "run")), outcome(train(chosen, out=tmp_path / "undisturbed")))


def test_while_the_result_is_measured(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, folder = recipe(pretrained, reviews), tmp_path / "run"
    with (
        signals_in(monkeypatch, "paceline.run.run.measure", TERM),
        pytest.raises(Preempted, match=r"^stopped by SIGTERM; paceline train .* --resume goes on$"),
    ):
        train(chosen, out=folder)
    assert not (folder / "model").exists()
    assert_same(outcome(resume(folder)), outcome(train(chosen, out=tmp_path / "undisturbed")))


def test_what_is_nearly_done_is_done(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the model is saved; and while it is measured when no checkpoint holds the end."""
    with signals_in(monkeypatch, "paceline.run.ending.save_model", TERM):
        assert train(recipe(pretrained, reviews), out=tmp_path / "saving").status == "finished"
    with signals_in(monkeypatch, "paceline.run.run.measure", TERM):
        chosen = recipe(pretrained, reviews, loop={"checkpoint_every": "never", "save_best": False})
        assert train(chosen, out=tmp_path / "never").status == "finished"


def test_a_run_without_steps_stops_at_once(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(pretrained, reviews, model={"source": str(pretrained), "train": "features"}, optimizer={})
    with (
        signals_in(monkeypatch, "paceline.run.fitting.collect", TERM),
        pytest.raises(Preempted, match="no step was made"),
    ):
        train(chosen, out=tmp_path / "run")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        resume(tmp_path / "run")


def test_a_signal_that_is_ignored_stays_ignored(
    pretrained: Path, reviews: Path, tmp_path: Path, disturb: Disturb
) -> None:
    """As under nohup, or in the background of a script, where Ctrl-C is meant for others."""
    before = signal.signal(INTERRUPT, signal.SIG_IGN)
    try:
        disturb.signals[3] = INTERRUPT
        assert train(recipe(pretrained, reviews), out=tmp_path / "run").steps == STEPS
        assert signal.getsignal(INTERRUPT) is signal.SIG_IGN
    finally:
        signal.signal(INTERRUPT, before)


def test_outside_the_main_thread_a_run_takes_no_signals(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    found: list[Any] = []
    chosen = recipe(pretrained, reviews)
    thread = threading.Thread(target=lambda: found.append(train(chosen, out=tmp_path / "run")))
    thread.start()
    thread.join()
    assert [record.status for record in found] == ["finished"]


# ---- what a caller gets back


def surroundings() -> dict[str, Any]:
    return {
        "random numbers": torch.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuBLAS workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "precision": torch.get_float32_matmul_precision(),
        "handlers": [signal.getsignal(number) for number in Stop.SIGNALS],
        "folder": os.getcwd(),
        "threads": threading.active_count(),
    }


@pytest.mark.parametrize("ending", ["finished", "stopped", "interrupted", "refused", "crashed"])
def test_the_caller_finds_everything_as_it_was(
    ending: str, pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturb: Disturb
) -> None:
    handled: list[int] = []
    before_handler = signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    chosen = recipe(pretrained, reviews, deterministic=True)
    torch.manual_seed(17)
    before = surroundings()
    try:
        match ending:
            case "finished":
                train(chosen, out=tmp_path / "run")
            case "stopped":
                disturb.signals[3] = signal.SIGUSR1
                with pytest.raises(Preempted):
                    train(chosen, out=tmp_path / "run")
            case "interrupted":
                with (
                    signals_in(monkeypatch, "paceline.run.job.BackgroundStore.save", INTERRUPT, INTERRUPT),
                    pytest.raises(KeyboardInterrupt),
                ):
                    train(chosen, out=tmp_path / "run")
            case "refused":
                with pytest.raises(RecipeError):
                    train(
                        recipe(pretrained, reviews, deterministic=True, data={"max_length": 999}), out=tmp_path / "run"
                    )
            case "crashed":
                disturb.crash_at = 3
                with pytest.raises(Crashed):
                    train(chosen, out=tmp_path / "run")
        assert surroundings() == before
        assert not handled, "the caller's handler was called during the run"
    finally:
        signal.signal(signal.SIGUSR1, before_handler)


def test_training_works_where_the_caller_has_turned_gradients_off(
    pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    whole = outcome(train(recipe(pretrained, reviews), out=tmp_path / "plain"))
    with torch.no_grad():
        assert_same(outcome(train(recipe(pretrained, reviews), out=tmp_path / "no_grad")), whole)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert_same(outcome(train(recipe(pretrained, reviews), out=tmp_path / "inference")), whole)


@pytest.mark.slow
def test_equal_seeds_give_equal_bits_and_others_do_not(pretrained: Path, reviews: Path, tmp_path: Path) -> None:
    def run(name: str, **changes: Any) -> Any:
        torch.manual_seed(len(name))  # a caller's random state is of no account
        return outcome(train(recipe(pretrained, reviews, **changes), out=tmp_path / name))

    whole = run("one")
    assert_same(run("another"), whole)
    strict = run("deterministic", deterministic=True)
    assert_same(run("deterministic again", deterministic=True), strict)
    assert run("another seed", seed=1).model != whole.model
