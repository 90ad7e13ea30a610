"""``paceline check`` as it is typed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.verbs.commands.options import Changes, Source, Trusting

if TYPE_CHECKING:
    from paceline.recipe import Recipe


def check(
    *,
    target: Annotated[
        Path | None, typer.Argument(metavar="RECIPE|RUN", help="Recipe (YAML), or a run folder.", show_default=False)
    ] = None,
    source: Source,
    only: Annotated[str | None, typer.Option(metavar="NAME,..", help="Try these claims alone.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the claims, and try none.")] = False,
    samples: Annotated[int, typer.Option(metavar="N", help="Training samples to take.")] = 20,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="Begin no claim after 90s, 2m, ...")] = None,
    changes: Changes,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trusting: Trusting,
) -> None:
    """Try what is promised of a run on your model and data.

    Exit code 1: a claim does not hold.

    \b
    paceline check recipes/imdb_distilbert.yaml
    paceline check recipe.yaml --only packing,resume
    paceline check runs/reviews --budget 2m --json
    """
    import json

    from paceline.bench.budget import parse_time
    from paceline.check.claims import chosen
    from paceline.verbs import check as checking
    from paceline.verbs.check_shown import left_out, lines, summary, table

    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    claims = chosen(names)
    if listed:
        for line in table(claims):
            typer.echo(line)
        return
    seconds = None if budget is None else parse_time(budget, "--budget")
    recipe, trained = _meant(target, source, changes.in_full(), trusting)
    width = max(len(claim.name) for claim in claims)

    from rich.console import Console

    with Console(stderr=True, markup=False).status("reading data and model") as status:
        done = checking.check(
            recipe,
            names,
            samples=samples,
            budget_seconds=seconds,
            trained=trained,
            begins=lambda claim: status.update(f"{claim.name}: {claim.says}"),
            told=lambda found: None if as_json else typer.echo("\n".join(lines(found, width))),
        )
    if as_json:
        typer.echo(json.dumps(done.plain(), indent=2))
    else:
        typer.echo(summary(done))
        if told := left_out(done):
            typer.echo(told)
    if not done.holds:
        raise typer.Exit(1)


def _meant(target: Path | None, source: Source, settings: list[str], trusting: Trusting) -> tuple[Recipe, Path | None]:
    """The recipe, and the model that a run has saved, where the target is a run."""
    from paceline.verbs.asked import build_recipe
    from paceline.verbs.check import of_run

    if target is not None and (target / "recipe.yaml").is_file() and not source.given():
        return of_run(target, settings, trusting.trust())
    return build_recipe(target, source.model, source.data, settings, verb="check", trust=trusting.trust()), None
