"""The command line: one command a verb, each a thin shell around the Python function of the same name.

Only typer and the errors are imported here; a command imports what it needs when it runs, so that ``--help`` and
usage errors answer at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from paceline.errors import PacelineError, RecipeError, TraceError, UserError
from paceline.memory.expandable import ask_for_it
from paceline.redaction import without_credentials
from paceline.verbs.bench import app as bench_app
from paceline.verbs.short import BatchSize, Epochs, MaxLength, Rate, Seed, all_settings, meant

if TYPE_CHECKING:
    from paceline.recipe import Recipe
    from paceline.recipe.trust import Trust

INTERRUPTED = 130
"""Exit code after Ctrl-C where there was nothing to save: 128 + SIGINT, as shells count."""


_USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""What an option, argument or command raises that is not there; typer has no name for it."""


class BadRows(StrEnum):
    """What happens to a row that cannot be used."""

    STOP = "stop"
    SKIP = "skip"


class Commands(TyperGroup):
    """The one place where errors become messages and exit codes; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a person's error ends with its message and exit code, without a traceback."""
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            typer.echo(f"paceline: {without_credentials(str(error))}", err=True)
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("paceline: interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None
        except _USAGE_ERROR as error:
            verb = getattr(getattr(error, "ctx", None), "info_name", None) or ""
            told = meant(getattr(error, "option_name", None) or "", verb)
            if told is None:
                raise
            typer.echo(f"paceline: {told}", err=True)
            raise SystemExit(told.exit_code) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench_app, name="bench")

Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that came with the model.")]
TrustReferences = Annotated[
    bool, typer.Option("--trust-references", help="Run functions that a run folder's recipe names.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
Trained = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run folder, or a trained model: folder or OWNER/NAME.", show_default=False),
]


def main() -> None:
    """Entry point of the ``paceline`` command."""
    # torch.distributed.launch puts it first; it also sets LOCAL_RANK, which is read
    if sys.argv[1:] and re.fullmatch(r"--local[-_]rank=\d+", sys.argv[1]):
        del sys.argv[1]
    ask_for_it(os.environ)  # of torch, which is not loaded yet
    app(prog_name="paceline")


def _version(asked: bool) -> None:
    if asked:
        from paceline import __version__

        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def paceline(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fine-tune PyTorch models at the speed of the hardware."""


@app.command()
def train(
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="TARGET", help="Recipe (YAML), or data; with --resume, a run folder.", show_default=False
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub name or folder of a pretrained model.")] = None,
    data: Annotated[str | None, typer.Option(help="File or folder, hub:NAME or builtin:NAME.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/<name>-<time>].")] = None,
    settings: Settings = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    seed: Seed = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    on_bad_row: Annotated[BadRows | None, typer.Option(help="Stop at a row that cannot be used, or skip it.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train on this many cards, a process each.")
    ] = None,
    devices: Annotated[str | None, typer.Option(metavar="N,N,...", help="Train on these cards, such as 1,3.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train with this many processes on the CPU.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(metavar="URL", help="Join other ranks at tcp://HOST:PORT or file:///PATH.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="With --init: which one this process is.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="With --init: how many there are.")] = None,
    timeout: Annotated[
        int | None, typer.Option(min=1, metavar="SECONDS", help="How long ranks wait for one another.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    trust_references: TrustReferences = False,
) -> None:
    """Fine-tune, evaluate and save a model.

    \b
    paceline train reviews.csv --model distilbert-base-uncased
    paceline train --model distilbert-base-uncased --data reviews.csv --epochs 3 --lr 3e-5 --batch-size 16
    paceline train recipes/imdb_distilbert.yaml --set optimizer.lr=3e-5
    paceline train runs/x --resume
    paceline train recipes/imdb_distilbert.yaml --gpus 4
    """
    from paceline.cluster import failures_told
    from paceline.recipe.trust import Trust
    from paceline.verbs.asked import build_recipe, folder_to_resume

    trust = Trust(remote_code=trust_remote_code, references=trust_references)
    changes = all_settings(settings, epochs=epochs, lr=lr, batch_size=batch_size, max_length=max_length, seed=seed)
    if on_bad_row:
        changes.insert(0, f"data.on_bad_row={on_bad_row.value}")
    with failures_told(rank):
        asked = (
            folder_to_resume(target, {"--model": model, "--data": data, "--out": out})
            if resume
            else build_recipe(target, model, data, changes, trust=trust)
        )
        joining = {"--init": init, "--rank": rank, "--world-size": world_size}
        if gpus is not None or processes is not None or devices is not None:
            raise SystemExit(_launch(asked, changes, joining, trust, gpus=gpus, processes=processes, devices=devices))
        others = _others(joining, timeout)
        from paceline.stopwatch import process_start

        if isinstance(asked, Path):
            from paceline.verbs.train import resume as resume_run

            resume_run(
                asked,
                changes,
                started=process_start(),
                trust_remote_code=trust_remote_code,
                trust_references=trust_references,
                **others,
            )
        else:
            from paceline.verbs.train import train as train_run

            train_run(asked, out=out, started=process_start(), **others)


@app.command()
def trace(
    target: Annotated[
        Path | None,
        typer.Argument(metavar="TARGET", help="Recipe (YAML); or a run folder, to read.", show_default=False),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub name or folder of a pretrained model.")] = None,
    data: Annotated[str | None, typer.Option(help="File or folder, hub:NAME or builtin:NAME.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/<name>-<time>].")] = None,
    steps: Annotated[
        list[str] | None,
        typer.Option(metavar="WINDOW", help="Such as 90:100 or last-epoch:-10; repeatable [default: the recipe's]."),
    ] = None,
    # its name is given because typer 0.27 takes a metavar that is the name in capitals for it
    kind: Annotated[str | None, typer.Option("--kind", metavar="KIND", help="kineto or nsys.")] = None,
    graph: Annotated[
        str | None, typer.Option(metavar="WAY", help="launch or keep: recorded steps inside the window.")
    ] = None,
    memory_too: Annotated[bool, typer.Option("--memory", help="Allocations too.")] = False,
    try_it: Annotated[
        bool, typer.Option("--try", help="Then the window once more with the verdict's switch on.")
    ] = False,
    only_print: Annotated[bool, typer.Option("--print", help="With --kind nsys: only print the command.")] = False,
    settings: Settings = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    seed: Seed = None,
    gpus: Annotated[int | None, typer.Option(min=1, metavar="N", help="As of train.")] = None,
    devices: Annotated[str | None, typer.Option(metavar="N,N,...", help="As of train.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, metavar="N", help="As of train.")] = None,
    init: Annotated[str | None, typer.Option(metavar="URL", help="As of train.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, metavar="R", help="As of train.")] = None,
    world_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="As of train.")] = None,
    timeout: Annotated[int | None, typer.Option(min=1, metavar="SECONDS", help="As of train.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    trust_references: TrustReferences = False,
) -> None:
    """Train with some steps traced, and say what they wait for.

    \b
    paceline trace recipes/imdb_distilbert.yaml --steps 90:100 --try
    paceline trace recipes/imdb_bert_ddp_nvtx.yaml --kind nsys --gpus 4
    paceline trace runs/x
    """
    from paceline.cluster import failures_told
    from paceline.recipe.trust import Trust, switches
    from paceline.verbs import trace as tracing
    from paceline.verbs.asked import build_recipe

    trust = Trust(remote_code=trust_remote_code, references=trust_references)
    changed = all_settings(settings, epochs=epochs, lr=lr, batch_size=batch_size, max_length=max_length, seed=seed)
    if target is not None and target.is_dir():
        given: dict[str, object] = {"--model": model, "--data": data, "--out": out, "--steps": steps, "--kind": kind}
        given |= {"--graph": graph, "--memory": memory_too, "--print": only_print, "--set": settings, "--gpus": gpus}
        given |= {
            "--epochs": epochs,
            "--lr": lr,
            "--batch-size": batch_size,
            "--max-length": max_length,
            "--seed": seed,
        }
        given |= {"--devices": devices, "--processes": processes, "--init": init, "--world-size": world_size}
        _read_only(target, [name for name, value in (given | {"--timeout": timeout}).items() if value])
        tracing.show(target, typer.echo)
        if try_it:
            typer.echo(tracing.tried(target, typer.echo, trust=trust))
        return
    with failures_told(rank):
        recipe = build_recipe(target, model, data, changed, verb="trace", trust=trust)
        changes = tracing.trace_settings(recipe, steps or (), kind, graph, memory=memory_too)
        recipe = recipe.with_settings(changes)
        if only_print and recipe.trace.kind != "nsys":
            why = "only for nsys is there a command to print"
            raise RecipeError(f"--print with trace.kind = {recipe.trace.kind}", why, "leave it out, or --kind nsys")
        joining = {"--init": init, "--rank": rank, "--world-size": world_size}
        ranks = {"--gpus": gpus, "--devices": devices, "--processes": processes}
        around = recipe.trace.kind == "nsys" and (only_print or "NSYS_PROFILING_SESSION_ID" not in os.environ)
        if try_it or around:
            folder = out or tracing.new_folder(recipe.name)
            options = {"--model": model, "--data": data, "--out": folder, **ranks, **joining, "--timeout": timeout}
            words = ["train", *([str(target)] if target else [])]
            words += [part for name, value in options.items() if value is not None for part in (name, str(value))]
            words += [part for change in (*changed, *changes) for part in ("--set", change)]
            words += switches(recipe).split()  # the recipe is the person's, or has been allowed above
            if not try_it:
                raise SystemExit(tracing.under_nsys(words, folder, recipe, typer.echo, only_print=only_print))
            _refuse_try(recipe, joining)
            if code := tracing.train_first(words):
                raise SystemExit(code)
            made = Trust(remote_code=True, references=True)  # the folder was made just now, from that recipe
            typer.echo(tracing.tried(folder, typer.echo, trust=made))
            return
        if any(value is not None for value in ranks.values()):
            raise SystemExit(_launch(recipe, changes, joining, trust, gpus=gpus, processes=processes, devices=devices))
        from paceline.stopwatch import process_start
        from paceline.verbs.train import train as train_run

        train_run(recipe, out=out, started=process_start(), **_others(joining, timeout))


@app.command()
def plan(
    target: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="Recipe (YAML), also a run's own.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub name or folder of a pretrained model.")] = None,
    data: Annotated[str | None, typer.Option(help="File or folder, hub:NAME or builtin:NAME.")] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="CARD", help="A card, such as a100-80gb, or its memory: 24GiB [default: this machine's]."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="Cards, a process each.")] = 1,
    settings: Settings = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    seed: Seed = None,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Read and encode the data to know their sizes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, sizes in bytes.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    trust_references: TrustReferences = False,
) -> None:
    """Predict a run's memory, and what fits, without a card.

    \b
    paceline plan recipes/imdb_bert_large.yaml --gpu v100-32gb
    paceline plan recipes/imdb_bert_large.yaml --gpu 24GiB --set techniques.recompute=true --json
    """
    import json

    from rich.console import Console

    from paceline.recipe.trust import Trust
    from paceline.verbs import plan as planning
    from paceline.verbs.asked import build_recipe

    trust = Trust(remote_code=trust_remote_code, references=trust_references)
    settings = all_settings(settings, epochs=epochs, lr=lr, batch_size=batch_size, max_length=max_length, seed=seed)
    recipe = build_recipe(target, model, data, settings, verb="plan", trust=trust)
    try:
        with Console(stderr=True, markup=False).status("tracing the step") as status:
            found = planning.plan(recipe, gpu=gpu, gpus=gpus, read_data=read_data, progress=status.update)
    except TraceError as error:
        if gpu is not None or gpus != 1 or as_json or recipe.model.train == "features":
            raise
        # without --gpu the plan is of this machine's card, which can tell
        typer.echo(f"{error.what}: {error.why}; so its first steps are measured on this card", err=True)
        _measure_stages(recipe, (), None, as_json=False)
        return
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=2))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        planning.draw(found, console)
    else:
        typer.echo(planning.shown(found), nl=False)


@app.command()
def memory(
    target: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="Recipe (YAML), also a run's own.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub name or folder of a pretrained model.")] = None,
    data: Annotated[str | None, typer.Option(help="File or folder, hub:NAME or builtin:NAME.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="'KEY=VALUE ...'", help="Then once more with this too; repeatable."),
    ] = None,
    settings: Settings = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: BatchSize = None,
    max_length: MaxLength = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="Folder for memory.json and report.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, sizes in bytes.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    trust_references: TrustReferences = False,
) -> None:
    """Measure what each stage of a run adds on this card.

    \b
    paceline memory recipes/memory_anatomy.yaml
    paceline memory recipes/memory_anatomy.yaml --with loop.micro_batch_size=1 --with techniques.recompute=true
    """
    from paceline.recipe.trust import Trust
    from paceline.verbs.asked import build_recipe

    trust = Trust(remote_code=trust_remote_code, references=trust_references)
    settings = all_settings(settings, epochs=epochs, lr=lr, batch_size=batch_size, max_length=max_length, seed=seed)
    recipe = build_recipe(target, model, data, settings, verb="memory", trust=trust)
    _measure_stages(recipe, changes or (), out, as_json=as_json)


def _measure_stages(recipe: Recipe, changes: Sequence[str], out: Path | None, *, as_json: bool) -> None:
    import json

    from rich.console import Console

    from paceline.verbs import memory as measuring

    with Console(stderr=True, markup=False).status("measuring") as status:
        found = measuring.memory(recipe, changes, out=out, progress=status.update)
    typer.echo(json.dumps(found.plain(), indent=2) if as_json else measuring.shown(found), nl=as_json)
    if out is not None and not as_json:
        typer.echo(f"wrote {out / 'report.html'}")


@app.command()
def calibrate() -> None:
    """Measure what this machine's card takes for itself, for plans.

    \b
    paceline calibrate
    """
    from rich.console import Console

    from paceline.facts import this_machine
    from paceline.memory.calibrate import calibrate as measure

    with Console(stderr=True, markup=False).status("measuring") as status:
        found = measure(this_machine(), progress=status.update)
    constants, mib = found.constants, 2**20
    each = " + ".join(f"{size / mib:,.0f}" for size in constants.workspaces)
    rows = {
        "context": f"{constants.context / mib:,.0f} MiB, the driver's and the code of a run's kernels",
        "workspaces": f"{each} MiB, cuBLAS's, of the forward and of the backward pass",
        "communicator": "not measured: it takes two cards"
        if constants.communicator is None
        else f"{constants.communicator / mib:,.0f} MiB, NCCL's on two cards",
        "products": f"{found.flops_per_second / 1e12:,.0f} TFLOP/s, bf16, 8192 x 8192",
    }
    typer.echo(found.card)
    for name, value in rows.items():
        typer.echo(f"  {name:<12}  {value}")
    typer.echo(f"plans for this card use them from now on: {found.file}")


@app.command()
def evaluate(
    run: Trained,
    data: Annotated[str | None, typer.Option(help="Labelled data [default: the run's own].")] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    settings: Settings = None,
    gpus: Annotated[int | None, typer.Option(min=1, metavar="N", help="As of train.")] = None,
    devices: Annotated[str | None, typer.Option(metavar="N,N,...", help="As of train.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, metavar="N", help="As of train.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    trust_references: TrustReferences = False,
) -> None:
    """Measure a saved model on labelled data.

    \b
    paceline evaluate runs/reviews
    paceline evaluate runs/reviews --split validation
    paceline evaluate runs/reviews --data test.csv --set data.label=stars
    paceline evaluate OWNER/NAME --data test.csv
    paceline evaluate runs/reviews --gpus 4
    """
    from paceline.cluster import failures_told, find_place
    from paceline.verbs.launch import launch_if_asked

    launch_if_asked(gpus=gpus, devices=devices, processes=processes)
    with failures_told():
        from paceline.verbs.evaluate import evaluate as evaluate_run

        place = find_place(os.environ)
        ranks: dict[str, Any] = {"place": place} if place.is_rank else {}
        record = evaluate_run(
            run,
            data=data,
            split=split,
            settings=settings or (),
            trust_remote_code=trust_remote_code,
            trust_references=trust_references,
            **ranks,
        )
    if place.rank:
        return
    rows = {"loss": record.loss, **record.metrics}
    width = max(len(name) for name in rows)
    typer.echo(f"{data or record.split}: {record.samples:,} samples in {record.seconds:.1f} s")
    for name, value in rows.items():
        typer.echo(f"  {name:<{width}}  {value:.4f}")


@app.command()
def predict(
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
    trust_remote_code: TrustRemoteCode = False,
    trust_references: TrustReferences = False,
) -> None:
    """Label new rows: the row, its label and the probabilities.

    \b
    paceline predict runs/reviews --text "A wonderful evening."
    paceline predict runs/reviews new.csv -o out.csv
    cut -f 2 new.tsv | paceline predict runs/reviews -
    cut -f 2,3 pairs.tsv | paceline predict runs/pairs - --pair -
    paceline predict OWNER/NAME new.csv -o out.csv
    """
    from paceline.verbs.predict import predict as predict_rows
    from paceline.verbs.typed import shown, typed

    trusts: dict[str, Any] = {"trust_remote_code": trust_remote_code, "trust_references": trust_references}
    given = typed(data, texts or (), pairs or (), settings or (), sys.stdin)
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
        num_rows = predict_rows(run, data, out, settings=settings or (), **trusts)
    else:
        num_rows = predict_rows(run, None, out, rows=given.rows, settings=given.settings, **trusts)
    typer.echo(f"wrote {out}: {num_rows:,} rows")


@app.command()
def demo() -> None:
    """Train a small classifier on embedded data, offline.

    \b
    paceline demo
    """
    from paceline.verbs.demo import demo as run_demo

    run_demo()


@app.command()
def doctor() -> None:
    """Describe this machine and what it lacks.

    \b
    paceline doctor
    """
    from paceline.verbs.doctor import doctor as examine_machine

    examine_machine()


@app.command()
def techniques() -> None:
    """List the techniques and what each preserves.

    \b
    paceline techniques
    """
    from paceline.verbs.techniques import techniques as list_techniques

    list_techniques()


@app.command()
def schema() -> None:
    """Print the recipe's JSON schema, for editors.

    \b
    paceline schema > recipe.schema.json
    """
    from paceline.verbs.schema import schema as print_schema

    print_schema()


@app.command()
def report(run: RunFolder) -> None:
    """Write a run's report.html again.

    \b
    paceline report runs/reviews
    """
    from paceline.verbs.report import report as write_report

    typer.echo(f"wrote {write_report(run)}")


@app.command("data")
def data_set(
    name: Annotated[str, typer.Argument(help="Data set to fetch: imdb.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where its files go.", show_default=False)],
) -> None:
    """Download a data set and write its split files.

    \b
    paceline data imdb data/imdb
    """
    from paceline.verbs.data import data as fetch

    for path in fetch(name, folder):
        typer.echo(f"wrote {path}")


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Model with .bin, .pt or .pth weights.")],
) -> None:
    """Write safetensors beside pickled weights, running no code.

    \b
    paceline convert models/old
    """
    from paceline.models.convert import convert as convert_weights

    for path in convert_weights(folder):
        typer.echo(f"wrote {path}")


def _launch(asked: Recipe | Path, changes: Sequence[str], joining: dict[str, Any], trust: Trust, **options: Any) -> int:
    """Run this command, which trains a recipe or resumes a folder, as several ranks; returns the exit code."""
    import functools
    import os
    import shlex

    from paceline.facts import this_machine
    from paceline.verbs.launch import choose_ranks, launch, rank_command, without_launch
    from paceline.verbs.launch.check import check_recipe
    from paceline.verbs.train import recipe_to_resume

    command = shlex.join(["paceline", *without_launch(sys.argv[1:])])
    given = [name for name, value in joining.items() if value is not None]
    if given:
        option = next(f"--{name} {value}" for name, value in options.items() if value is not None)
        why = f"{option} starts all ranks here and numbers them; {given[0]} joins ranks that were started one by one"
        raise UserError(f"{option} with {', '.join(given)}", why, f"leave out {' '.join(given)}, or {option}")
    recipe = recipe_to_resume(asked, changes, trust) if isinstance(asked, Path) else asked
    facts = functools.cache(this_machine)
    ranks = choose_ranks(command, facts, os.environ, device=recipe.device, **options)
    check_recipe(recipe, ranks, facts(), sys.argv[1:])
    return launch(rank_command(), ranks)


def _read_only(folder: Path, given: Sequence[str]) -> None:
    if given:
        why = "what was traced in a run folder is only read"
        fix = f"leave it out, or name a recipe: paceline trace {folder / 'recipe.yaml'} {given[0]} ..."
        raise UserError(f"{folder} with {', '.join(given)}", why, fix)


def _refuse_try(recipe: Recipe, joining: dict[str, Any]) -> None:
    """What cannot be run twice."""
    from paceline.cluster import find_place

    if recipe.trace.kind == "nsys":
        raise RecipeError("--try with trace.kind = nsys", "nsys' report has no verdict", "--kind kineto")
    if any(value is not None for value in joining.values()) or find_place(os.environ).world_size > 1:
        why = "it makes two runs, and these ranks were started for one"
        raise UserError("--try among ranks", why, "paceline trace RECIPE --try --gpus N starts the ranks of both")


def _others(joining: dict[str, Any], timeout: int | None) -> dict[str, Any]:
    """What ``train`` is told of the other ranks; nothing where it finds everything in the environment."""
    if timeout is None and not any(value is not None for value in joining.values()):
        return {}
    import os

    from paceline.cluster import find_place

    place = find_place(os.environ, init=joining["--init"], rank=joining["--rank"], world_size=joining["--world-size"])
    if place.started == "alone":
        why = "nobody waits for anybody: this process is no rank"
        raise UserError(f"--timeout {timeout}", why, "leave it out, or start ranks: --gpus N, or --processes N")
    return {"place": place} if timeout is None else {"place": place, "timeout_seconds": timeout}


if __name__ == "__main__":
    main()
