"""``paceline train`` as it is typed."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.verbs.commands.options import Changes, Out, Source, Trusting
from paceline.verbs.commands.ranks import Joining, Launch, alone_in_a_job, launch_training


class BadRows(StrEnum):
    """What happens to a row that cannot be used."""

    STOP = "stop"
    SKIP = "skip"


def train(
    *,
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="TARGET", help="Recipe (YAML), or data; with --resume, a run folder.", show_default=False
        ),
    ] = None,
    source: Source,
    out: Out = None,
    changes: Changes,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    on_bad_row: Annotated[BadRows | None, typer.Option(help="Stop at a row that cannot be used, or skip it.")] = None,
    ranks: Launch,
    joining: Joining,
    trusting: Trusting,
) -> None:
    """Fine-tune, evaluate and save a model.

    \b
    paceline train reviews.csv --model distilbert-base-uncased
    paceline train --model distilbert-base-uncased --data reviews.csv --epochs 3 --lr 3e-5 --batch-size 16
    paceline train recipes/imdb_distilbert.yaml --set optimizer.lr=3e-5
    paceline train runs/x --resume
    paceline train recipes/imdb_distilbert.yaml --gpus 4
    """
    from paceline.distributed.failures import failures_told
    from paceline.verbs.asked import build_recipe, folder_to_resume

    trust, settings = trusting.trust(), changes.in_full()
    if on_bad_row:
        settings.insert(0, f"data.on_bad_row={on_bad_row.value}")
    with failures_told(joining.rank):
        asked = (
            folder_to_resume(target, [*source.given(), *["--out"] * (out is not None)])
            if resume
            else build_recipe(target, source.model, source.data, settings, trust=trust)
        )
        if ranks.given():
            launch_training(asked, settings, ranks, joining, trust)
        others = joining.others() or alone_in_a_job()
        from paceline.contract.stopwatch import process_start

        if isinstance(asked, Path):
            from paceline.verbs.train import resume as resume_run

            resume_run(asked, settings, started=process_start(), **asdict(trusting), **others)
        else:
            from paceline.verbs.train import train as train_run

            train_run(asked, out=out, started=process_start(), **others)
