"""The command is asked to stop while something hangs that nothing can interrupt: exit code 75 within ten seconds."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import TCPStore

from paceline.distributed.sockets import listen
from tests.e2e.whole_runs import recipe
from tests.testing.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("forked_interpreters")]

SECONDS = 10

SLOW_MACHINE = 6
"""Seconds more than the docs say, where other tests run too."""

CODE = """
import os, pkgutil, sys, time

def hangs(original, call, seconds):
    calls = 0
    def called(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls == call:
            until, is_told = time.monotonic() + seconds, False
            while time.monotonic() < until or not is_told:
                try:
                    if not is_told:
                        is_told = True
                        open("hangs", "w").close()
                    time.sleep(0.05)
                except BaseException:  # as some libraries do, or while C code is at work
                    pass
        return original(*arguments, **named)
    return called

where, call, seconds = {where!r}, {call}, {seconds}
if where and os.environ.get("RANK") in ({rank!r} or os.environ.get("RANK"),):
    holder, _, name = where.rpartition(".")
    found = pkgutil.resolve_name(holder)
    setattr(found, name, hangs(getattr(found, name), call, seconds))
sys.argv[0] = "paceline"
from paceline.__main__ import main

main()
"""


@pytest.fixture
def place(pretrained: Path, reviews: Path, tmp_path: Path) -> Path:
    """A folder with recipe.yaml."""
    write_recipe(tmp_path, pretrained, reviews)
    return tmp_path


def write_recipe(place: Path, model: Path, data: Path, **changes: Any) -> None:
    base = {"loop": {"checkpoint_every": 1}, "observe": {"console": "plain"}, **changes}
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe(model, data, **base).plain()))


@contextlib.contextmanager
def started(
    place: Path, *words: str, where: str = "", call: int = 1, seconds: float = 1e9, rank: str = "", **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """The command in a session of its own, in which a call of the function at a dotted path hangs: on all ranks, or on
    one."""
    code = CODE.format(where=where, call=call, seconds=seconds, rank=rank)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(place / "cache"), **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", *words],  # which ranks are started by, too
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def asked(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> str:
    """Ask the whole group to stop, as a scheduler does; what is said on standard error."""
    began = time.monotonic()
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    assert process.returncode == 75, errors
    assert f"paceline: stopped by {number.name}" in errors
    assert "Traceback" not in errors
    assert seconds < SECONDS, f"{seconds:.1f} s"
    return errors


def await_file(process: subprocess.Popen[str], path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def finished(place: Path, *words: str) -> None:
    with started(place, *words) as process:
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert (place / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "where",
    [
        "paceline.prepare.preparation.import_class",
        "paceline.data.prepare.encode_texts",
        "paceline.prepare.preparation.outline",
        "paceline.run.job.assemble",
    ],
    ids=["import", "tokenising", "model", "assembling"],
)
def test_before_the_run_has_begun(where: str, place: Path) -> None:
    with started(place, "recipe.yaml", "--out", "run", where=where) as process:
        await_file(process, place / "hangs")
        assert "no step was made, so nothing is lost: start it again" in asked(process, signal.SIGHUP)
    finished(place, "recipe.yaml", "--out", "run")


def test_while_a_module_is_imported(place: Path) -> None:
    (place / "endless.py").write_text("import time\nopen('hangs', 'w').close()\ntime.sleep(1000)\n")
    with started(place, "recipe.yaml", "--out", "run", "--set", "task.loss=endless:loss") as process:
        await_file(process, place / "hangs")
        assert "\n  where: <module> (" in (errors := asked(process)), errors
        assert "/endless.py:3), called by " in errors


def test_while_a_model_is_downloaded(place: Path) -> None:
    """A Hub that takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        hub |= {"HF_HOME": str(place / "home"), "HF_HUB_ETAG_TIMEOUT": "1000", "HF_HUB_DOWNLOAD_TIMEOUT": "1000"}
        with started(place, "recipe.yaml", "--model", "someone/tiny", "--out", "run", **hub) as process:
            server.settimeout(120)
            connection, _ = server.accept()
            with connection:
                time.sleep(0.5)
                asked(process)


def test_while_blocks_are_compiled(place: Path) -> None:
    """The group's signal reaches the C++ compilers too, which die of it."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    where = "paceline.techniques.compile.TrainingPass.__call__"
    words = ["recipe.yaml", "--out", "run", "--set", "techniques.compile=true"]
    with started(place, *words, where=where, seconds=0, **cache) as process:
        await_file(process, place / "hangs")
        time.sleep(3)
        assert "no step was made, so nothing is lost: start it again" in asked(process)
    finished(place, "recipe.yaml", "--out", "run")


def test_while_a_compilation_hangs(place: Path) -> None:
    words = ["recipe.yaml", "--out", "run", "--set", "techniques.compile=true"]
    with started(place, *words, where="paceline.engine.torch_engine.TorchEngine.warm_up_on") as process:
        await_file(process, place / "hangs")
        assert "no step was made, so nothing is lost: start it again" in asked(process)


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("paceline.engine.step.Step.micro", 9),
        ("paceline.engine.torch_engine.TorchEngine.infer", 2),
        ("paceline.run.ending.save_model", 1),
        ("paceline.run.run.measure", 1),
    ],
    ids=["step", "evaluation", "saved model", "last evaluation"],
)
def test_in_the_middle_of_the_run(where: str, call: int, place: Path) -> None:
    """What hangs is given up, and the run goes on from the last checkpoint."""
    with started(place, "recipe.yaml", "--out", "run", where=where, call=call) as process:
        await_file(process, place / "hangs")
        time.sleep(1)  # so that the last checkpoint is on the disk
        errors = asked(process)
    assert f"paceline train {place / 'run'} --resume goes on" in errors
    assert "--resume goes on" in (place / "run" / "preempted").read_text()
    finished(place, str(place / "run"), "--resume")


def test_a_checkpoint_is_seen_through(place: Path) -> None:
    with started(
        place, "recipe.yaml", "--out", "run", where="paceline.run.checkpoint.store._commit", call=3, seconds=7.5
    ) as process:
        await_file(process, place / "hangs")
        assert "a checkpoint is saved" in asked(process, signal.SIGUSR2)
    finished(place, str(place / "run"), "--resume")


@pytest.mark.parametrize("where", ["paceline.prepare.preparation.outline", "paceline.engine.step.Step.micro"])
def test_on_two_ranks(where: str, place: Path) -> None:
    """Both hang, and are asked through our launcher; each has a last resort, and it is told once."""
    with started(place, "recipe.yaml", "--out", "run", "--processes", "2", where=where) as process:
        await_file(process, place / "hangs")
        assert asked(process).count("stopped by SIGTERM") == 1
    finished(place, "recipe.yaml", "--out", "run")


def test_a_rank_that_hangs_takes_the_others_with_it(place: Path) -> None:
    """It alone is asked; the other waits for it in an all-reduce, and hears of its end."""
    words = ["recipe.yaml", "--out", "run", "--init", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2", "--rank"]
    where = "paceline.engine.step.Step.micro"
    with started(place, *words, "0") as first, started(place, *words, "1", where=where, call=9) as second:
        await_file(second, place / "hangs")
        time.sleep(1)
        began = time.monotonic()
        os.killpg(second.pid, signal.SIGTERM)
        _, errors = first.communicate(timeout=60)
        assert time.monotonic() < began + SECONDS + 5
        assert second.wait(20) == 75
    assert first.returncode == 75, errors
    assert "rank 1 was stopped: stopped by SIGTERM, and what was under way did not end" in errors
    assert "Traceback" not in errors
    finished(place, str(place / "run"), "--resume")


def test_a_thread_that_never_ends_does_not_hold_the_process(place: Path, real_interpreters: None) -> None:
    """As a download has one, which Python waits for on its way out; and a second signal does not end it by itself."""
    (place / "endless.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[1000]).start()\n"
        "def loss(logits, labels): return logits.sum(1)\n"
        "open('hangs', 'w').close()\n"
        "time.sleep(2)\n"
    )
    with started(place, "recipe.yaml", "--out", "run", "--set", "task.loss=endless:loss") as process:
        await_file(process, place / "hangs")
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(4)
        assert process.poll() is None, "it ended by itself: this test saw nothing"
        asked(process)


def waited_for_in_vain(place: Path, where: str, *, call: int, rank: str) -> str:
    """What is said of two ranks of which one hangs, and nobody asks it to stop, until the other's time is up."""
    words = ["recipe.yaml", "--out", "run", "--processes", "2", "--timeout", "5"]
    with started(place, *words, where=where, call=call, rank=rank) as process:
        await_file(process, place / "hangs")
        began = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() < began + 5 + 8 + SLOW_MACHINE
    assert process.returncode == 2, errors
    assert "Traceback" not in errors
    return errors


def test_a_rank_that_hangs_is_told_with_the_lines_it_was_at(place: Path) -> None:
    """Nobody asks; the other waits for it until its time is up, and our launcher asks it to end."""
    errors = waited_for_in_vain(place, "paceline.engine.step.Step.micro", call=9, rank="1")
    assert "paceline: rank 1 of 2 has not reached 'an all-reduce'" in errors, errors
    assert "paceline: rank 1 hung\n  where: called (" in errors, errors
    reached = r"rank 0 reached number (\d+), all_reduce of \d+ Float; rank 1 reached number (\d+), \w+ of \d+ \w+"
    differs = r"the first that differs is number (\d+): rank 0 made all_reduce of \d+ Float; rank 1 made none"
    found = re.search(rf"paceline: collectives of default_pg \(gloo 0\): {reached}\n  {differs}\n", errors)
    assert found, errors
    assert int(found[1]) >= int(found[3]) == int(found[2]) + 1, errors


def test_a_disk_that_hangs_under_a_checkpoint_is_told(place: Path) -> None:
    """The first rank writes it, and a checkpoint under way is seen through: the other waits for its next steps."""
    errors = waited_for_in_vain(place, "paceline.run.checkpoint.store.fsync_folder", call=4, rank="0")
    assert "paceline: rank 1: rank 0 of 2 has not reached" in errors, errors
    assert "last seen at 'saving a checkpoint'" in errors, errors
    finished(place, str(place / "run"), "--resume")


CONNECTING = """
import atexit, os, sys
import paceline.verbs.cli as cli

atexit.register(print, "Python ends", flush=True)

def main():
    from paceline.distributed.stores import open_store
    from paceline.distributed.waiting import Waiting
    from paceline.machine.cluster import find_place
    place = find_place(os.environ)
    print("connects", flush=True)
    open_store(place, 60, Waiting(place, 60))

cli.main = main
sys.argv[:] = ["paceline", "train"]
from paceline.__main__ import main
main()
"""


@pytest.mark.usefixtures("real_interpreters")
def test_a_store_that_answers_while_python_ends_aborts_nothing(tmp_path: Path) -> None:
    """Torch's C++ comes back to an interpreter that is going away."""
    with listen() as listening:
        port = listening.getsockname()[1]
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-c", CONNECTING]
        with subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "connects\n"
            time.sleep(1)
            process.terminate()
            process.stdout.readline()  # Python ends, or the process has
            store = TCPStore(
                "127.0.0.1", port, 2, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
            told = process.stderr.read()
    del store
    assert (process.returncode, told) == (75, "")
