"""Kills any process of a run of several ranks at any time, starts it again, and compares the end with a quiet run's.

Every start is the command a person types, in processes of its own. SIGKILL reaches the launcher or one of the ranks:
while libraries are loaded, in a step, a sum, a save, an evaluation, at the end. After each kill everything has to be
gone by itself; the next start goes on with ``--resume``, or from the beginning where no checkpoint was committed.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from paceline.run.checkpoint.store import CheckpointStore
from tests.e2e.conftest import rows
from tests.e2e.whole_runs import assert_same, outcome
from tests.testing.tiny import tiny_bert_config, write_tiny_model

STEPS = 60
QUIET_SECONDS = 30.0
"""After a kill no process may be left for longer: a rank that lost another ends by itself, or by its launcher."""

START_SECONDS = 180.0
"""A start that makes no step for longer hangs."""

MARK = "PACELINE_SOAK"
"""The variable by which the processes of a soak are found, whoever their parent is."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One SIGKILL and what became of the run."""

    round: int
    kill: int
    victim: str
    """``launcher``, or ``rank N``."""
    seconds: float
    """Since the start."""
    phase: str
    """``start`` before the first step of this start, ``save`` amid one, else ``steps``; ``end`` after the last."""
    step: int
    """Of the metrics, as the kill came."""
    committed: int
    """Step of the newest checkpoint afterwards; 0: none."""
    code: int
    """With which the launcher ended."""
    quiet_seconds: float
    """Until no process was left."""


@dataclass
class Soak:
    """Rounds of one run until so many kills have come, or the time is over.

    Args:
        place: an empty folder for everything.
        ranks: processes of the run.
        seed: decides when and whom a kill meets.
    """

    place: Path
    ranks: int = 4
    seed: int = 1
    kills: list[Kill] = field(default_factory=list)
    rounds: int = 0
    """That were compared with the quiet run."""

    def run(self, kills: int, seconds: float) -> None:
        """Kill until ``kills`` have come; no kill comes so late that ``seconds`` would not suffice for the rest.

        Raises:
            AssertionError: something was lost, was left or never ended.
        """
        began, self._random = time.monotonic(), random.Random(self.seed)
        self._prepare()
        quiet = self._quiet()
        self._starts = [quiet]  # how long a start took to its first step
        whole = time.monotonic() - began
        while len(self.kills) < kills and time.monotonic() - began + 3 * whole < seconds:
            self._round(kills, began + seconds - 2 * whole)

    def _prepare(self) -> None:
        write_tiny_model(self.place / "model", tiny_bert_config(hidden_dropout_prob=0.1))
        with (self.place / "reviews.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows())
        recipe = {
            "name": "soak",
            "model": {"source": "model"},
            "data": {"source": "reviews.csv", "splits": {"validation": 0.15, "test": 0.15}},
            "optimizer": {"lr": 1e-2},
            "schedule": {"warmup": 5},
            "loop": {
                "epochs": 99,
                "max_steps": STEPS,
                "batch_size": 9,
                "micro_batch_size": 4,
                "checkpoint_every": 2,
                "keep_last": 2,
                "evaluate_every": 7,
            },
            "device": "cpu",
            "observe": {"console": "off"},
        }
        (self.place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (self.place / "temporary").mkdir()

    def _quiet(self) -> float:
        """The run that nobody disturbs; seconds to its first step."""
        process, began = self._start("quiet", resume=False), time.monotonic()
        while not _step(self.place / "quiet"):
            assert process.poll() is None, _said(process)
            assert time.monotonic() - began < START_SECONDS, "the quiet run makes no step"
            time.sleep(0.02)
        first = time.monotonic() - began
        assert process.wait(timeout=300) == 0, _said(process)
        self._undisturbed = outcome(_record(self.place / "quiet"))
        self._files = set(_files(self.place / "quiet"))
        return first

    def _round(self, kills: int, no_kill_after: float) -> None:
        name = f"run-{self.rounds + 1}"
        folder = self.place / name
        shutil.rmtree(self.place / "cache", ignore_errors=True)  # kills may meet the encoding too
        while not (folder / "summary.json").exists():
            resume = any((folder / "checkpoints").glob("step-*/COMMITTED"))
            if not resume and (folder / "recipe.yaml").exists():
                shutil.rmtree(folder)  # as paceline says: no step of it is saved, remove it
            disturbed = len(self.kills) < kills and time.monotonic() < no_kill_after
            self._life(name, resume=resume, disturbed=disturbed)
        self._compare(folder)
        self.rounds += 1
        shutil.rmtree(folder)

    def _life(self, name: str, *, resume: bool, disturbed: bool) -> None:
        """One start of the run: to its kill, or to its end."""
        folder = self.place / name
        before, began = (_step(folder) if resume else 0), time.monotonic()
        known = _committed(folder)
        process = self._start(name, resume=resume)
        if not disturbed:
            assert process.wait(timeout=300) == 0, _said(process)
            return
        in_start = self._random.random() < 0.4
        wait = self._random.uniform(0, max(self._starts) if in_start else 2.0)
        while in_start is False and _step(folder) <= before and process.poll() is None:
            assert time.monotonic() - began < START_SECONDS, f"no step for {START_SECONDS:g} seconds\n{_said(process)}"
            time.sleep(0.005)
        if in_start is False:
            self._starts.append(time.monotonic() - began)
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.005)
        found = self._victims(process)
        if not found or process.poll() is not None:
            assert process.wait(timeout=60) == 0, _said(process)
            return
        victim = self._random.choice(sorted(found))
        at, phase, step = time.monotonic(), _phase(folder, before), _step(folder)
        try:
            os.kill(found[victim], signal.SIGKILL)
        except ProcessLookupError:  # it has just ended by itself
            assert process.wait(timeout=60) == 0, _said(process)
            return
        code = process.wait(timeout=QUIET_SECONDS)
        quiet = self._until_quiet(at)
        committed = _committed(folder)
        assert committed >= known, f"a checkpoint of step {known} was committed, and now the newest is of {committed}"
        if code == 0 and (folder / "summary.json").exists():
            return  # the run was over
        self.kills.append(
            Kill(
                round=self.rounds + 1,
                kill=len(self.kills) + 1,
                victim=victim,
                seconds=round(at - began, 3),
                phase=phase,
                step=step,
                committed=committed,
                code=code,
                quiet_seconds=round(quiet, 3),
            )
        )

    def _start(self, name: str, *, resume: bool) -> subprocess.Popen[bytes]:
        what = [name, "--resume"] if resume else ["recipe.yaml", "--out", name]
        variables = {
            MARK: str(self.place),
            "OMP_NUM_THREADS": "1",
            "PACELINE_CACHE": str(self.place / "cache"),
            "TMPDIR": str(self.place / "temporary"),
        }
        with (self.place / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "paceline", "train", *what, "--processes", str(self.ranks)],
                cwd=self.place,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process.args = [str(self.place / f"{name}.log")]
        return process

    def _ours(self) -> Iterator[tuple[int, dict[bytes, bytes]]]:
        """Running processes of this soak and their variables."""
        mark = f"{MARK}={self.place}".encode()
        for path in Path("/proc").iterdir():
            if not path.name.isdecimal():
                continue
            try:
                variables = (path / "environ").read_bytes().split(b"\0")
                state = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            except OSError:  # it has ended, or is another user's
                continue
            if mark in variables and state != "Z":
                yield int(path.name), dict(each.partition(b"=")[::2] for each in variables)

    def _victims(self, launcher: subprocess.Popen[bytes]) -> dict[str, int]:
        """By name: what may be killed now."""
        found = {"launcher": launcher.pid} if launcher.poll() is None else {}
        for process, variables in self._ours():
            if b"RANK" in variables and process != launcher.pid:
                found.setdefault(f"rank {int(variables[b'RANK'])}", process)
        return found

    def _until_quiet(self, since: float) -> float:
        """Seconds from the kill until nothing of the run is left."""
        while left := [process for process, _ in self._ours()]:
            if time.monotonic() - since > QUIET_SECONDS:
                for process in left:
                    os.kill(process, signal.SIGKILL)
                raise AssertionError(f"{len(left)} processes outlive a kill by {QUIET_SECONDS:g} seconds")
            time.sleep(0.01)
        return time.monotonic() - since

    def _compare(self, folder: Path) -> None:
        """With the quiet run, bit for bit; and nothing may be left that it has not."""
        if not (folder / "report.html").exists():  # killed after the summary: the report is made by hand
            subprocess.run([sys.executable, "-m", "paceline", "report", str(folder)], check=True, capture_output=True)
        assert_same(outcome(_record(folder)), self._undisturbed)
        left = set(_files(folder)) - self._files
        assert not left, f"{folder.name}: left behind: {sorted(left)}"
        left = set(os.listdir(self.place / "temporary"))
        assert not left, f"left in the folder of temporary files: {sorted(left)}"

    def summary(self) -> dict[str, Any]:
        """What the kills met."""
        counted: dict[str, dict[str, int]] = {"victim": {}, "phase": {}}
        for kill in self.kills:
            for name, of in counted.items():
                of[getattr(kill, name)] = of.get(getattr(kill, name), 0) + 1
        return {
            "kills": len(self.kills),
            "rounds": self.rounds,
            "seed": self.seed,
            "ranks": self.ranks,
            "longest_quiet_seconds": max((kill.quiet_seconds for kill in self.kills), default=0.0),
            **counted,
        }

    def lines(self) -> list[str]:
        """A line of JSON a kill, and one that sums up."""
        return [json.dumps(each) for each in (*map(asdict, self.kills), self.summary())]


def _step(folder: Path) -> int:
    """The newest step in the metrics."""
    try:
        found = (folder / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return 0
    steps = (line for line in reversed(found) if line.startswith(b'{"kind": "step"') and line.endswith(b"}"))
    return int(json.loads(next(steps, b'{"step": 0}'))["step"])


def _committed(folder: Path) -> int:
    slots = (path.parent.name for path in (folder / "checkpoints").glob("step-*/COMMITTED"))
    return max((int(name.split("-")[1].split(".")[0]) for name in slots), default=0)


def _phase(folder: Path, before: int) -> str:
    if any((folder / "checkpoints").glob(".*.partial-*")):
        return "save"
    if _step(folder) >= STEPS:
        return "end"
    return "steps" if _step(folder) > before else "start"


def _record(folder: Path) -> Any:
    """As much of a run's record as ``outcome`` reads, which checks every byte of the newest checkpoint too."""
    assert not CheckpointStore(folder / "checkpoints", 1).newest().notices
    return SimpleNamespace(folder=str(folder), final=json.loads((folder / "summary.json").read_bytes())["final"])


def _files(folder: Path) -> Iterator[str]:
    """Names of the files, an edition of a checkpoint by the name of its step."""
    for path in folder.rglob("*"):
        if path.is_file():
            parts = path.relative_to(folder).parts
            yield "/".join(part.partition(".")[0] if part.startswith("step-") else part for part in parts)


def _said(process: subprocess.Popen[bytes]) -> str:
    """How a start ended, and the end of what it said."""
    log = Path(process.args[0])  # type: ignore[index, arg-type]
    return f"exit code {process.poll()}\n{log.read_text(errors='replace')[-3000:]}"
