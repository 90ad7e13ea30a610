"""``paceline memory`` as it is typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.verbs.commands.options import Changes, RecipeFile, Source, Trusting

if TYPE_CHECKING:
    from paceline.recipe import Recipe


def memory(
    *,
    target: RecipeFile = None,
    source: Source,
    rungs: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="'KEY=VALUE ...'", help="Then once more with this too; repeatable."),
    ] = None,
    changes: Changes,
    out: Annotated[Path | None, typer.Option(help="Folder for memory.json and report.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, sizes in bytes.")] = False,
    trusting: Trusting,
) -> None:
    """Measure what each stage of a run adds on this GPU.

    \b
    paceline memory recipes/memory_anatomy.yaml
    paceline memory recipes/memory_anatomy.yaml --with loop.micro_batch_size=1 --with techniques.recompute=true
    """
    from paceline.verbs.asked import build_recipe

    recipe = build_recipe(target, source.model, source.data, changes.in_full(), verb="memory", trust=trusting.trust())
    measure_stages(recipe, rungs or (), out, as_json=as_json)


def measure_stages(recipe: Recipe, changes: Sequence[str], out: Path | None, *, as_json: bool) -> None:
    """Measure the stages of a recipe, and of the recipe with changes, and print what was found."""
    import json

    from rich.console import Console

    from paceline.verbs import memory as measuring

    with Console(stderr=True, markup=False).status("measuring") as status:
        found = measuring.memory(recipe, changes, out=out, progress=status.update)
    typer.echo(json.dumps(found.plain(), indent=2) if as_json else measuring.shown(found), nl=as_json)
    if out is not None and not as_json:
        typer.echo(f"wrote {out / 'report.html'}")
