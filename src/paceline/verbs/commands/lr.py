"""``paceline lr`` as it is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.verbs.commands.options import Changes, RecipeFile, Source, Trusting


def lr(
    *,
    target: RecipeFile = None,
    source: Source,
    first: Annotated[float, typer.Option("--from", metavar="RATE", help="Rate of the first step.")] = 1e-7,
    last: Annotated[float, typer.Option("--to", metavar="RATE", help="Rate of the last step.")] = 1.0,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps, fewer where the loss diverges.")] = 100,
    changes: Changes,
    out: Annotated[Path | None, typer.Option(help="Folder for lr.json and report.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trusting: Trusting,
) -> None:
    """Find a learning rate in a few steps, without a run.

    \b
    paceline lr recipes/imdb_distilbert.yaml
    paceline lr --model distilbert-base-uncased --data reviews.csv --steps 200 --out rates
    """
    import json

    from rich.console import Console

    from paceline.verbs import lr as testing
    from paceline.verbs.asked import build_recipe
    from paceline.verbs.commands.ranks import require_one_process

    require_one_process("paceline lr")
    recipe = build_recipe(target, source.model, source.data, changes.in_full(), verb="lr", trust=trusting.trust())
    with Console(stderr=True, markup=False).status("reading data and model") as status:
        found = testing.lr(
            recipe,
            first=first,
            last=last,
            steps=steps,
            out=out,
            progress=lambda step: status.update(f"step {step} of {steps}"),
        )
    typer.echo(json.dumps(testing.plain(found), indent=2) if as_json else testing.shown(found), nl=as_json)
    if out is not None and not as_json:
        typer.echo(f"wrote {out / 'report.html'}")
