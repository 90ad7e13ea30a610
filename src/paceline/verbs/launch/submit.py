"""Hand a batch script to Slurm, say where everything is, and follow the log."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from paceline.contract.errors import RunFolderError, UserError
from paceline.contract.files import disk_errors, write_atomically
from paceline.machine.jobs import run_client
from paceline.run_folder import has_checkpoint
from paceline.verbs.launch.slurm import Job, script, slurm_time

LOOK_SECONDS = 2.0
"""How often the log and the queue are looked at; a controller serves many."""

ANSWER_SECONDS = 60.0
"""How long a controller may take."""

_GONE = "invalid job id"
"""What squeue says of a job that the controller has forgotten."""


def check_folder(job: Job) -> None:
    """Refuse a run folder that the job could not begin in, or go on from, before it waits for its turn.

    Raises:
        RunFolderError: a run or something else is there; or no run with a checkpoint, where it is to go on.
        UserError: a path that Slurm would read as a pattern.
    """
    if "%" in str(job.logs):
        raise UserError(f"{job.run}: has a % in it", "Slurm puts numbers in its place", "choose another --out")
    if job.begin and job.run.exists():
        way = f"; paceline launch slurm {shlex.quote(str(job.run))} --resume ..." * has_checkpoint(job.run)
        raise RunFolderError(f"{job.run}: is there already", "a run would begin in it", f"choose another --out{way}")
    if not job.begin and not has_checkpoint(job.run):
        why = "no checkpoint of a run is in it"
        raise RunFolderError(f"{job.run}: nothing to go on with", why, "paceline launch slurm RECIPE begins a run")


def submit(job: Job) -> str:
    """Write the script beside the run folder, and give it to ``sbatch``; returns the number of the job.

    Raises:
        UserError: there is no sbatch here, or it refuses the job.
    """
    if shutil.which("sbatch") is None:
        why = "Slurm's commands are on the machines where its jobs are submitted"
        raise UserError("sbatch: no such program", why, "run it there; --dry-run > job.sh writes the script here")
    file = job.logs / "job.sh"
    text = script(job)
    with disk_errors(file):
        job.logs.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.encode())
    done = _asked("sbatch", "--parsable", str(file))
    # the number, and the name of the cluster where there are several
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        told = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise UserError("sbatch refuses the job", told, f"change the options, or {file}; nothing was started")
    return number


def described(job: Job, number: str) -> str:
    """What a person wants to know of a job that waits for its turn."""
    kind, count = ("GPU", job.gpus) if job.gpus else ("process", job.processes or 1)
    what = f"{count} {kind}{'' if count == 1 else 's' if job.gpus else 'es'}"
    limit = f", {slurm_time(job.seconds)}" if job.seconds else ""
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)} with {what}{' each' * (job.nodes > 1)}{limit}"
    log = shlex.quote(str(_log(job, number)))
    again = f"{job.warn_seconds} s before the time limit SIG{job.signal} has it save, and be queued again"
    rows = {
        "job": f"{number}: {nodes}",
        "run": str(job.run),
        "log": log,
        "script": str(job.logs / "job.sh"),
        "requeue": again if job.requeue else "no",
        "watch": f"tail -F {log}",
        "state": f"squeue -j {number}",
        "stop": f"scancel {number}",
    }
    return "\n".join(f"  {name:<8} {text}" for name, text in rows.items())


def follow(job: Job, number: str, show: Callable[[str], None]) -> int:
    """Pass on the log until the job has left the queue; 0 where the run is finished by then, else 1.

    Args:
        show: takes text as it comes, line ends and all.
    """
    log, read, state = _log(job, number), 0, ""
    while True:
        # asked before reading, so that all is read of a job that has ended
        now = _state(number)
        if now and now != state:
            show(f"job {number}: {now.lower()}\n")
            state = now
        read = _pass_on(log, read, show, whole_lines=now is not None)
        if now is None:
            break
        time.sleep(LOOK_SECONDS)
    is_finished = (job.run / "summary.json").exists()
    show(f"job {number}: ended, {'the run is finished' if is_finished else 'and the run is not finished'}\n")
    return 0 if is_finished else 1


def _pass_on(log: Path, read: int, show: Callable[[str], None], *, whole_lines: bool) -> int:
    """Show what stands behind byte ``read``; returns the byte after it."""
    if not log.exists():
        return read
    with log.open("rb") as file:
        file.seek(read)
        found = file.read()
    if whole_lines:
        found = found[: found.rfind(b"\n") + 1]
    if found:
        show(found.decode(errors="replace"))
    return read + len(found)


def _state(number: str) -> str | None:
    """As squeue has it; empty while no controller answers, None when the job has left the queue."""
    done = _asked("squeue", "--noheader", "--format=%T", f"--jobs={number}")
    if done.returncode:
        return None if _GONE in done.stderr.lower() else ""
    return done.stdout.strip() or None


def _asked(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return run_client(command, ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {ANSWER_SECONDS:.0f} s")
    except OSError as error:
        raise UserError(f"{command[0]}: cannot be run: {error.strerror}", fix="paceline doctor") from None


def _log(job: Job, number: str) -> Path:
    return job.logs / f"{number}.log"
