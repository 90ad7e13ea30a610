"""``paceline bench RECIPE`` as it is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.verbs.commands.options import Changes, RecipeFile, Source, Trusting


def bench(
    *,
    target: RecipeFile = None,
    source: Source,
    rungs: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="These rungs or contenders alone; * stands for any letters.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="Cells of each rung; the first with empty caches.")
    ] = 3,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="All of it in this time, such as 10m: fewer steps, then fewer cells."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Steps of a cell [default: the recipe's, or what fits].")
    ] = None,
    limit: Annotated[str, typer.Option(metavar="TIME", help="End a cell that takes longer: it hangs.")] = "30m",
    again: Annotated[bool, typer.Option("--again", help="Run once more what failed before.")] = False,
    changes: Changes,
    out: Annotated[Path | None, typer.Option(help="Folder of the bench [default: runs/bench-<name>].")] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Folder for the charts: SVG, with matplotlib PNG and PDF.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="Show the rungs, and run nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trusting: Trusting,
) -> None:
    """Train one model every way: peers and techniques side by side.

    \b
    paceline bench recipes/bench_small.yaml --budget 10m
    paceline bench recipes/imdb_distilbert.yaml --rungs 'plain,lightning*,paceline' --repeats 4
    """
    from paceline.bench.budget import parse_time
    from paceline.bench.ladder import Wanted
    from paceline.verbs import bench as benching
    from paceline.verbs.asked import build_recipe
    from paceline.verbs.bench_screen import Screen

    names = tuple(name.strip() for name in (rungs or "").split(",") if name.strip())
    if show:
        typer.echo(benching.listed(names), nl=False)
        return
    wanted = Wanted(
        rungs=names,
        repeats=repeats,
        budget=None if budget is None else parse_time(budget, "--budget"),
        steps=steps,
        limit=parse_time(limit, "--limit"),
        again=again,
    )
    recipe = build_recipe(target, source.model, source.data, changes.in_full(), verb="bench", trust=trusting.trust())
    with Screen() as screen:
        found = benching.bench(recipe, wanted, out=out, figures=figures, tell=screen.show, say=screen.say)
    typer.echo(benching.printed(found) if as_json else benching.told(found), nl=as_json)
