"""``paceline plan`` as it is typed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.contract.errors import TraceError
from paceline.verbs.commands.memory import measure_stages
from paceline.verbs.commands.options import Changes, RecipeFile, Source, Trusting
from paceline.verbs.commands.ranks import gpus_typed


def plan(
    *,
    target: RecipeFile = None,
    source: Source,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A GPU, such as a100-80gb, or its memory: 24GiB [default: this machine's]."),
    ] = None,
    gpus: Annotated[Any, typer.Option(parser=gpus_typed, metavar="N|all", help="GPUs, a process each.")] = 1,
    changes: Changes,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read and encode the data to know their sizes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, sizes in bytes.")] = False,
    trusting: Trusting,
) -> None:
    """Predict a run's memory, and what fits, without a GPU.

    \b
    paceline plan recipes/imdb_bert_large.yaml --gpu v100-32gb
    paceline plan recipes/imdb_bert_large.yaml --gpu 24GiB --set techniques.recompute=true --json
    """
    import json

    from rich.console import Console

    from paceline.verbs import plan as planning
    from paceline.verbs.asked import build_recipe
    from paceline.verbs.plan_shown import draw, shown

    recipe = build_recipe(target, source.model, source.data, changes.in_full(), verb="plan", trust=trusting.trust())
    try:
        with Console(stderr=True, markup=False).status("tracing the step") as status:
            found = planning.plan(recipe, gpu=gpu, gpus=gpus, read_data=read_data, progress=status.update)
    except TraceError as error:
        if gpu is not None or gpus != 1 or as_json or recipe.model.train == "features":
            raise
        # without --gpu the plan is of this machine's GPU, which can tell
        typer.echo(f"{error.what}: {error.why}; so its first steps are measured on this GPU", err=True)
        measure_stages(recipe, (), None, as_json=False)
        return
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        draw(found, console)
    else:
        typer.echo(shown(found), nl=False)
