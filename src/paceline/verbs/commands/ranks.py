"""The ranks of a run: those that a command starts on this machine, and those that it joins."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from paceline.contract.errors import UserError
from paceline.verbs.commands.options import Options

if TYPE_CHECKING:
    from paceline.recipe import Recipe
    from paceline.recipe.trust import Trust
    from paceline.verbs.launch.ranks import Gpus


def gpus_typed(text: str) -> Gpus:
    """Return the value of ``--gpus``; imported only where there is one."""
    from paceline.verbs.launch.ranks import parse_gpus

    return parse_gpus(text)


@dataclass(frozen=True, kw_only=True)
class Launch(Options):
    """Ranks to start here."""

    gpus: Annotated[
        Any, typer.Option(parser=gpus_typed, metavar="N|all", help="Train on this many GPUs, a process each.")
    ] = None
    devices: Annotated[str | None, typer.Option(metavar="N,N,...", help="Train on these GPUs, such as 1,3.")] = None
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train with this many processes on the CPU.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Joining(Options):
    """Ranks that were started one by one, of which this process is one."""

    init: Annotated[
        str | None, typer.Option(metavar="URL", help="Join other ranks at tcp://HOST:PORT or file:///PATH.")
    ] = None
    rank: Annotated[int | None, typer.Option(min=0, metavar="R", help="With --init: which one this process is.")] = None
    world_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="With --init: how many there are.")] = None
    timeout: Annotated[
        int | None, typer.Option(min=1, metavar="SECONDS", help="How long ranks wait for one another.")
    ] = None

    def place(self) -> list[str]:
        """The options that say which rank this process is, as far as they were given."""
        return [name for name in self.given() if name != "--timeout"]

    def others(self) -> dict[str, Any]:
        """What ``train`` is told of the other ranks; nothing where it finds everything in the environment.

        Raises:
            UserError: the place is not whole, or given twice; or there are no others to wait for.
        """
        if not self.given():
            return {}
        from paceline.machine.cluster import find_place

        place = find_place(os.environ, init=self.init, rank=self.rank, world_size=self.world_size)
        if place.started == "alone":
            why = "nobody waits for anybody: this process is no rank"
            fix = "leave it out, or start ranks: --gpus N, or --processes N"
            raise UserError(f"--timeout {self.timeout}", why, fix)
        return {"place": place} if self.timeout is None else {"place": place, "timeout_seconds": self.timeout}


def require_one_process(command: str) -> None:
    """Refuse a command that one process carries out, where a job started several: each would do the same.

    Raises:
        UserError: this process is one of several.
    """
    from paceline.machine.cluster import find_place

    place = find_place(os.environ)
    if place.world_size > 1:
        why = f"one process carries {command} out, and each of these would do the same"
        fix = f"srun --ntasks=1 {command}" if place.started == "srun" else f"start one process: {command}"
        raise UserError(f"{place.world_size} processes were started together", why, fix)


def alone_in_a_job() -> dict[str, Any]:
    """Nothing, like ``Joining.others``; says so where a Slurm job has tasks that this one process leaves idle."""
    from paceline.machine.cluster import find_place
    from paceline.machine.jobs import idle_tasks
    from paceline.verbs.notices import tell

    if not find_place(os.environ).is_rank and (idle := idle_tasks(os.environ)):
        tell(f"this Slurm job has {idle} tasks, and this is one process: srun paceline train ... makes a rank of each")
    return {}


def launch_training(
    asked: Recipe | Path, changes: Sequence[str], ranks: Launch, joining: Joining, trust: Trust
) -> NoReturn:
    """Run this command, which trains a recipe or resumes a folder, as several ranks, and end with their exit code.

    Raises:
        UserError: the options contradict one another, the machine, the recipe or the environment.
        SystemExit: the ranks have ended.
    """
    import functools
    import shlex

    from paceline.machine.facts import this_machine
    from paceline.verbs.launch import choose_ranks, launch, rank_command, without_launch
    from paceline.verbs.launch.check import check_recipe
    from paceline.verbs.train import recipe_to_resume

    if place := joining.place():
        option = " ".join(ranks.words()[:2])
        why = f"{option} starts all ranks here and numbers them; {place[0]} joins ranks that were started one by one"
        raise UserError(f"{option} with {', '.join(place)}", why, f"leave out {' '.join(place)}, or {option}")
    command = shlex.join(["paceline", *without_launch(sys.argv[1:])])
    recipe = recipe_to_resume(asked, changes, trust) if isinstance(asked, Path) else asked
    facts = functools.cache(this_machine)
    chosen = choose_ranks(command, facts, os.environ, device=recipe.device, **vars(ranks))
    check_recipe(recipe, chosen, facts(), sys.argv[1:])
    raise SystemExit(launch(rank_command(), chosen, makes_run=True))
