"""``paceline trace`` as it is typed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.contract.errors import RecipeError, UserError
from paceline.verbs.commands.options import Changes, Options, Out, Source, Trusting
from paceline.verbs.commands.ranks import Joining, Launch, launch_training

if TYPE_CHECKING:
    from paceline.recipe import Recipe
    from paceline.recipe.trust import Trust


@dataclass(frozen=True, kw_only=True)
class Window(Options):
    """Which steps are looked into, and how."""

    steps: Annotated[
        list[str] | None,
        typer.Option(metavar="WINDOW", help="Such as 90:100 or last-epoch:-10; repeatable [default: the recipe's]."),
    ] = None
    # its name is given because typer 0.27 takes a metavar that is the name in capitals for it
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="kineto or nsys.")] = None
    graph: Annotated[
        str | None, typer.Option(metavar="WAY", help="launch or keep: captured steps inside the window.")
    ] = None
    memory_too: Annotated[bool, typer.Option("--memory", help="Allocations too.")] = False


def trace(
    *,
    target: Annotated[
        Path | None,
        typer.Argument(metavar="TARGET", help="Recipe (YAML); or a run folder, to read.", show_default=False),
    ] = None,
    source: Source,
    out: Out = None,
    window: Window,
    try_it: Annotated[
        bool, typer.Option("--try", help="Then the window once more with the verdict's switch on.")
    ] = False,
    only_print: Annotated[bool, typer.Option("--print", help="With --kind nsys: only print the command.")] = False,
    changes: Changes,
    ranks: Annotated[Launch, "As of train."],
    joining: Annotated[Joining, "As of train."],
    trusting: Trusting,
) -> None:
    """Train with some steps traced, and say what they wait for.

    \b
    paceline trace recipes/imdb_distilbert.yaml --steps 90:100 --try
    paceline trace recipes/imdb_bert_ddp_nvtx.yaml --kind nsys --gpus 4
    paceline trace runs/x
    """
    from paceline.distributed.failures import failures_told
    from paceline.recipe.trust import switches
    from paceline.run_folder import named_now
    from paceline.verbs import trace as tracing
    from paceline.verbs.asked import build_recipe

    trust, settings = trusting.trust(), changes.in_full()
    if target is not None and target.is_dir():
        of_run = [*source.given(), *["--out"] * (out is not None), *window.given(), *["--print"] * only_print]
        _require_none(target, [*of_run, *changes.given(), *ranks.given(), *joining.given()])
        _read(target, trust, try_it=try_it)
        return
    with failures_told(joining.rank):
        recipe = build_recipe(target, source.model, source.data, settings, verb="trace", trust=trust)
        windows = tracing.trace_settings(recipe, window.steps or (), window.kind, window.graph, window.memory_too)
        recipe = recipe.with_settings(windows)
        is_nsys = recipe.trace.kind == "nsys"
        if only_print and not is_nsys:
            raise _nothing_to_print(recipe)
        if try_it or (is_nsys and (only_print or "NSYS_PROFILING_SESSION_ID" not in os.environ)):
            folder = out or named_now(recipe.name)
            words = ["train", *([str(target)] if target else []), *source.words(), "--out", str(folder)]
            words += [*ranks.words(), *joining.words(), *Changes(settings=[*settings, *windows]).words()]
            words += switches(recipe).split()  # the recipe is the person's, or has been allowed above
            if not try_it:
                raise SystemExit(tracing.under_nsys(words, folder, recipe, typer.echo, only_print=only_print))
            _require_two_runs(recipe, joining)
            _train_and_try(words, folder)
            return
        if ranks.given():
            launch_training(recipe, windows, ranks, joining, trust)
        from paceline.contract.stopwatch import process_start
        from paceline.verbs.train import train as train_run

        train_run(recipe, out=out, started=process_start(), **joining.others())


def _nothing_to_print(recipe: Recipe) -> RecipeError:
    why = "only for nsys is there a command to print"
    return RecipeError(f"--print with trace.kind = {recipe.trace.kind}", why, "leave it out, or --kind nsys")


def _read(folder: Path, trust: Trust, *, try_it: bool) -> None:
    from paceline.verbs import trace as tracing

    tracing.show(folder, typer.echo)
    if try_it:
        typer.echo(tracing.tried(folder, typer.echo, trust=trust))


def _train_and_try(words: Sequence[str], folder: Path) -> None:
    from paceline.recipe.trust import Trust
    from paceline.verbs import trace as tracing

    if code := tracing.train_first(words):
        raise SystemExit(code)
    made = Trust(remote_code=True, references=True)  # the folder was made just now, from the person's recipe
    typer.echo(tracing.tried(folder, typer.echo, trust=made))


def _require_none(folder: Path, given: Sequence[str]) -> None:
    if given:
        why = "what was traced in a run folder is only read"
        fix = f"leave it out, or name a recipe: paceline trace {folder / 'recipe.yaml'} {given[0]} ..."
        raise UserError(f"{folder} with {', '.join(given)}", why, fix)


def _require_two_runs(recipe: Recipe, joining: Joining) -> None:
    """Refuse ``--try`` of what cannot be run twice."""
    from paceline.machine.cluster import find_place

    if recipe.trace.kind == "nsys":
        raise RecipeError("--try with trace.kind = nsys", "nsys' report has no verdict", "--kind kineto")
    if joining.place() or find_place(os.environ).world_size > 1:
        why = "it makes two runs, and these ranks were started for one"
        raise UserError("--try among ranks", why, "paceline trace RECIPE --try --gpus N starts the ranks of both")
