"""``paceline launch`` as it is typed: a run on machines that something else hands out.

Only typer is imported here; a command imports what it needs when it runs.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.contract.errors import UserError
from paceline.contract.interpreter import python
from paceline.verbs.commands.options import Changes, SingleOptions, Source, Trusting, unfolded
from paceline.verbs.commands.ranks import gpus_typed

if TYPE_CHECKING:
    from paceline.recipe import Recipe
    from paceline.verbs.launch.ranks import Gpus
    from paceline.verbs.launch.slurm import Job

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Target = Annotated[
    Path | None,
    typer.Argument(metavar="TARGET", help="Recipe (YAML), or data; with --resume, a run folder.", show_default=False),
]
_GPUS_OF_EACH = "GPUs of each machine, a process each."
Processes = Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes of each machine, on the CPU.")]
Out = Annotated[Path | None, typer.Option(help="Run folder, which all machines see [default: runs/<name>-<time>].")]


SbatchOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- SBATCH OPTIONS]", help="Any option of sbatch.", show_default=False),
]
Cpus = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="CPUs of each machine [default: 4 a GPU, 1 a process].")
]
Setup = Annotated[
    list[str] | None, typer.Option(metavar="LINE", help="Shell before the run, as 'module load cuda'; repeatable.")
]


def _gpus_of_slurm(text: str) -> int:
    """Return the value of ``--gpus`` for a job.

    Raises:
        UserError: it is no number.
    """
    gpus = gpus_typed(text)
    if gpus == "all":
        why = "Slurm gives as many GPUs of a machine as a job asks for"
        raise UserError("--gpus all", why, "--gpus 8, or as many as the partition's machines have: sinfo -o '%P %G'")
    return gpus


class WarningSignal(StrEnum):
    """Signals that a run answers with a checkpoint."""

    USR2 = "USR2"
    USR1 = "USR1"
    HUP = "HUP"


@app.callback()
def launch() -> None:
    """Start a run on several machines."""


def slurm(
    *,
    target: Target = None,
    options: SbatchOptions = None,
    source: Source,
    changes: Changes,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Machines.")] = 1,
    gpus: Annotated[Any, typer.Option(parser=_gpus_of_slurm, metavar="N", help=_GPUS_OF_EACH)] = None,
    processes: Processes = None,
    cpus: Cpus = None,
    time: Annotated[str | None, typer.Option(metavar="TIME", help="Time limit of a start, as 4h or 90m.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition [default: the site's].")] = None,
    signal: Annotated[WarningSignal, typer.Option(help="Signal before the time limit.")] = WarningSignal.USR2,
    warn: Annotated[str, typer.Option(metavar="TIME", help="How long before the time limit.")] = "2m",
    requeue: Annotated[bool, typer.Option(help="Queue the job again after the warning.")] = True,
    starts: Annotated[int, typer.Option(min=1, metavar="N", help="Give up after so many starts without progress.")] = 3,
    setup: Setup = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, and submit nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the log until the job has ended.")] = False,
    trusting: Trusting,
) -> None:
    """Train under Slurm: write the batch script, submit it, and go on where a start was cut off.

    \b
    paceline launch slurm recipes/imdb_bert_ddp.yaml --nodes 2 --gpus 8 --time 4h
    paceline launch slurm recipes/imdb_bert_ddp.yaml --gpus 8 --time 4h --dry-run
    paceline launch slurm recipes/imdb_bert_ddp.yaml --gpus 4 --partition long -- --account=team --constraint=a100
    paceline launch slurm runs/imdb --resume --gpus 4 --time 4h --wait
    """
    from paceline.recipe.trust import switches
    from paceline.run_folder import named_now
    from paceline.verbs.launch.slurm import Job

    given = [word for group in (source, changes) for word in group.words()]
    recipe, begin = _asked(target, source, changes, trusting, resume, given + ["--out"] * (out is not None))
    _check_ranks(recipe, nodes, gpus, processes)
    seconds, before = _limits(time, warn)
    job = Job(
        name=recipe.name,
        run=(target if resume and target else out or named_now(recipe.name)).absolute(),
        folder=Path.cwd(),
        paceline=python("-m", "paceline"),
        begin=begin,
        trust=switches(recipe).split(),
        nodes=nodes,
        gpus=gpus,
        processes=processes,
        cpus=cpus,
        seconds=seconds,
        partition=partition,
        signal=signal.value,
        warn_seconds=before,
        requeue=requeue,
        starts_without_progress=starts,
        setup=setup or (),
        options=options or (),
    )
    _carry_out(job, dry_run, wait)


def _limits(time: str | None, warn: str) -> tuple[int | None, int]:
    """Seconds of a start, and before its end at which it is warned.

    Raises:
        UserError: they are no times, or the warning would come first.
    """
    from paceline.verbs.launch.slurm import parse_seconds

    seconds, before = None if time is None else parse_seconds(time), parse_seconds(warn, "--warn")
    if seconds is not None and before >= seconds:
        raise UserError(f"--warn {warn} with --time {time}", "the warning would come before the start", "--warn 1m")
    return seconds, before


def _carry_out(job: Job, dry_run: bool, wait: bool) -> None:
    """Print the job's script, or submit it."""
    from paceline.verbs.launch.slurm import script
    from paceline.verbs.launch.submit import check_folder, described, follow, submit

    text = script(job)
    if dry_run:
        typer.echo(text, nl=False)
        return
    check_folder(job)
    number = submit(job)
    typer.echo(described(job, number))
    if wait:
        try:
            code = follow(job, number, lambda part: typer.echo(part, nl=False))
        except KeyboardInterrupt:
            typer.echo(f"job {number} goes on; scancel {number} stops it", err=True)
            raise
        if code:
            raise SystemExit(code)


def torchrun(
    *,
    target: Target = None,
    source: Source,
    changes: Changes,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    hosts: Annotated[str, typer.Option(metavar="A,B,...", help="Machines; the ranks meet on the first.")],
    gpus: Annotated[Any, typer.Option(parser=gpus_typed, metavar="N|all", help=_GPUS_OF_EACH)] = None,
    processes: Processes = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the first machine that all reach.")] = 29500,
    trusting: Trusting,
) -> None:
    """Print the line that each machine runs.

    \b
    paceline launch torchrun recipes/imdb_bert_ddp.yaml --hosts node1,node2 --gpus 8
    """
    from paceline.recipe.trust import switches
    from paceline.run_folder import named_now
    from paceline.verbs.launch.hosts import Machines, lines, parse_hosts

    names = parse_hosts(hosts)
    given = [word for group in (source, changes) for word in group.words()]
    recipe, begin = _asked(target, source, changes, trusting, resume, given + ["--out"] * (out is not None))
    _check_ranks(recipe, len(names), gpus, processes)
    if resume:
        arguments = ["train", str(target), "--resume", *switches(recipe).split()]
    else:
        arguments = [*begin, "--out", str(out or named_now(recipe.name))]
    machines = Machines(
        hosts=names,
        python=python(),
        arguments=arguments,
        ranks="gpu" if gpus == "all" else gpus or processes or 1,
        on_cpu=gpus is None,
        port=port,
    )
    typer.echo(f"# on each machine, in {Path.cwd()}")
    for host, line in zip(names, lines(machines), strict=True):
        typer.echo(f"\n# {host}\n{line}")


def _asked(
    target: Path | None, source: Source, changes: Changes, trusting: Trusting, resume: bool, given: list[str]
) -> tuple[Recipe, list[str]]:
    """The recipe, and the arguments that begin its run; none where it goes on."""
    from paceline.verbs.asked import build_recipe, folder_to_resume
    from paceline.verbs.train import recipe_to_resume

    trust, settings = trusting.trust(), changes.in_full()
    if resume:
        return recipe_to_resume(folder_to_resume(target, given), (), trust), []
    recipe = build_recipe(target, source.model, source.data, settings, trust=trust)
    switches = list(trusting.given())
    sets = [word for setting in settings for word in ("--set", setting)]
    return recipe, ["train", *([str(target)] if target else []), *source.words(), *sets, *switches]


def _check_ranks(recipe: Recipe, machines: int, gpus: Gpus | None, processes: int | None) -> None:
    """What every rank would refuse once the job has had its turn."""
    from paceline.contract.errors import RecipeError
    from paceline.recipe.choose import check_shares
    from paceline.verbs.launch.check import require_cut

    if gpus is not None and processes is not None:
        why = "one counts GPUs, the other processes on the CPU"
        raise UserError(
            f"--gpus {gpus} with --processes {processes}", why, f"--gpus {gpus}, or --processes {processes}"
        )
    if gpus is not None and recipe.device == "cpu":
        raise RecipeError(f"device = cpu with --gpus {gpus}", "--gpus trains on GPUs", "--set device=auto")
    if gpus == "all":
        return  # each machine counts its own when it starts
    ranks = machines * (gpus or processes or 1)
    if ranks > 1:  # one process drops what it has nobody for
        check_shares(recipe, ranks)
        require_cut(recipe, ranks)


app.command("slurm", cls=SingleOptions)(unfolded(slurm))
app.command("torchrun", cls=SingleOptions)(unfolded(torchrun))
