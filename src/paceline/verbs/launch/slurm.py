"""The batch script of a run under Slurm: a pure function of what was asked for.

Each start of the job runs the script from its top: it looks what is in the run folder, and begins or goes on. What
Slurm itself tells is not relied on: srun has been seen to exit with 0 after a node was lost.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.errors import UserError, excerpt
from paceline.contract.signals import STOPPED_FILE

SIGNALS = ("USR2", "USR1", "HUP")
"""Signals that a run answers with a checkpoint. USR2 is first: NCCL has been said to take USR1 for itself. SIGTERM is
what scancel sends, after which no job is queued again."""

CPUS_FOR_A_GPU = 4
"""For a rank's own work, its loader and the threads of its libraries."""

_OWN = {
    "--nodes": ("--nodes", "-N"),
    "--gpus or --processes": ("--ntasks", "-n", "--ntasks-per-node", "--ntasks-per-gpu", "--gpus-per-task"),
    "--cpus": ("--cpus-per-task", "-c"),
    "--time": ("--time", "-t"),
    "--partition": ("--partition", "-p"),
    "--signal and --warn": ("--signal",),
    "--no-requeue": ("--requeue", "--no-requeue"),
    "--out, which the log lies beside": ("--output", "-o", "--error", "-e", "--open-mode"),
    "the current folder": ("--chdir", "-D"),
    "a job for each run": ("--array", "-a"),
    "the recipe": ("--wrap",),
}
"""What says the same here -> sbatch's options for it, which are not taken after ``--``."""

_GPU_OPTIONS = ("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-socket")
"""sbatch's options that ask for GPUs; with one of them ours is left out."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a batch script says."""

    name: str
    run: Path
    """The run folder, absolute."""
    folder: Path
    """The current folder of the run, absolute."""
    paceline: Sequence[str]
    """Program and arguments that stand for ``paceline``."""
    begin: Sequence[str] = ()
    """Arguments that begin the run, without the folder and what starts ranks; empty: it may only go on."""
    trust: Sequence[str] = ()
    """Switches that ``--resume`` needs for the recipe."""
    nodes: int = 1
    gpus: int | None = None
    """On each node."""
    processes: int | None = None
    """On each node, on the CPU."""
    cpus: int | None = None
    """On each node; None: as many as the ranks need, or what the site gives."""
    seconds: int | None = None
    """The time limit; None: the partition's."""
    partition: str | None = None
    signal: str = SIGNALS[0]
    """The warning before the time limit, and before a preemption where the site sends one."""
    warn_seconds: int = 120
    """How long before the time limit; Slurm may send it up to a minute earlier."""
    requeue: bool = True
    starts_without_progress: int = 3
    """After so many starts from one checkpoint the job is given up."""
    setup: Sequence[str] = ()
    """Lines of shell before the run."""
    options: Sequence[str] = ()
    """Further options of sbatch, a word each."""

    @property
    def logs(self) -> Path:
        """Where script and logs lie: beside the run folder, which is moved aside where it holds no checkpoint."""
        return self.run.with_name(f"{self.run.name}.slurm")

    @property
    def ranks(self) -> int:
        """On all nodes together."""
        return self.nodes * (self.gpus or self.processes or 1)


def script(job: Job) -> str:
    """The text that ``sbatch`` is given.

    Raises:
        UserError: an option of sbatch's that says what an option here says, or what is none.
    """
    return "\n".join([*_header(job), "", *_body(job), ""])


def parse_seconds(text: str, option: str = "--time") -> int:
    """Seconds of ``4h``, ``1h30m``, ``90m`` or ``2d``; or of Slurm's ``1-12:00:00``, ``4:00:00``, ``240`` (minutes).

    Raises:
        UserError: it is no time, or none at all.
    """
    text = text.strip()
    seconds = 0
    units = re.fullmatch(r"(?:(\d{1,5})d)?(?:(\d{1,6})h)?(?:(\d{1,8})m)?(?:(\d{1,9})s)?", text, re.ASCII)
    slurms = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.ASCII)
    if text and units:
        seconds = sum(int(part or 0) * size for part, size in zip(units.groups(), (86400, 3600, 60, 1), strict=True))
    elif slurms:
        days, *rest = slurms.groups()
        parts = [int(part) for part in rest if part is not None]
        # without days one number is minutes and two are minutes and seconds; with days they begin with hours
        sizes = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
        seconds = int(days or 0) * 86400 + sum(part * size for part, size in zip(parts, sizes, strict=False))
    if seconds == 0:
        raise UserError(f"{option} {excerpt(text)}", "it is a time as 4h, 1h30m, 90m, 2d or 1-12:00:00", f"{option} 4h")
    return seconds


def slurm_time(seconds: int) -> str:
    """``[days-]hours:minutes:seconds``."""
    days, rest = divmod(seconds, 86400)
    return f"{days}-" * bool(days) + f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def _header(job: Job) -> list[str]:
    groups = _grouped(job.options)
    named = {_name(group[0]) for group in groups}
    cpus = job.cpus or (job.gpus * CPUS_FOR_A_GPU if job.gpus else job.processes)
    lines = [
        f"--job-name={re.sub(r'[^A-Za-z0-9_.-]+', '-', job.name)}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}" if cpus else "",
        f"--gpus-per-node={job.gpus}" if job.gpus and not named & set(_GPU_OPTIONS) else "",
        f"--time={slurm_time(job.seconds)}" if job.seconds else "",
        f"--partition={shlex.quote(job.partition)}" if job.partition else "",
        f"--signal={job.signal}@{job.warn_seconds}",
        "--requeue" if job.requeue else "--no-requeue",
        "--open-mode=append",
        f"--chdir={shlex.quote(str(job.folder))}",
        f"--output={shlex.quote(str(job.logs / '%j.log'))}",
        *(shlex.join(group) for group in groups),
    ]
    return ["#!/bin/bash", *(f"#SBATCH {line}" for line in lines if line)]


def _grouped(options: Sequence[str]) -> list[list[str]]:
    """The words of each option: ``-C a100 --exclusive`` is two options.

    Raises:
        UserError: one says what another option here does, or a word is no option.
    """
    groups: list[list[str]] = []
    for word in options:
        if word.startswith("-"):
            groups.append([word])
        elif groups and len(groups[-1]) == 1 and "=" not in groups[-1][0]:
            groups[-1].append(word)
        else:
            raise UserError(
                f"{excerpt(word)}: no option of sbatch", "after -- come options of sbatch", "-- --account=x"
            )
        if "\n" in word:
            raise UserError(f"{excerpt(word)}: no option of sbatch", "it has more than one line", "leave it out")
    for group in groups:
        for ours, theirs in _OWN.items():
            if _name(group[0]) in theirs:
                raise UserError(f"{' '.join(group)} after --", f"here it follows from {ours}", "leave it out")
    return groups


def _name(word: str) -> str:
    """``--time`` of ``--time=4``, ``-t`` of ``-t4``."""
    return word.partition("=")[0] if word.startswith("--") else word[:2]


def _body(job: Job) -> list[str]:
    ranks = [f"--gpus={job.gpus}"] if job.gpus else [f"--processes={job.processes}"] if job.processes else []
    go_on = f'"${{paceline[@]}}" train "$run" --resume {shlex.join([*job.trust, *ranks])}'.rstrip()
    begin = f'"${{paceline[@]}}" {shlex.join(job.begin)} --out "$run" {shlex.join(ranks)}'.rstrip()
    setup = "".join(f"{line}\n" for line in job.setup)
    fresh = _BEGIN.format(begin=begin) if job.begin else _ONLY_ON
    again = _AGAIN.format(signal=job.signal) if job.requeue else ""
    return (
        _BODY.format(
            run=shlex.quote(str(job.run)),
            logs=shlex.quote(str(job.logs)),
            paceline=shlex.join(job.paceline),
            setup=setup,
            limit=job.starts_without_progress,
            go_on=go_on,
            fresh=fresh,
            again=again,
            file=STOPPED_FILE,
            cpus=' --cpus-per-task="$SLURM_CPUS_PER_TASK"' if job.cpus or job.gpus or job.processes else "",
        )
        .strip("\n")
        .split("\n")
    )


_BODY = """
# Written by paceline launch slurm. Every start of the job, the first and those after a requeue, runs all of it.
run={run}
logs={logs}
paceline=({paceline})
{setup}
say() {{ echo "[$(date +%FT%T) ${{SLURMD_NODENAME:-$(hostname)}}] $*"; }}

# the run is finished when it has a summary: srun may exit with 0 after a node was lost
if [ -e "$run/summary.json" ]; then
    say "the run is finished: $run"
    exit 0
fi

shopt -s nullglob
saved=("$run"/checkpoints/step-*/COMMITTED)
shopt -u nullglob
step=0
if [ ${{#saved[@]}} -gt 0 ]; then
    step=${{saved[-1]%/COMMITTED}}
    step=$((10#${{step##*/step-}}))
fi

# a start that comes no further than the one before it will not do so the next time either
starts=$logs/$SLURM_JOB_ID.starts
same=0
if [ -e "$starts" ]; then
    while read -r at; do
        if [ "$at" = "$step" ]; then same=$((same + 1)); else same=0; fi
    done < "$starts"
fi
if [ "$same" -ge {limit} ]; then
    say "given up: $same starts in a row came no further than step $step"
    exit 1
fi
echo "$step" >> "$starts"

start="start $((${{SLURM_RESTART_COUNT:-0}} + 1)) of job $SLURM_JOB_ID"
if [ ${{#saved[@]}} -gt 0 ]; then
    say "$start: goes on after step $step on $SLURM_JOB_NODELIST"
    command=({go_on})
else
{fresh}
fi
# a run that is stopped says by what: in its folder, and also here, where it may not have one yet
word=$logs/$SLURM_JOB_ID.stopped
rm -f "$run/preempted" "$word"

# a signal is answered when srun has ended; one that were ignored instead, srun and the ranks would ignore too
trap : TERM
# srun does not take --cpus-per-task from sbatch; a rank that fails ends the others itself, and says why
{file}="$word" srun --ntasks-per-node=1{cpus} --kill-on-bad-exit=0 "${{command[@]}}"
code=$?

if [ -e "$run/summary.json" ]; then
    say "the run is finished: $run"
    exit 0
fi
{again}say "ended with exit code $code before the run was finished"
exit $((code ? code : 1))
"""

_BEGIN = """\
    if [ -e "$run" ]; then
        aside=$run.without-checkpoint-$(date +%Y%m%d-%H%M%S)
        mv "$run" "$aside"
        say "no checkpoint is in $run: moved to $aside"
    fi
    say "$start: begins on $SLURM_JOB_NODELIST"
    command=({begin})"""

_ONLY_ON = """\
    say "no checkpoint is in $run"
    exit 2"""

_AGAIN = """\
# only after the warning: what scancel sends is to end the job, and after a preemption Slurm itself queues it again;
# a start that does not listen yet is ended by the signal itself
if grep -qsw "stopped by SIG{signal}" "$run/preempted" "$word" || [ "$code" -eq $((128 + $(kill -l {signal}))) ]; then
    say "$(cat "$run/preempted" 2>/dev/null || echo "stopped by SIG{signal} before anything was saved")"
    say "queued again"
    scontrol requeue "$SLURM_JOB_ID"
    exit
fi
"""
