"""``paceline predict`` as it is typed."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.contract.errors import UserError
from paceline.verbs.commands.options import Settings, Trained, Trusting, Views, with_views


def predict(
    *,
    run: Trained,
    data: Annotated[
        str | None,
        typer.Argument(metavar="INPUT", help="Rows to label; - reads a text a line from standard input."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write: .csv, .tsv or .jsonl.")] = None,
    texts: Annotated[
        list[str] | None, typer.Option("--text", metavar="TEXT", help="A text to label; repeatable; - as INPUT.")
    ] = None,
    pairs: Annotated[
        list[str] | None, typer.Option("--pair", metavar="TEXT", help="Each --text's second text; -: after a tab.")
    ] = None,
    safe_csv: Annotated[
        bool, typer.Option("--safe-csv", help="An apostrophe before cells that a spreadsheet takes for formulas.")
    ] = False,
    settings: Settings = None,
    tta: Views = None,
    trusting: Trusting,
) -> None:
    """Label new rows: the row, its label and the probabilities.

    \b
    paceline predict runs/reviews --text "A wonderful evening."
    paceline predict runs/reviews new.csv -o out.csv
    cut -f 2 new.tsv | paceline predict runs/reviews -
    cut -f 2,3 pairs.tsv | paceline predict runs/pairs - --pair -
    paceline predict OWNER/NAME new.csv -o out.csv
    paceline predict runs/birds photos/ -o out.csv --tta flip,crop5
    """
    from paceline.verbs.commands.ranks import require_one_process
    from paceline.verbs.predict import predict as predict_rows
    from paceline.verbs.typed import shown, typed

    require_one_process("paceline predict")
    trusts: dict[str, Any] = asdict(trusting)
    changes = with_views(settings, tta)
    given = typed(data, texts or (), pairs or (), changes, sys.stdin)
    if out is None and safe_csv:
        raise UserError("--safe-csv without -o", "only a file that a spreadsheet opens has formulas", "-o out.csv")
    if out is None:
        if given is None:
            raise UserError(f"{data}: nowhere to write", "a file of rows becomes a file of labelled rows", "-o out.csv")
        for line in shown(predict_rows(run, rows=given.rows, settings=given.settings, **trusts)):
            typer.echo(line)
        return
    trusts["safe_csv"] = safe_csv
    if given is None:
        num_rows = predict_rows(run, data, out, settings=changes, **trusts)
    else:
        num_rows = predict_rows(run, None, out, rows=given.rows, settings=given.settings, **trusts)
    typer.echo(f"wrote {out}: {num_rows:,} rows")
