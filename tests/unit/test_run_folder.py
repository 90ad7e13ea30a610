"""A run folder is one run's at a time, refuses what is not its own, and tells later readers no secrets."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from paceline.contract.errors import DiskFullError, RecipeError, RunFolderError
from paceline.contract.records import Decision, EvaluationRecord, MemoryPlan, MemoryRecord, RunRecord
from paceline.contract.redaction import redacted, redacted_command
from paceline.recipe import Recipe
from paceline.recipe.places import absolute
from paceline.run_folder import RunFolder, git_state, origin, versions, way_to_more

RECIPE = Recipe.parse({"model": {"source": "m"}, "data": {"source": "d.csv"}})


def made(path: Path) -> Path:
    """A folder that holds a finished run."""
    with RunFolder.create(path) as folder:
        folder.write_recipe(RECIPE)
    return path


def write_manifest(folder: RunFolder, **changes: Any) -> None:
    facts: dict[str, Any] = {
        "command": ["paceline", "train"],
        "hardware": {"device": "cpu"},
        "data_fingerprint": "f1",
        "seeds": {"run": 0},
    }
    folder.write_manifest(**{**facts, **changes})


# ---- create, open, view


def test_a_folder_whose_name_is_not_utf_8_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """The tokenizer could not be saved into it, and the model was lost after the last step."""
    odd = tmp_path / os.fsdecode(b"d\xe9j\xe0")
    with pytest.raises(RunFolderError, match=r"run: is not UTF-8(.|\n)*another --out"):
        RunFolder.create(odd / "run")
    with pytest.raises(RunFolderError, match="runs: is not UTF-8"):
        RunFolder.create_named("a", odd / "runs")
    assert not odd.exists()
    made(tmp_path / "run").rename(odd)
    with pytest.raises(RunFolderError, match="is not UTF-8"):
        RunFolder.open(odd)
    RunFolder.view(odd)  # to be read


@pytest.mark.parametrize("how", ["removed", "renamed", "a parent renamed", "replaced"])
def test_a_folder_that_is_gone_is_noticed_and_found_again(tmp_path: Path, how: str) -> None:
    parent, path = tmp_path / "a", tmp_path / "a" / "run"
    with RunFolder.create(path) as folder:
        folder.write_recipe(RECIPE)
        assert not folder.is_gone
        assert folder.find_again() is None
        match how:
            case "removed" | "replaced":
                shutil.rmtree(path)
            case "renamed":
                path.rename(tmp_path / "b")
            case "a parent renamed":
                parent.rename(tmp_path / "b")
        if how == "replaced":
            path.mkdir()
        assert folder.is_gone
        if how == "replaced":
            with pytest.raises(RunFolderError, match="nothing can be saved in its place"):
                folder.find_again()
            assert list(path.iterdir()) == []
            return
        lost = folder.find_again()
        assert lost is not None
        assert f"{path}: was removed or renamed" in lost.what
        wanted = {"removed": path, "renamed": tmp_path / "b", "a parent renamed": tmp_path / "b" / "run"}[how]
        assert folder.path == wanted
        assert folder.checkpoints == wanted / "checkpoints"
        assert folder.recipe.exists() == (how != "removed")
        assert not folder.is_gone
        with pytest.raises(RunFolderError, match="in use"):
            RunFolder.create(wanted)


def test_a_run_that_fails_after_its_folder_went_keeps_its_own_error(tmp_path: Path) -> None:
    def fails() -> None:
        with RunFolder.create(tmp_path / "run"):
            shutil.rmtree(tmp_path / "run")
            raise KeyError

    with pytest.raises(KeyError):
        fails()


def test_a_run_is_created_and_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    made(path)
    with RunFolder.open(path) as folder:
        assert folder.read_recipe().resolved() == absolute(RECIPE).resolved()
        assert folder.path == path
        inside = {folder.recipe, folder.manifest, folder.metrics, folder.summary, folder.report, folder.quarantine}
        assert {p.name for p in inside} == {
            "recipe.yaml", "manifest.json", "metrics.jsonl", "summary.json", "report.html", "quarantine.jsonl",
        }  # fmt: skip
        assert (folder.model, folder.checkpoints) == (path / "model", path / "checkpoints")


def test_paths_stay_when_the_current_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RunFolder.create("run") as folder:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        folder.write_recipe(RECIPE)
    assert (tmp_path / "run" / "recipe.yaml").exists()


def test_a_run_without_a_step_gives_way_to_another(tmp_path: Path) -> None:
    """As one leaves it that was stopped while it compiled: nothing is lost, and it is simply started again."""
    path = made(tmp_path / "run")
    (path / "metrics.jsonl").write_text('{"kind": "start"}\n{"kind": "notice"}\n')
    (path / "checkpoints" / ".step-00000000.partial-1").mkdir(parents=True)
    RunFolder.create(path).close()
    assert os.listdir(path) == [".lock"]
    path = made(tmp_path / "other")
    (path / "mine.txt").touch()
    with pytest.raises(RunFolderError, match="already holds a run"):
        RunFolder.create(path)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    (path / "metrics.jsonl").write_text('{"kind": "start"}\n{"kind": "step", "step": 1}\n')
    with pytest.raises(RunFolderError, match="already holds a run") as raised:
        RunFolder.create(path)
    assert "--resume" not in raised.value.fix, "there is nothing to resume"
    assert f"remove {path}" in raised.value.fix
    (path / "model").mkdir()
    with pytest.raises(RunFolderError, match="already holds a run") as raised:
        RunFolder.create(path)
    assert "remove" not in raised.value.fix, "features are fitted without a checkpoint"
    (path / "checkpoints" / "step-4").mkdir(parents=True)
    (path / "checkpoints" / "step-4" / "COMMITTED").touch()
    with pytest.raises(RunFolderError, match="already holds a run") as raised:
        RunFolder.create(path)
    assert f"paceline train {path} --resume" in raised.value.fix
    assert "--out" in raised.value.fix
    RunFolder.open(path).close()


def test_a_run_that_was_killed_while_it_wrote_its_first_file_left_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / ".recipe.yaml.593bd509").write_text("half a reci")
    RunFolder.create(tmp_path).close()


def test_a_strangers_folder_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="not empty"):
        RunFolder.create(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(RunFolderError, match="not a folder"):
        RunFolder.create(tmp_path / "thesis.tex")
    with pytest.raises(RunFolderError, match="not a folder"):
        RunFolder.create(tmp_path / "thesis.tex" / "run")


def test_a_run_that_failed_before_its_first_record_can_start_again(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        folder.quarantine.write_text("{}\n")
    RunFolder.create(tmp_path / "run").close()


def test_resuming_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no recipe\.yaml"):
        RunFolder.open(tmp_path)
    with pytest.raises(RunFolderError, match="no such folder"):
        RunFolder.view(tmp_path / "absent")
    assert os.listdir(tmp_path) == []


def test_the_way_to_a_longer_run_is_open() -> None:
    limited = RECIPE.with_settings(["loop.max_steps=10"])
    told = way_to_more(limited, stopped_early=False).removesuffix(" trains on")
    settings = [part for part in told.split() if part != "--set"]
    changed = limited.with_settings(settings).loop
    assert (changed.epochs, changed.max_steps) == (RECIPE.loop.epochs + 1, None), (
        "more epochs alone would end at the same step"
    )
    assert "max_steps" not in way_to_more(RECIPE, stopped_early=False)
    assert way_to_more(limited, stopped_early=True) == "--set loop.early_stopping=null trains on"


def test_a_damaged_recipe_is_a_recipe_error(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    (path / "recipe.yaml").write_text("model: [")
    with RunFolder.open(path) as folder, pytest.raises(RecipeError):
        folder.read_recipe()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user, probably root, may write everywhere")
        with pytest.raises(RunFolderError, match="cannot be written"):
            RunFolder.create(tmp_path / "run")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("name", ["manifest.json", "metrics.jsonl", "summary.json", "report.html"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_in_a_files_place_is_refused(tmp_path: Path, name: str, make: Any) -> None:
    path = made(tmp_path / "run")
    make(path / name)
    with pytest.raises(RunFolderError, match=f"{re.escape(name)}: is no regular file"):
        RunFolder.open(path)
    RunFolder.create(tmp_path / "other").close()


def test_a_folder_that_cannot_be_written_is_not_resumed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--resume has no --out."""
    path = made(tmp_path / "run")
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != path)
    with pytest.raises(RunFolderError, match="cannot be written") as error:
        RunFolder.open(path)
    assert "--out" not in error.value.fix
    assert f"cp -r {path} COPY" in error.value.fix
    RunFolder.view(path)


# ---- names


def test_default_names_are_counted_when_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noon(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Noon:
            return cls(2026, 11, 20, 12, 0, 0)

    monkeypatch.setattr("paceline.run_folder.ways.datetime", Noon)
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        with RunFolder.create_named("imdb") as folder:
            names.append(str(folder.path.relative_to(tmp_path)))
    assert names == [f"runs/imdb-20261120-120000{ending}" for ending in ("", "-2", "-3")]


@pytest.mark.parametrize("name", ["../../x", "..", ".hidden", "", "a/b", "/tmp/x", "a\nb", "x\0y", "-rf"])
def test_names_that_could_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunFolderError, match="name"):
        RunFolder.create_named(name, tmp_path / "runs")
    with pytest.raises(RecipeError):
        RECIPE.with_settings([f"name={json.dumps(name)}"])
    assert not (tmp_path / "runs").exists()


# ---- links


def test_a_link_to_a_folder_is_resolved_once(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "scratch")
    with RunFolder.create(link) as folder:
        link.unlink()
        link.symlink_to(tmp_path / "elsewhere")
        folder.write_recipe(RECIPE)
    assert (tmp_path / "scratch" / "recipe.yaml").exists()
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_link_to_a_strangers_folder_or_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mail").write_text("private")
    (tmp_path / "run").symlink_to(tmp_path / "home")
    with pytest.raises(RunFolderError, match="not empty"):
        RunFolder.create(tmp_path / "run")
    (tmp_path / "lost").symlink_to(tmp_path / "absent")
    with pytest.raises(RunFolderError, match="leads nowhere"):
        RunFolder.create(tmp_path / "lost")
    assert not (tmp_path / "absent").exists()
    assert os.listdir(tmp_path / "home") == ["mail"]


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "manifest.json", ".lock", "report.html", "preempted"])
def test_a_planted_link_is_never_written_through(tmp_path: Path, name: str) -> None:
    path = made(tmp_path / "run")
    victim = tmp_path / "victim"
    shutil.copy(path / "recipe.yaml", victim)
    before = victim.read_bytes()
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(victim)
    for attempt in (RunFolder.open, RunFolder.view):
        with pytest.raises(RunFolderError, match="is a link"):
            attempt(path)
    assert victim.read_bytes() == before


def test_checkpoints_may_live_on_another_disk(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    (tmp_path / "scratch").mkdir()
    (path / "checkpoints").symlink_to(tmp_path / "scratch")
    RunFolder.open(path).close()


def test_only_a_run_that_can_go_on_is_marked_as_preempted(tmp_path: Path) -> None:
    """A run that was stopped before its first checkpoint leaves nothing, and is started again."""
    with RunFolder.create(tmp_path / "run") as folder:
        folder.mark_preempted("stopped by SIGTERM")
        assert not folder.preempted.exists()
    made(tmp_path / "run")
    with RunFolder.open(tmp_path / "run") as folder:
        folder.mark_preempted("stopped by SIGTERM")
        assert not folder.preempted.exists()
    saved = tmp_path / "run" / "checkpoints" / "step-3" / "COMMITTED"
    saved.parent.mkdir(parents=True)
    saved.touch()
    with RunFolder.open(tmp_path / "run") as folder:
        folder.mark_preempted("stopped by SIGTERM after step 3 of 9")
        assert folder.preempted.read_text() == "stopped by SIGTERM after step 3 of 9\n"


def test_a_rank_that_follows_holds_nothing(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    with RunFolder.open(path), RunFolder.follow(path) as followed:
        assert followed.recipe == path / "recipe.yaml"
    with RunFolder.follow(tmp_path / "on another machine"):
        assert not (tmp_path / "on another machine").exists()


# ---- one run at a time


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A run folder held by another process."""
    path = made(tmp_path / "run")
    code = (
        "import sys, time; from paceline.run_folder import RunFolder\n"
        "folder = RunFolder.open(sys.argv[1]); print('held', flush=True); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield path, process
    finally:
        process.kill()
        process.communicate()


def test_a_live_run_is_refused_by_name_and_a_dead_ones_lock_taken_over(
    live_run: tuple[Path, subprocess.Popen[str]],
) -> None:
    path, process = live_run
    for attempt in (RunFolder.open, RunFolder.create):
        with pytest.raises(RunFolderError, match="in use by another run") as raised:
            attempt(path)
        assert f"process {process.pid} on {os.uname().nodename}" in raised.value.why
    RunFolder.view(path).close()
    process.send_signal(signal.SIGKILL)
    process.wait()
    with RunFolder.open(path):
        owner = json.loads((path / ".lock").read_text())
        assert owner["pid"] == os.getpid()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]+[+-][\d:]+", owner["started"])


def test_the_lock_holds_within_one_process_and_until_closed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(RunFolderError, match="in use"):
            RunFolder.create(tmp_path / "run")
    folder.close()
    folder.close()
    again = RunFolder.create(tmp_path / "run")
    again.write_recipe(RECIPE)
    again.close()
    RunFolder.open(tmp_path / "run").close()


def test_the_lock_is_let_go_when_a_run_fails(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    with pytest.raises(RuntimeError, match="boom"), RunFolder.open(path):
        raise RuntimeError("boom")
    RunFolder.open(path).close()


def test_closing_lets_go_though_a_forked_worker_lives_on(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to find the lock's descriptor")
    folder = RunFolder.create(tmp_path / "run")
    lock = os.stat(folder.path / ".lock")
    held = [int(name) for name in os.listdir("/proc/self/fd") if _is_same(int(name), lock)]
    copies = [os.dup(descriptor) for descriptor in held]  # what a fork leaves in the child
    try:
        folder.close()
        assert len(copies) == 1
        RunFolder.create(tmp_path / "run").close()
    finally:
        for copy in copies:
            os.close(copy)


def _is_same(descriptor: int, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file)
    except OSError:  # the descriptor that listed them
        return False


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "\\u001b[31m"}', "null"])
def test_an_unreadable_lock_of_a_live_run_still_holds(tmp_path: Path, content: str) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        (folder.path / ".lock").write_text(content)
        with pytest.raises(RunFolderError, match="in use") as raised:
            RunFolder.create(folder.path)
        assert "\x1b" not in str(raised.value)


def test_a_disk_without_room_for_the_lock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFullError, match=r"no room for writing \.lock"):
        RunFolder.create(tmp_path / "run")
    monkeypatch.undo()
    with RunFolder.create(tmp_path / "run"):
        pass


def test_no_descriptor_is_left_when_a_folder_is_refused(tmp_path: Path) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to count descriptors")
    path = made(tmp_path / "run")
    (path / "model").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(RunFolderError):
            RunFolder.create(path)
    with RunFolder.open(path):
        for _ in range(20):
            with pytest.raises(RunFolderError):
                RunFolder.open(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="no locks"):
        RunFolder.create(tmp_path / "run").close()


# ---- manifest


def test_the_manifest_holds_the_facts_of_every_start(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        write_manifest(folder)
        write_manifest(folder, first_step=12, changes=["loop.keep_last: 1 -> 2"], data_fingerprint="f2")
        manifest = folder.read_manifest()
    first, second = manifest["starts"]
    assert (first["first_step"], first["data_fingerprint"], first["seeds"]) == (0, "f1", {"run": 0})
    assert (second["first_step"], second["data_fingerprint"]) == (12, "f2")
    assert second["changes"] == ["loop.keep_last: 1 -> 2"]
    assert first["hardware"] == {"device": "cpu"}
    assert first["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"paceline", "torch", "transformers", "numpy", "tokenizers"} <= first["versions"].keys()
    assert all(versions()[name] for name in ("paceline", "torch", "numpy"))


def test_two_starts_of_one_second_are_told_apart(tmp_path: Path) -> None:
    """A mirror knows a run by its first start."""
    with RunFolder.create(tmp_path / "run") as folder:
        for _ in range(3):
            write_manifest(folder)
        times = {start["time"] for start in folder.read_manifest()["starts"]}
    assert len(times) == 3


def test_a_missing_package_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "_PACKAGES", ("no-such-package",))
    assert versions()["no-such-package"] is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"starts": []}', '{"starts": [1]}', "[" * 100_000])
def test_a_damaged_manifest_is_told(tmp_path: Path, content: str) -> None:
    path = made(tmp_path / "run")
    with RunFolder.open(path) as folder:
        with pytest.raises(RunFolderError, match="missing"):
            folder.read_manifest()
        folder.manifest.write_text(content)
        with pytest.raises(RunFolderError, match="damaged"):
            folder.read_manifest()


def test_git_state_is_commit_and_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("git"):
        pytest.skip("git is not installed")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    assert git_state(tmp_path) is None
    assert git_state(tmp_path / "absent") is None

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    state = git_state(tmp_path)
    assert state is not None
    assert re.fullmatch(r"[0-9a-f]{40}", state["commit"])
    assert state["dirty"] is False
    (tmp_path / "untracked").write_text("")
    assert git_state(tmp_path) == state, "a run folder inside the repository is no change of the code"
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {**state, "dirty": True}
    git("config", "core.fsmonitor", f"touch {tmp_path / 'executed'}; false")
    git_state(tmp_path)
    assert not (tmp_path / "executed").exists(), "a program named by the repository's configuration was run"


def test_git_that_hangs_or_is_missing_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert git_state(tmp_path, timeout_seconds=0.2) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert git_state(tmp_path) is None


# ---- secrets

SECRET = "S3cr3t-value.x"


@pytest.mark.parametrize(
    "command",
    [
        ["--token", SECRET],
        [f"--token={SECRET}"],
        ["--hub-token", SECRET],
        ["--wandb_api_key", SECRET],
        [f"WANDB_API_KEY={SECRET}", "paceline"],
        [f"HF_TOKEN={SECRET}"],
        ["--set", f"hub.token={SECRET}"],
        [f"--set=hub.secret={SECRET}"],
        ["--set", f"model.config={{auth_token: {SECRET}, layers: 2}}"],
        ["--set", f'model.config={{"auth_token": "{SECRET} with spaces"}}'],
        ["--password", f"-{SECRET}"],
        [f"--password=with spaces, {SECRET}"],
        ["--data", f"https://user:{SECRET}@host/file.csv"],
        ["--data", f"https://user:a@b#c?{SECRET}@host/file.csv"],
        ["--data", f"https://{SECRET}@host/file.csv"],
        ["--data", f"https://host/file.csv?access_token={SECRET}&x=1"],
        ["--data", f"https://host/file.csv?X-Amz-Signature={SECRET}"],
        ["--header", f"Authorization: Bearer {SECRET}"],
        ["--header", f"authorization: Basic {SECRET}"],
        ["--credential", SECRET],
        ["--model", "hf_S3cr3tvaluexS3cr3tvaluex"],
        ["--model", "ghp_S3cr3tvaluexS3cr3tvaluex"],
        ["--set", "a.b=sk-S3cr3tvaluexS3cr3tvaluex"],
        ["--data", f"https://host/file.csv?sv=1&sig={SECRET}&se=2"],
        ["--auth", SECRET],
        [f"--hub-auth={SECRET}"],
        ["--pat", SECRET],
        [f"--pwd={SECRET}"],
        ["--db-pwd", SECRET],
        ["--passphrase", SECRET],
        ["--set", f"a.passphrase={SECRET}"],
        ["--model", "npm_S3cr3tvaluexS3cr3tvaluexS3cr3tvaluex"],
        ["--model", "pypi-S3cr3tvaluexS3cr3t-valuex"],
        ["--model", "AIzaS3cr3tvaluexS3cr3t-valuex_S3cr3tval"],
        ["--model", "sk_live_S3cr3tvaluexS3cr3tvaluex"],
    ],
    ids=" ".join,
)
def test_secrets_never_reach_the_manifest(tmp_path: Path, command: list[str]) -> None:
    with RunFolder.create(tmp_path / "run") as folder:
        write_manifest(folder, command=["paceline", "train", *command], changes=[f"x.token: a -> {SECRET}"])
        text = folder.manifest.read_text()
    assert "S3cr3t" not in text, text
    assert "[redacted]" in text


@pytest.mark.parametrize(
    "argument",
    [
        "model.tokenizer=bert-base-uncased",
        "--tokenizer",
        "optimizer.lr=3e-5",
        "https://host/path@branch/file.csv",
        "optimizer.groups=[{match: '*key.weight', lr: 1e-4}]",
        "model.revision=0123456789abcdef0123456789abcdef01234567",
        "runs/x",
        "reviews with spaces.csv",
        "data/path=1/author=x.csv",
        "optimizer.sigma=2",
        "--path=a",
        "compat=1",
        "pypi-names.csv",
        "dapiece.csv",
    ],
)
def test_what_is_no_secret_stays_readable(argument: str) -> None:
    assert redacted_command(["--set", argument, "next"]) == ["--set", argument, "next"]
    assert redacted(argument) == argument


def test_a_token_of_hexadecimal_digits_is_redacted() -> None:
    assert redacted(f"--model dapi{'0123456789abcdef' * 2}") == "--model [redacted]"


def test_a_flag_after_a_secrets_option_is_kept() -> None:
    assert redacted_command(["--token", "--resume", "x"]) == ["--token", "--resume", "x"]


# ---- metrics


def test_truncation_drops_later_steps_and_cut_lines(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    lines = [
        '{"kind": "start", "total_steps": 9}',
        '{"step": 1, "loss": NaN}',
        '{"step": 2}',
        '{"split": "validation", "step": 2}',
        '{"step": 3}',
        '{"message": "kept, no step"}',
        '{"split": "validation", "step": 4}',
        "7",
        '{"step": 3, "lo',
    ]
    with RunFolder.open(path) as folder:
        assert folder.truncate_metrics(2) == 0, "no file yet"
        folder.metrics.write_text("\n".join(lines))
        assert folder.truncate_metrics(2) == 4
        assert folder.metrics.read_text().splitlines() == [*lines[:4], lines[5]]
        assert folder.metrics.read_text().endswith("}\n")
        assert folder.truncate_metrics(2) == 0


def test_evaluations_that_come_again_are_dropped(tmp_path: Path) -> None:
    """Killed between an evaluation and the checkpoint behind it, or between the end's and the summary."""

    def evaluation(split: str, step: int) -> str:
        return f'{{"kind": "evaluation", "split": "{split}", "step": {step}}}'

    lines = [
        '{"kind": "step", "step": 1}',
        evaluation("validation", 1),  # followed by a step, so it will not be made again
        '{"kind": "step", "step": 2}',
        evaluation("validation", 2),
        '{"kind": "notice", "message": "kept"}',
        evaluation("test", 1),  # the end's, of the best weights
    ]
    with RunFolder.open(made(tmp_path / "run")) as folder:
        folder.metrics.write_text("\n".join(lines))
        assert folder.truncate_metrics(2, {("validation", 2)}) == 1
        assert folder.metrics.read_text().splitlines() == lines[:5]
        assert folder.truncate_metrics(2) == 1
        assert folder.metrics.read_text().splitlines() == [*lines[:3], lines[4]]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    with RunFolder.open(path) as folder:
        folder.metrics.write_bytes('{"step": 1, "text": "é\\u2028"}'.encode())
        assert folder.truncate_metrics(1) == 0
        folder.metrics.write_bytes(folder.metrics.read_bytes() + b'{"step": 2, "text": "\xc3')
        assert folder.truncate_metrics(5) == 1
        assert len(folder.metrics.read_text().splitlines()) == 1


def test_a_crash_while_truncating_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "run")

    def fail(*arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    with RunFolder.open(path) as folder:
        folder.metrics.write_text('{"step": 1}\n{"step": 2}\n')
        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="Input/output"):
            folder.truncate_metrics(1)
        assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'


# ---- summary


def test_the_summary_is_strict_json(tmp_path: Path) -> None:
    evaluation = EvaluationRecord(
        split="test", step=3, epoch=0, loss=float("inf"), metrics={"auroc": float("nan"), "accuracy": 0.5},
        samples=4, seconds=0.1, confusion=((1, 2), (3, 4)),
    )  # fmt: skip
    record = RunRecord(
        name="é", folder="runs/x", status="finished", steps=3, applied_steps=3, epochs=1.0, seconds={"total": 1.0},
        samples_per_second=1.0, tokens_per_second=2.0, padding_share=0.0, best_step=None, evaluations=(evaluation,),
        final={"test": {"accuracy": 0.5}}, peak_bytes=None,
        decisions=(Decision(setting="a", value="b", reason="c"),),
    )  # fmt: skip
    path = made(tmp_path / "run")
    with RunFolder.open(path) as folder:
        folder.write_summary(record)
        text = folder.summary.read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    summary = json.loads(text, parse_constant=refuse)
    back = TypeAdapter(RunRecord).validate_python(summary)
    assert math.isnan(back.evaluations[0].metrics["auroc"]), "pydantic reads it back as a number"
    assert summary["evaluations"][0]["metrics"] == {"auroc": "NaN", "accuracy": 0.5}
    assert summary["evaluations"][0]["loss"] == "Infinity"
    assert summary["evaluations"][0]["confusion"] == [[1, 2], [3, 4]]
    assert summary["decisions"] == [{"setting": "a", "value": "b", "reason": "c"}]
    assert summary["name"] == "é"


def test_the_summary_holds_the_memory_whole(tmp_path: Path) -> None:
    plan = MemoryPlan(
        gpu="NVIDIA H200", capacity=None, allocated=5, reserved=6, context=2, parts={"activations": 4, "rounding": 1},
        activations={"linear layers": 4}, moment="backward", phases={"backward": 5}, samples=1, slots=8,
        num_parameters=9, num_trained=9, assumed=("attention by flash",), execution={"layout": "packed"},
        decisions=(Decision(setting="a", value="b", reason="c"),),
    )  # fmt: skip
    memory = MemoryRecord(allocated=5, reserved=7, total=9, plan=plan)
    record = RunRecord(
        name="x", folder="runs/x", status="finished", steps=3, applied_steps=3, epochs=1.0, seconds={"total": 1.0},
        samples_per_second=1.0, tokens_per_second=2.0, padding_share=0.0, best_step=None, evaluations=(), final={},
        peak_bytes=5, decisions=(), memory=memory,
    )  # fmt: skip
    with RunFolder.open(made(tmp_path / "run")) as folder:
        folder.write_summary(record)
        stored = json.loads(folder.summary.read_bytes())
    assert stored["memory"]["plan"]["parts"] == {"activations": 4, "rounding": 1}
    assert TypeAdapter(RunRecord).validate_python(stored) == record


def test_a_run_folder_needs_no_torch() -> None:
    code = "import sys, paceline.run_folder; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
