"""``paceline evaluate`` as it is typed."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from paceline.verbs.commands.options import Settings, Trained, Trusting, Views, with_views
from paceline.verbs.commands.ranks import Launch


def evaluate(
    *,
    run: Trained,
    data: Annotated[str | None, typer.Option(help="Labelled data [default: the run's own].")] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    settings: Settings = None,
    tta: Views = None,
    ranks: Annotated[Launch, "As of train."],
    trusting: Trusting,
) -> None:
    """Measure a saved model on labelled data.

    \b
    paceline evaluate runs/reviews
    paceline evaluate runs/reviews --split validation
    paceline evaluate runs/reviews --data test.csv --set data.label=stars
    paceline evaluate OWNER/NAME --data test.csv
    paceline evaluate runs/reviews --gpus 4
    paceline evaluate runs/reviews --tta windows
    """
    from paceline.distributed.failures import failures_told
    from paceline.machine.cluster import find_place
    from paceline.observe.formats import figure
    from paceline.verbs.launch import launch_if_asked

    changes = with_views(settings, tta)
    launch_if_asked(**asdict(ranks))
    with failures_told():
        from paceline.verbs.evaluate import evaluate as evaluate_run

        place = find_place(os.environ)
        others: dict[str, Any] = {"place": place} if place.is_rank else {}
        record = evaluate_run(run, data=data, split=split, settings=changes, **asdict(trusting), **others)
    if place.rank:
        return
    rows = {"loss": record.loss, **record.metrics}
    width = max(len(name) for name in rows)
    typer.echo(f"{data or record.split}: {record.samples:,} samples in {record.seconds:.1f} s")
    for name, value in rows.items():
        typer.echo(f"  {name:<{width}}  {figure(value)}")
